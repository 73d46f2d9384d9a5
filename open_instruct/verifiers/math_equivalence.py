"""Decides whether two mathematical answers in LaTeX are equal. Structure is compared here, single expressions by their values.

`answer_reading.math_value` handles what it can read: numbers, and numbers with units. All other answers are compared here. Lists,
tuples, sets, unions, relations and equations are taken apart (`math_parts.py`), and their elements compared one by one.
A single expression is read as a whole or not at all (`math_syntax.py`), and two expressions are equal if they have the same value
(`math_values.py`). What is not read equals only the same text.

Needs `prepare`, which imports mpmath: a scorer cannot import it in its jail.
"""

import functools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction

from open_instruct.verifiers import math_values
from open_instruct.verifiers.answer_reading import (
    has_dollars,
    math_value,
    without_font,
    without_full_stop,
    without_spacing,
)
from open_instruct.verifiers.math_forms import are_same_words, as_latex, is_date
from open_instruct.verifiers.math_names import (
    begins_a_statement,
    has_variable,
    is_multiple_of_a_variable,
    may_be_same,
    may_stand_before_equals,
    name_of,
)
from open_instruct.verifiers.math_order import products_in_order
from open_instruct.verifiers.math_parts import (
    ANY_ORDER,
    Parts,
    alternatives,
    bracketed,
    listed,
    matrix,
    relation,
    sides_of_equation,
    union,
    with_signs,
    without_thousands,
)
from open_instruct.verifiers.math_signs import in_latex
from open_instruct.verifiers.math_syntax import read_expression
from open_instruct.verifiers.math_tokens import Unreadable, has_call, names_in
from open_instruct.verifiers.math_units import units_agree

LONGEST = 300
"""Longest expression, in characters, that is compared."""
PATIENCE_S = 2.0
"""Seconds of a processor that one comparison of two expressions may take. After that they count as not equal."""
PATIENCE_IN_ALL_S = 6.0
"""Seconds of a processor after which no further element of a list, a set or a matrix is compared."""
_end: ContextVar[float] = ContextVar("end", default=math.inf)
MOST_ELEMENTS = 16

_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°")
_DOLLARS = re.compile(r"\\?,?\\?\$")
_ANGLE = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
"""A trigonometric function, in which degrees are not left out."""
_UNMISTAKABLE_THOUSANDS = re.compile(r"(?<=[0-9])(?<!(?<![0-9])0)(?:\{,\}|,\\!|\\,) *(?=[0-9]{3}(?![0-9]))")
"""Separators of thousands that are never anything else. A plain comma may also separate elements of a list."""
_FACTORIAL_EQUALS = re.compile(r"\A([^A-Za-z=]*[0-9]!)=")
"""`5!=120`; `x!=3` means something else."""
_WIDE_SPACE = re.compile(r"\\q?quad(?![A-Za-z])")
_SPACE_BESIDE_COMMA = re.compile(
    rf"(?<=[,{ANY_ORDER}])\s*(?:{_WIDE_SPACE.pattern}\s*)+|(?:{_WIDE_SPACE.pattern}\s*)+(?=[,{ANY_ORDER}])"
)
_ELEMENT_OF = re.compile(r"^[A-Za-z] *(?:\\in(?![A-Za-z])|∈)")
_LETTERS = re.compile("[A-Za-z ]+")
"""Letters without any operator, index or digit are no product: `No` is not `oN`."""
_UNIT_BEHIND = re.compile(r"^(.*[^\\])\\(?:text|mathrm|mbox)\{([^{}]*)\}(\^\{?[23]\}?)?$")


def are_equal(answer: str, label: str) -> bool:
    """Whether two expressions in LaTeX mean the same.

    `2\\sqrt{2}` and `\\sqrt{8}` do, `x = 5` and `5`, `(1, 2)` and `(1,2)`, `90^\\circ` and 90, `x \\geq 2` and `2 \\leq x`.
    `1, 2` and `2, 1` do not, nor do 0.333 and `\\frac{1}{3}`.
    """
    if max(len(answer), len(label)) > LONGEST or is_date(answer) or is_date(label):
        return False
    if are_same_words(answer, label):
        return True
    left, right = _plain(answer), _plain(label)
    if left is None or right is None or not (_is_money(answer, right) and _is_money(label, left)):
        return False
    token = _end.set(time.thread_time() + PATIENCE_IN_ALL_S)
    try:
        return _equal(left, right) or _equal_with_thousands(left, right)
    finally:
        _end.reset(token)


