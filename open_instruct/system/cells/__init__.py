"""Cells: processes that handle what a model wrote, or run a user's code, and can be killed without harm to the rest."""
