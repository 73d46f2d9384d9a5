"""Reads labels as values: a number is that number however it is spelled, and a text that is JSON of texts is these texts.

    42.0, [42], "[\\"42\\"]"  ─►  42        1e-05  ─►  0.00001        "[1, 2]", which may be an interval  ─►  [1, 2]

A column of whole numbers with one missing value becomes floats in pandas, Python writes small numbers with an exponent, and
several published data sets have lists of texts as the JSON of the list.
"""

import ast
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

Number = int | float | Decimal
DEEPEST = 8
"""Most layers of lists and JSON around a label."""


def single_label(label: object) -> str:
    """A label as one text. The label may be a number, or wrapped in a list or in JSON.

    Raises:
        ValueError: the label is several texts, or no text and no number.
    """
    value = unwrapped(label)
    if isinstance(value, str):
        return value
    if is_number(value):
        return number_as_text(value)
    if isinstance(value, list) and len(value) > 1:
        cure = "Several answers of which any is right need re_search or string_f1"
    else:
        cure = "Write it as a text"
    raise ValueError(f"this verifier needs one text or number as ground truth, got {label!r:.80}. {cure}")


def texts_of(label: object) -> list[str]:
    """The texts of a label: one, or several of which any is right. Raises `ValueError` as `single_label` does."""
    value = unwrapped(label)
    return [single_label(part) for part in (value if isinstance(value, list) else [value])]


def unwrapped(label: object) -> Any:
    """A label without lists of one element and JSON around it: a text, a number, a list of several values, or what else it is."""
    for _ in range(DEEPEST):
        value = _in_json(label) if isinstance(label, str) else _plain(label)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is label:
            break
        label = value
    return label


def numbers_of(label: object) -> frozenset[Fraction]:
    """The numbers in a label of one or several values. A text is none, even `42`."""
    value = unwrapped(label)
    values = [unwrapped(part) for part in value] if isinstance(value, list) else [value]
    return frozenset(Fraction(number_as_text(number)) for number in values if is_number(number))


def _in_json(text: str) -> Any:
    """What a text says that is the JSON of a text or of a list of texts, or such a list as Python prints it; else the text.

    A list of numbers stays a text, because `[1, 2]` may be an interval.
    """
    core = text.strip()
    if core[:1] + core[-1:] not in ('""', "[]") or len(core) < 3 or core[1] == "]":
        return text
    try:
        value = json.loads(core)
    except (ValueError, RecursionError):
        value = _as_python_prints(core)
    is_list_of_texts = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
    return value if isinstance(value, str) or is_list_of_texts else text


def _as_python_prints(text: str) -> Any:
    if text[:2] not in ("['", '["'):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _plain(value: object) -> Any:
    """A number of numpy as a number of Python, with the digits that numpy prints; any other value unchanged."""
    if type(value).__module__ != "numpy" or not hasattr(value, "item"):
        return value
    number = value.item()
    return float(str(value)) if isinstance(number, float) and not isinstance(value, float) else number


def is_number(value: object) -> bool:
    """Whether a value is a finite number. True and False are none."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float | Decimal) and math.isfinite(value)


def number_as_text(number: Number) -> str:
    """The digits of a number, without an exponent and without zeros behind the last digit that says something."""
    if isinstance(number, int):
        return str(number) if number.bit_length() < 10_000 else str(Decimal(number))  # Python prints no longer ones
    digits = format(Decimal(repr(float(number))) if isinstance(number, float) else number, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits
