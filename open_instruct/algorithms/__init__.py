"""Losses, advantages, KL estimates and off-policy corrections: pure functions, chosen by name."""
