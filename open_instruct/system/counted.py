"""Numbers with their nouns, for messages: `1 row`, `1,250 rows`."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun; `plural` is the noun with an s by default."""
    return f"{number:,} {noun_of(number, noun, plural)}"


def noun_of(number: int, noun: str, plural: str | None = None) -> str:
    """The noun in the form that fits the number, where the number itself is written in another way."""
    return noun if number == 1 else plural or noun + "s"


def counted_are(number: int, noun: str) -> str:
    """A number, its noun and its verb: `1 row is`, `2 rows are`."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"
