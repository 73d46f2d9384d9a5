"""Decides whether two mathematical expressions are equal. Structure is compared by rules of our own, single expressions by
math-verify (sympy).

`answer_reading.math_value` handles what it can read: numbers, and numbers with units. All other answers are compared here. Lists,
tuples, intervals and sets are taken apart and their elements compared one by one, so sympy sees only single expressions in a
strict alphabet. Anything that could mean two answers (`x > 5`, `\\pm 5`, words) equals nothing.

Needs `prepare`, which imports sympy: a scorer cannot import it in its jail.
"""

import functools
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

from open_instruct.verifiers.answer_reading import math_value, without_font, without_spacing
from open_instruct.verifiers.math_names import (
    begins_a_statement,
    has_variable,
    is_multiple_of_a_variable,
    may_be_same,
    may_stand_before_equals,
    name_of,
)
from open_instruct.verifiers.math_parts import (
    Parts,
    bracketed,
    listed,
    matrix,
    sides_of_equation,
    union,
    without_thousands,
)

LONGEST = 300
"""Longest expression, in characters, that is passed to sympy."""
PATIENCE_S = 2.0
"""Seconds that one comparison of two expressions may take. After that they count as not equal."""
PATIENCE_IN_ALL_S = 6.0
"""Seconds after which no further element of a list, a set or a matrix is compared."""
_end: ContextVar[float] = ContextVar("end", default=math.inf)
MOST_DIGITS = 30
MOST_ELEMENTS = 16
LARGEST_EXPONENT = 1000
LARGEST_FACTORIAL = 100

_COMMANDS = frozenset(
    re.findall(
        "[a-z]+",
        "frac dfrac tfrac sqrt pi cdot times div left right infty ln log exp sin cos tan cot sec csc arcsin arccos arctan sinh "
        "cosh tanh theta alpha beta gamma delta lambda mu phi rho sigma tau omega epsilon binom",
    )
)
_DEGREES = re.compile(r"(?:\^\{?\\circ\}?|\\degree|°|\\,?\\?\$)")
_UNMISTAKABLE_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!) *(?=[0-9]{3}(?![0-9]))")
"""Separators of thousands that are never anything else. A plain comma may also separate elements of a list."""
_BASE_TEN = re.compile(r"(?<=[0-9])_\{?10\}?$")
_FACTORIAL_EQUALS = re.compile(r"\A([^A-Za-z=]*[0-9]!)=")
"""`5!=120`; `x!=3` means something else."""
_SEVERAL = re.compile(r"[%<>≤≥≠∈±]|[!~]=|\\(?:pm|mp|leq?|geq?|neq?|in|lt|gt)(?![A-Za-z])")
"""Signs of a statement that more than one number satisfies, or of a percentage."""
_SEPARATE = re.compile(r"\\q?quad(?![A-Za-z])[^=]*=")
"""Space before a second statement: `x = 1 \\quad y = 2`."""
_ELEMENT_OF = re.compile(r"^[A-Za-z] *(?:\\in(?![A-Za-z])|∈)")
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
    token = _end.set(time.monotonic() + PATIENCE_IN_ALL_S)
    try:
        return _equal(left, right) or _equal_with_thousands(left, right)
    finally:
        _end.reset(token)


