"""Turns data sets into prompts, and checks every row."""
