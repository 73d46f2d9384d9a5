"""Checks of the individual instructions that a response must follow (ifeval)."""
