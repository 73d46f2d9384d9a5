"""The reasoning cache: cycles of a reasoning turn and its summary."""
