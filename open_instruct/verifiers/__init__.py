"""Scores responses, in processes that can do nothing but compute."""
