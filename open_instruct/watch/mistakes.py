"""What a user can correct."""


class Mistake(ValueError):
    """A question that has no answer: the text says why, and what to do."""
