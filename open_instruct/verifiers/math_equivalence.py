"""Whether two mathematical expressions are equal: the structure by rules of ours, single expressions by math-verify (sympy).

`answer_reading.math_value` decides what it can read: numbers, and numbers with units. What it cannot read comes here. Lists,
tuples, intervals and sets are taken apart, and their elements compared one by one, so that sympy sees nothing but single
expressions of a strict alphabet. Whatever could be taken for two answers (`x > 5`, `\\pm 5`, words) is not equal to anything.

Needs `prepare`, which imports sympy: a scorer cannot import it in its jail.
"""

import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from open_instruct.verifiers.answer_reading import math_value

LONGEST = 300
"""Longest expression, in characters, that is given to sympy."""
PATIENCE_S = 2.0
"""Seconds that one comparison may take; then the two are not equal."""
MOST_DIGITS = 30
MOST_ELEMENTS = 12
LARGEST_EXPONENT = 1000
LARGEST_FACTORIAL = 100

_COMMANDS = frozenset(
    re.findall(
        "[a-z]+",
        "frac dfrac tfrac sqrt pi cdot times div left right infty ln log exp sin cos tan cot sec csc arcsin arccos arctan sinh "
        "cosh tanh theta alpha beta gamma delta lambda mu phi rho sigma tau omega epsilon binom",
    )
)
_OPEN_CLOSE = {"(": ")", "[": "]", "{": "}"}
_DEGREES = re.compile(r"(?:\^\{?\\circ\}?|\\degree|°|\\,?\\?\$)")
_BASE_TEN = re.compile(r"(?<=[0-9])_\{?10\}?$")
_SEVERAL = re.compile(r"[%<>≤≥≠∈±]|\\(?:pm|mp|leq?|geq?|neq?|in|lt|gt)(?![A-Za-z])")
"""Signs of a statement that more than one number fulfils, or of a share."""
_NAME = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?(?:\([A-Za-z](?:,[A-Za-z])*\))?'?")
"""What may stand before an equals sign: `x`, `a_1`, `f(x)`."""
_UNIT_BEHIND = re.compile(r"^(.*[^\\])\\(?:text|mathrm|mbox)\{([^{}]*)\}(\^\{?[23]\}?)?$")
_EXPONENT = re.compile(r"\^\{?-?([0-9]+)")
_ALLOWED = re.compile(r"[A-Za-z0-9+\-*/^_{}()\[\].!' \\|]*")


def are_equal(answer: str, label: str) -> bool:
    """Whether two expressions in LaTeX mean the same.

    `2\\sqrt{2}` and `\\sqrt{8}` do, `x = 5` and `5`, `(1, 2)` and `(1,2)`, `90^\\circ` and 90. `1, 2` and `2, 1` do not, nor do
    0.333 and `\\frac{1}{3}`.
    """
    if max(len(answer), len(label)) > LONGEST:
        return False
    left, right = _plain(answer), _plain(label)
    if left is None or right is None:
        return False
    return _equal(left, right)