def prepare() -> None:
    """Import what comparisons need. Some parts are imported only during a comparison, so a few are made."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for pair in (
        (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sin x", r"\cos x"),
        ("4!", "x"),
        ("2x+3y=6", "4x+6y=12"),
    ):
        are_equal(*pair)


# --- structure --------------------------------------------------------------------------------------------------------


def _plain(latex: str) -> str | None:
    """The expression without spacing, font, degrees and base 10; None if it cannot be a single answer."""
    text = latex.strip().strip("$").rstrip(".").replace("\N{MINUS SIGN}", "-").replace("\\%", "%")
    text = _of_interval(_FACTORIAL_EQUALS.sub(r"\1 =", _UNMISTAKABLE_THOUSANDS.sub("", text)))
    if _SEVERAL.search(text) or _SEPARATE.search(text):
        return None
    return without_font(_BASE_TEN.sub("", _DEGREES.sub("", without_spacing(text)).strip())) or None


def _of_interval(text: str) -> str:
    """`[1, 2]` for `x \\in [1, 2]`; `x \\in 5` unchanged."""
    found = _ELEMENT_OF.match(text)
    inner = without_spacing(text[found.end() :]).strip() if found else ""
    return inner if found and (union(inner) or bracketed(inner)) else text


def _equal_with_thousands(answer: str, label: str) -> bool:
    """Whether the two are equal if commas separate thousands: then `1,000\\pi` is not a list of two."""
    numbers = without_thousands(answer), without_thousands(label)
    return numbers != (answer, label) and _equal(*numbers)


def _equal(answer: str, label: str) -> bool:
    if _same_value(answer, label):
        return True
    if time.monotonic() > _end.get():
        return False
    lists = listed(answer), listed(label)
    if any(lists):
        return _same_parts(*lists)
    if "=" in answer or "=" in label:
        sides, sides_of_label = sides_of_equation(answer), sides_of_equation(label)
        if sides is None or sides_of_label is None:
            return False
        if max(len(sides), len(sides_of_label)) > 1:
            return _equal_with_equations(sides, sides_of_label)
    for split in (union, bracketed, matrix):
        parts, others = split(answer), split(label)
        if parts or others:
            return _same_parts(parts, others)
    return _same_expression(answer, label)


def _same_parts(parts: Parts, others: Parts) -> bool:
    if parts is None or others is None:
        return False
    (kind, elements), (other_kind, other_elements) = parts, others
    if kind != other_kind or not 0 < len(elements) == len(other_elements) <= MOST_ELEMENTS:
        return False
    if kind == "{}":
        return _equal_as_sets(elements, other_elements)
    return all(map(_equal, elements, other_elements))


def _equal_with_equations(answer: list[str], label: list[str]) -> bool:
    """Whether an answer and a label, of which at least one is an equation, say the same. Both are given as lists of sides.

    The last side of an answer counts: `a+b = 3` is 3, because the question may ask for `a+b`. In a label only a name is left out:
    `x = 3` is 3, but `2x+3y = 6` is an equation. An equation equals its multiples: `12 = 4x+6y`, `2x+3y-6 = 0`.
    """
    *before, value = answer
    *before_in_label, wanted = label
    for left in (before, before_in_label):
        if not all(map(may_stand_before_equals, left)) or any(map(begins_a_statement, left[1:])):
            return False
    if not before_in_label:
        if is_multiple_of_a_variable(before[0]) or not _equal(value, wanted):
            return False
        return has_variable(before[0]) or not _is_safe(before[0]) or _equal(before[0], value)
    name_in_label = name_of(before_in_label[0])
    name = name_of(before[0]) if before else name_in_label
    if name and name_in_label and may_be_same(name, name_in_label) and _equal(value, wanted):
        return True
    return len(answer) == len(label) == 2 and _same_equation(answer, label)


def _same_equation(answer: list[str], label: list[str]) -> bool:
    if not all(map(_is_safe, (*answer, *label))):
        return False
    return _are_multiples("=".join(answer), "=".join(label))


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


# --- single expressions -----------------------------------------------------------------------------------------------


def _same_expression(left: str, right: str) -> bool:
    """Whether two expressions without commas are equal, decided by sympy."""
    (left, unit), (right, other_unit) = _without_unit(left), _without_unit(right)
    if unit != other_unit and unit and other_unit:
        return False
    if not (_is_safe(left) and _is_safe(right)) or (_is_number(left) and _is_number(right)):
        return False
    return _by_sympy(left, right)


def _without_unit(text: str) -> tuple[str, str]:
    """The expression and the unit after it: `2\\pi\\text{ cm}` is 2π and `cm`. `math_value` decides what counts as a unit."""
    found = _UNIT_BEHIND.match(text)
    if found is None:
        return text, ""
    number, unit = math_value("1" + text[len(found[1]) :])
    return (found[1].strip(), unit) if number == 1 and unit else (text, "")


def _is_number(text: str) -> bool:
    return isinstance(math_value(text)[0], Fraction)


def _is_safe(text: str) -> bool:
    """Whether the text is safe for sympy: only commands and letters of the alphabet above, and no number that takes for ever."""
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
    """Whether a power contains a power: `2^{3^{4}}`, or `(2^3)^4`."""
    return re.search(r"\^\{[^{}]*\^", text) is not None or re.search(r"\^[^+\-*/]*\)\}?\^", text) is not None


@functools.lru_cache(maxsize=1024)
def _by_sympy(left: str, right: str) -> bool:
    from math_verify import verify

    def compare() -> bool:
        given, wanted = _parsed(left), _parsed(right)
        return verify(wanted, given, float_rounding=12, numeric_precision=20, strict=True, timeout_seconds=0)

    return bool(within(PATIENCE_S, compare))


@functools.lru_cache(maxsize=1024)
def _are_multiples(left: str, right: str) -> bool:
    """Whether one equation is the other multiplied by a number. (math-verify would solve both, and call all equations equal that
    it cannot solve, such as `f(2) = 3` and `f(3) = 3`.)"""
    from sympy import Eq, simplify

    def compare() -> bool:
        given, wanted = _parsed(left)[0], _parsed(right)[0]
        if not all(isinstance(equation, Eq) for equation in (given, wanted)):
            return False
        ratio = simplify((given.lhs - given.rhs) / (wanted.lhs - wanted.rhs))
        return ratio.is_number and ratio.is_finite and not ratio.is_zero

    return bool(within(PATIENCE_S, compare))


def _parsed(latex: str) -> list[Any]:
    """The expression as a sympy object, then as text. Raises `ValueError` without such an object: texts were compared before."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    found = parse(f"${latex}$", kinds, parsing_timeout=0)  # without its own limit, which needs signals
    if not found or isinstance(found[0], str):
        raise ValueError(f"no expression: {latex}")
    return found


class _TookTooLong(BaseException):
    """Not an `Exception`, so that no handler inside the call swallows it."""


def within(limit_s: float, call: Callable[[], bool]) -> bool:
    """The result of `call`; False if it raises an error or takes longer than `limit_s`."""
    try:
        with _interrupted_after(limit_s):
            return call()
    except (_TookTooLong, RecursionError, MemoryError):
        return False
    except Exception:  # sympy and the parser raise anything for input that makes no sense
        return False


@contextmanager
def _interrupted_after(limit_s: float) -> Iterator[None]:
    """Interrupts the block after `limit_s` seconds. The clock is read at each call that Python makes, because the jail has no
    signals, and for some users no threads."""
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