def prepare() -> None:
    """Import what comparisons need. Some parts are imported only during a comparison, so a few are made."""
    for pair in ((r"\sin(2x)", r"2\sin x\cos x"), (r"\ln\sqrt{2}", r"\frac{\ln 2}{2}"), ("x+y=1", "2x+2y=2")):
        are_equal(*pair)


# --- structure --------------------------------------------------------------------------------------------------------


def _plain(latex: str) -> str | None:
    """The expression without spacing, font and degrees, with one sign for each relation; None if it is two statements."""
    text = as_latex(in_latex(without_full_stop(latex.strip().strip("$")))).replace("\\%", "%")
    text = with_signs(_FACTORIAL_EQUALS.sub(r"\1 =", _UNMISTAKABLE_THOUSANDS.sub("", text)))
    text = _of_interval(_SPACE_BESIDE_COMMA.sub(" ", text))
    if _WIDE_SPACE.search(text) or "~=" in text:
        return None
    text = _DOLLARS.sub("", without_spacing(text)).strip()
    if not _ANGLE.search(text):
        text = _DEGREES.sub("", text).strip()
    return without_font(text) or None


def _of_interval(text: str) -> str:
    """`[1, 2]` for `x \\in [1, 2]`; `x \\in 5` unchanged."""
    match = _ELEMENT_OF.match(text)
    inner = without_spacing(text[match.end() :]).strip() if match else ""
    return inner if match and (union(inner) or bracketed(inner)) else text


def _equal_with_thousands(answer: str, label: str) -> bool:
    """Whether the two are equal if commas separate thousands: then `1,000\\pi` is not a list of two."""
    numbers = without_thousands(answer), without_thousands(label)
    return numbers != (answer, label) and _equal(*numbers)


def _equal(answer: str, label: str) -> bool:
    if _same_value(answer, label):
        return True
    if time.thread_time() > _end.get():
        return False
    lists = listed(answer), listed(label)
    if any(lists):
        return _same_lists(lists[0] or bracketed(answer), lists[1] or bracketed(label))
    relations = relation(answer), relation(label)
    if any(relations):
        return _same_relations(*relations)
    if "=" in answer or "=" in label:
        sides, sides_of_label = sides_of_equation(answer), sides_of_equation(label)
        if sides is None or sides_of_label is None:
            return False
        if max(len(sides), len(sides_of_label)) > 1:
            return _equal_with_equations(sides, sides_of_label)
    for split in (union, bracketed, matrix):
        parts, other_parts = split(answer), split(label)
        if parts or other_parts:
            return _same_parts(parts, other_parts)
    return _same_expression(answer, label)


def _same_lists(parts: Parts, other_parts: Parts) -> bool:
    """Whether two lists are the same. Their order counts, unless one offers alternatives (`1 \\text{ or } 2`, `\\pm 1`) or each
    element names another variable (`x = 1, y = 2`), or all the same one (`x = 1, x = 2`). A set has no order, and may offer the
    alternatives. Alternatives are a list only if all of them are values: `x > 1, x < 5` is not `x > 1 \\text{ or } x < 5`."""
    if parts is None or other_parts is None:
        return False
    kinds = {parts[0], other_parts[0]}
    are_values = _are_values(parts[1]) and _are_values(other_parts[1])
    if kinds == {ANY_ORDER} or (are_values and ANY_ORDER in kinds and kinds <= {ANY_ORDER, "list", "{}"}):
        return _same_parts((ANY_ORDER, parts[1]), (ANY_ORDER, other_parts[1]))
    if kinds == {"list"}:
        if all(len(set(map(_name, group))) == 1 and _name(group[0]) for group in (parts[1], other_parts[1])):
            return _same_parts((ANY_ORDER, parts[1]), (ANY_ORDER, other_parts[1]))
        names, other_names = _names(parts[1]), _names(other_parts[1])
        if names and other_names and sorted(names) == sorted(other_names):
            other_parts = "list", [other_parts[1][other_names.index(name)] for name in names]
    return _same_parts(parts, other_parts)


