"""A whole run: its parts put together, watched, saved and ended."""
