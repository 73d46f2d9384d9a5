"""Checks of the single instructions that a response must follow (ifeval)."""