def _are_values(elements: list[str]) -> bool:
    """Whether a list holds values (`1`, `2a`, `(1, 2)`), all under one name or none, and no conditions, letters or words."""
    values = [value for element in elements for value in alternatives(element)]
    chains = [sides_of_equation(value) for value in values]
    return len(set(map(_name, values))) == 1 and all(chain is not None and _is_value(chain[-1]) for chain in chains)


def _is_value(text: str) -> bool:
    inner = bracketed(text)
    if inner:
        return all(map(_is_value, inner[1]))
    return (len(text) > 1 and _is_readable(_without_unit(text)[0])) or _is_number(text) or bool(matrix(text))


def _name(equation: str) -> str | None:
    """The name of the value in `x = 1`; None if there is none."""
    sides = sides_of_equation(equation) or [""]
    return name_of(sides[0]) if len(sides) > 1 else None


def _names(equations: list[str]) -> list[str]:
    """The names of the values in a list such as `x = 1, y = 2`. Empty if there are others than named values, or two of a name."""
    names = list(map(_name, equations))
    return [name for name in names if name] if None not in names and len(set(names)) == len(names) else []


def _same_parts(parts: Parts, other_parts: Parts) -> bool:
    if parts is None or other_parts is None:
        return False
    (kind, elements), (other_kind, other_elements) = parts, other_parts
    if kind in ("{}", ANY_ORDER):
        elements, other_elements = (
            [part for element in group for part in alternatives(element)] for group in (elements, other_elements)
        )
    if kind == "{}":
        elements, other_elements = list(dict.fromkeys(elements)), list(dict.fromkeys(other_elements))
    if kind != other_kind or not 0 < len(elements) == len(other_elements) <= MOST_ELEMENTS:
        return False
    if kind in ("{}", "union", ANY_ORDER):
        return _equal_as_sets(elements, other_elements)
    return all(map(_equal, elements, other_elements))


def _same_relations(statement: tuple[str, list[str]] | None, label: tuple[str, list[str]] | None) -> bool:
    """Whether two relations, or chains of them, are the same side by side, read in either direction: `1 < x \\leq 2` and
    `2 \\geq x > 1`."""
    if statement is None or label is None:
        return False
    (signs, sides), (other_signs, other_sides) = statement, label
    mirror = signs.translate(str.maketrans("<>≤≥", "><≥≤"))[::-1]
    return any(
        some_signs == other_signs and all(map(_same_side, some_sides, other_sides))
        for some_signs, some_sides in ((signs, sides), (mirror, sides[::-1]))
    )


def _same_side(side: str, other: str) -> bool:
    return _same_value(side, other) or _same_expression(side, other)


def _equal_with_equations(answer: list[str], label: list[str]) -> bool:
    """Whether an answer and a label, of which at least one is an equation, say the same. Both are given as lists of sides.

    The last side of an answer counts: `a+b = 3` is 3, because the question may ask for `a+b`. In a label only a name is left out:
    `x = 3` is 3, but `2x+3y = 6` is an equation. An equation equals its multiples: `12 = 4x+6y`, `2x+3y-6 = 0`.
    """
    *before, value = answer
    *before_in_label, target = label
    for sides in (before, before_in_label):
        if not all(map(may_stand_before_equals, sides)) or any(map(begins_a_statement, sides[1:])):
            return False
    if any(_contradicts(side, value) for side in before):
        return False
    if not before_in_label:
        return not (is_multiple_of_a_variable(before[0]) or _asks_for_solution(before[0])) and _equal(value, target)
    name_in_label = name_of(before_in_label[0])
    name = name_of(before[0]) if before else name_in_label
    if name and name_in_label and may_be_same(name, name_in_label) and _equal(value, target):
        return True
    try:
        return len(answer) == len(label) == 2 and _same_equation(*answer, *label)
    except TookTooLong:
        return False


def _asks_for_solution(side: str) -> bool:
    """Whether `side = 5` is an equation with another solution than 5, because the side is an expression of one variable: `x+1`,
    `\\ln x`, `|x|`. A factorial is none: `n! = 6` is the value of n!."""
    if name_of(side) and not re.fullmatch(r"\| *[a-z] *\|", side):
        return False
    try:
        node = read_expression(side)
    except Unreadable:
        return False
    return len(names_in(node)) == 1 and node.operation not in ("name", "call", "factorial") and not has_call(node)


