"""Losses, advantages, KL estimates, off-policy corrections: pure functions, found by name."""