def prepare() -> None:
    """Import what comparing needs, and compare once: parts of it are imported only then."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for pair in (
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sin x", r"\cos x"),
        ("4!", "x"),
    ):
        are_equal(*pair)


# --- structure --------------------------------------------------------------------------------------------------------


def _plain(latex: str) -> str | None:
    """The expression without spacing, degrees, base 10, a name before an equals sign; None if it can be no single answer."""
    text = latex.strip().strip("$").rstrip(".").replace("\N{MINUS SIGN}", "-").replace("\\%", "%")
    text = re.sub(r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[!,;: ]|~", " ", text)
    text = _BASE_TEN.sub("", _DEGREES.sub("", text).strip())
    if (
        "%" in text
        or "\\pm" in text
        or "\\mp" in text
        or re.search(r"[<>≤≥≠∈]|\\(?:leq?|geq?|neq?|in|ne|lt|gt)(?![A-Za-z])", text)
    ):
        return None
    name, equals, value = text.partition("=")
    if equals:
        if "=" in value or not _NAME.fullmatch(name.replace(" ", "")):
            return None
        text = value.strip()
    return text or None


def _equal(left: str, right: str) -> bool:
    if _same_value(left, right):
        return True
    for split in (_union, _bracketed, _listed):
        parts, others = split(left), split(right)
        if (parts is None) != (others is None):
            return False
        if parts is not None and others is not None:
            (shape, elements), (other_shape, other_elements) = parts, others
            if shape != other_shape or not 0 < len(elements) == len(other_elements) <= MOST_ELEMENTS:
                return False
            if shape == "{}":
                return _equal_as_sets(elements, other_elements)
            return all(map(_equal, elements, other_elements))
    return _same_expression(left, right)


def _same_value(left: str, right: str) -> bool:
    (value, unit), (other, other_unit) = math_value(left), math_value(right)
    return value == other and (unit == other_unit or "" in (unit, other_unit)) and "%" not in (unit, other_unit)


def _equal_as_sets(elements: list[str], others: list[str]) -> bool:
    left = list(others)
    for element in elements:
        match = next((other for other in left if _equal(element, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


Parts = tuple[str, list[str]] | None
"""The kind of a whole, and its elements; None if the text is no such whole."""


def _union(text: str) -> Parts:
    parts = re.split(r"\\cup(?![A-Za-z])|∪", text)
    return ("union", [part.strip() for part in parts]) if len(parts) > 1 else None


def _bracketed(text: str) -> Parts:
    """`(1, 2)`, `[0, 1)`, `\\{1, 2\\}`: brackets around two or more elements, or a set around one."""
    opening, closing = text[:1], text[-1:]
    inner = text[1:-1]
    if text.startswith("\\{") and text.endswith("\\}"):
        opening, closing, inner = "{", "}", text[2:-2]
    elif opening == "{" or opening not in _OPEN_CLOSE or closing not in _OPEN_CLOSE.values():
        return None
    elements = _split_at_commas(inner)
    if elements is None or (len(elements) < 2 and opening != "{"):
        return None
    return opening + closing, elements


def _listed(text: str) -> Parts:
    elements = _split_at_commas(text)
    return ("list", elements) if elements is not None and len(elements) > 1 else None


def _split_at_commas(text: str) -> list[str] | None:
    """Parts between commas outside of brackets; None if brackets do not match, or a part is empty."""
    depth, start, parts = 0, 0, []
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 and all(parts) else None


# --- single expressions -----------------------------------------------------------------------------------------------


def _same_expression(left: str, right: str) -> bool:
    """Two expressions without commas, by sympy."""
    (left, unit), (right, other_unit) = _without_unit(left), _without_unit(right)
    if unit != other_unit and unit and other_unit:
        return False
    if not (_is_safe(left) and _is_safe(right)) or (_is_number(left) and _is_number(right)):
        return False
    return _by_sympy(left, right)


def _without_unit(text: str) -> tuple[str, str]:
    """The expression and the unit behind it: `2\\pi\\text{ cm}` is 2π and `cm`. What is a unit, `math_value` says."""
    found = _UNIT_BEHIND.match(text)
    if found is None:
        return text, ""
    number, unit = math_value("1" + text[len(found[1]) :])
    return (found[1].strip(), unit) if number == 1 and unit else (text, "")


def _is_number(text: str) -> bool:
    return isinstance(math_value(text)[0], Fraction)


def _is_safe(text: str) -> bool:
    """Whether sympy can be asked: commands and letters of the alphabet above, and no number that would take for ever."""
    if not _ALLOWED.fullmatch(text) or text.count("|") % 2:
        return False
    if any(command not in _COMMANDS for command in re.findall(r"\\([A-Za-z]+)", text)):
        return False
    if re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text)) or re.search(r"\b(?:or|is|if|no|to)\b", text):
        return False  # words
    if any(len(digits) > MOST_DIGITS for digits in re.findall("[0-9]+", text)) or "!!" in text:
        return False
    if any(int(exponent) > LARGEST_EXPONENT for exponent in _EXPONENT.findall(text)) or _has_power_in_power(text):
        return False
    return all(number and int(number) <= LARGEST_FACTORIAL for number in re.findall(r"([0-9]*)\)?!", text))


def _has_power_in_power(text: str) -> bool:
    """`2^{3^{4}}`, or `(2^3)^4`."""
    return re.search(r"\^\{[^{}]*\^", text) is not None or re.search(r"\^[^+\-*/]*\)\}?\^", text) is not None


@functools.lru_cache(maxsize=1024)
def _by_sympy(left: str, right: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def parsed(text: str) -> Any:
        kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
        return parse(f"${text}$", kinds, parsing_timeout=0)  # without its own limit, which needs signals

    def compare() -> bool:
        wanted, given = parsed(right), parsed(left)
        if not wanted or not given or isinstance(wanted[0], str) or isinstance(given[0], str):
            return False  # it could not be read, and texts have been compared already
        return verify(wanted, given, float_rounding=12, numeric_precision=20, strict=True, timeout_seconds=0)

    return bool(within(PATIENCE_S, compare))


class _TookTooLong(BaseException):
    """Not an `Exception`, so that no handler inside the call swallows it."""


def within(limit_s: float, call: Callable[[], bool]) -> bool:
    """What `call` returns; False if it raises, or takes longer."""
    try:
        with _interrupted_after(limit_s):
            return call()
    except (_TookTooLong, RecursionError, MemoryError):
        return False
    except Exception:  # sympy and the parser raise anything for input that makes no sense
        return False


@contextmanager
def _interrupted_after(limit_s: float) -> Iterator[None]:
    """Looks at the clock whenever Python calls something. (There are no signals, and for some users no threads, in the jail.)"""
    end = time.monotonic() + limit_s

    def look(frame: object, event: str, argument: object) -> None:
        if time.monotonic() > end:
            raise _TookTooLong

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
