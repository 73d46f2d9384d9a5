"""From data sets to prompts, checked row by row."""
