"""The type of an instruction: the arguments that a label gives, and the condition that a response must meet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LESS_THAN, AT_LEAST = "less than", "at least"
_CODES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt "
    "ro ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
LANGUAGES = frozenset(_CODES.split())
"""The languages that langdetect 1.0.9 knows."""

Reader = Callable[[object], Any]
"""Reads one argument of a label; a `ValueError` says what the argument must be."""


@dataclass(frozen=True)
class Instruction:
    """One kind of instruction."""

    follows: Callable[..., bool]
    """Whether a response, the first argument, follows the instruction. The label's arguments are passed by name. Takes time
    linear in the length of the response."""
    readers: Mapping[str, Reader]
    """A reader for each argument, by name. All arguments are needed; an argument that is None counts as absent."""

    def read(self, kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The checked arguments of a label.

        Raises:
            ValueError: an argument is missing, unknown, or not of its kind.
        """
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if missing := sorted(set(self.readers) - set(kwargs)):
            raise ValueError(f"it needs {', '.join(missing)}")
        if unknown := sorted(set(kwargs) - set(self.readers)):
            raise ValueError(f"it has no argument {', '.join(map(str, unknown))}")
        arguments = {}
        for name, value in kwargs.items():
            try:
                arguments[name] = self.readers[name](value)
            except ValueError as error:
                raise ValueError(f"{name} must be {error}, got {value!r:.60}") from None
        return arguments


def instruction(follows: Callable[..., bool], **readers: Reader) -> Instruction:
    """Makes an entry for a table of instructions."""
    return Instruction(follows, readers)


def compare(number: int, relation: str, limit: int) -> bool:
    """Whether `number` is `at least` or `less than` the limit."""
    return number >= limit if relation == AT_LEAST else number < limit


# --- readers ----------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """A text that is not blank, unchanged."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def word(value: object) -> str:
    """A text without surrounding space. Some of open-instruct's data wraps it in a list, whose first element counts."""
    return text(value[0] if isinstance(value, list) and value else value).strip()


def words(value: object) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list) or not value:
        raise ValueError("a list of texts")
    return [text(item) for item in value]


def count(value: object) -> int:
    """A whole number from 0. Parquet files store 3 as 3.0 if other rows have no value in the column."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0 or value % 1:
        raise ValueError("a whole number from 0 on")
    return int(value)


def position(value: object) -> int:
    """A whole number from 1."""
    if not count(value):
        raise ValueError("a whole number from 1 on")
    return count(value)


def relation(value: object) -> str:
    """`less than` or `at least`."""
    if value not in (LESS_THAN, AT_LEAST):
        raise ValueError(f"{LESS_THAN!r} or {AT_LEAST!r}")
    return str(value)


def letter(value: object) -> str:
    """One character."""
    if len(char := word(value)) != 1:
        raise ValueError("one letter")
    return char


def language(value: object) -> str:
    """The code of a language that can be recognised."""
    if value not in LANGUAGES:
        raise ValueError(f"the code of a language ({', '.join(sorted(LANGUAGES))})")
    return str(value)