def _contradicts(side: str, value: str) -> bool:
    """Whether a side of a chain of equals signs is another value than the last one: 6 of `x = 6 = 5`, 6 cm of `6 cm = 5 cm`."""
    (number, unit), (last, last_unit) = math_value(side), math_value(value)
    if isinstance(number, Fraction) and isinstance(last, Fraction):
        return number != last and unit == last_unit
    return not has_variable(side + value) and _is_readable(side) and not _equal(side, value)


def _same_value(left: str, right: str) -> bool:
    (value, unit), (other, other_unit) = math_value(left), math_value(right)
    return value == other and units_agree(unit, other_unit)


def _equal_as_sets(elements: list[str], other_elements: list[str]) -> bool:
    remainder = list(other_elements)
    for element in elements:
        match = next((other for other in remainder if _equal(element, other)), None)
        if match is None:
            return False
        remainder.remove(match)
    return True


# --- single expressions -----------------------------------------------------------------------------------------------


def _same_expression(left: str, right: str) -> bool:
    """Whether two expressions without commas have the same value."""
    (left, unit), (right, other_unit) = _without_unit(left), _without_unit(right)
    if not units_agree(unit, other_unit):
        return False
    if (_is_number(left) and _is_number(right)) or (_LETTERS.fullmatch(left) and _LETTERS.fullmatch(right)):
        return False  # they would be the same text
    try:
        return _same_at_points(left, right)
    except TookTooLong:
        return False


def _without_unit(text: str) -> tuple[str, str]:
    """The expression and the unit after it: `2\\pi\\text{ cm}` is 2π and `cm`. `math_value` decides what counts as a unit."""
    if text.endswith("%"):
        return text.removesuffix("%").rstrip("\\ "), "%"
    match = _UNIT_BEHIND.match(text)
    if match is None:
        return text, ""
    number, unit = math_value("1" + text[len(match[1]) :])
    return (match[1].strip(), unit) if number == 1 and unit else (text, "")


def _is_money(text: str, other: str) -> bool:
    """Whether another text may be an amount of money if this one has a sign of dollars."""
    unit = math_value(other)[1] or _without_unit(other)[1]
    return not has_dollars(text) or not unit or units_agree("$", unit)


def _is_number(text: str) -> bool:
    return isinstance(math_value(text)[0], Fraction)


def _is_readable(text: str) -> bool:
    try:
        read_expression(text)
    except Unreadable:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _same_at_points(left: str, right: str) -> bool:
    if not (_is_readable(left) and _is_readable(right)) or products_in_order(left) != products_in_order(right):
        return False
    return within(PATIENCE_S, lambda: math_values.same_value(read_expression(left), read_expression(right)))


@functools.lru_cache(maxsize=1024)
def _same_equation(left: str, right: str, other_left: str, other_right: str) -> bool:
    """Whether one equation is the other multiplied by a number."""
    texts = (left, right, other_left, other_right)
    if not all(map(_is_readable, texts)):
        return False
    first, second, third, fourth = map(read_expression, texts)
    return within(PATIENCE_S, lambda: math_values.same_equation((first, second), (third, fourth)))


class TookTooLong(Exception):
    """A comparison reached its limit of time, so that nothing is known about it."""


class _Interruption(BaseException):
    """Not an `Exception`, so that no handler inside the call swallows it."""


def within(limit_s: float, call: Callable[[], bool]) -> bool:
    """The result of `call`; False if it raises an error. Raises `TookTooLong` after `limit_s` seconds of a processor: those of a
    busy machine, in which the call does not run, do not count."""
    try:
        with _interrupted_after(limit_s):
            return call()
    except _Interruption:
        raise TookTooLong(f"a comparison took more than {limit_s} s") from None
    except (RecursionError, MemoryError):
        return False
    except (ArithmeticError, ValueError, TypeError):  # what mpmath raises for values that an operation does not have
        return False


@contextmanager
def _interrupted_after(limit_s: float) -> Iterator[None]:
    """Interrupts the block after `limit_s` seconds of this thread. The clock is read at each call that Python makes, because the
    jail has no signals, and for some users no threads."""
    end = time.thread_time() + limit_s

    def look(frame: object, event: str, argument: object) -> None:
        if time.thread_time() > end:
            raise _Interruption

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
