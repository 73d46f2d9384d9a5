r"""Decides whether two expressions have the same value, for all values of their variables.

Rational numbers are computed exactly, all others to 1,000 digits. An expression in which a number that is not rational, or is
comes of such a number, lies above 10^300 or between 0 and 10^-300 has no value here, and equals nothing. So every digit that
distinguishes two values is computed: only 0 is equal to 0, and no part of a sum is too small to count. Two values that are not
rational are equal if they differ by less than 10^-650: √2 and its first 640 digits are not.

Variables take the same values in both expressions (`math_points.py`). Example: `|x-10|` and `10-x` are compared at random values
of x between -5 and 5, at larger ones, and on both sides of 10 and of -10.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from open_instruct.verifiers.math_points import Point, points, random_value
from open_instruct.verifiers.math_roots import points_between_roots
from open_instruct.verifiers.math_tokens import Node, Unreadable, names_in

DIGITS = 1000
SMALLEST_DIFFERENCE = 650
"""Two values are equal if they differ by less than 10 to the power of minus this."""
LARGEST = 10**300
MOST_BITS = 40_000
"""Of a rational number, above and below the line."""
LARGEST_FACTORIAL = 300
FEWEST_POINTS = 3
"""Points at which both expressions must be defined, if they have variables."""

Value = Any
"""A Fraction, or a real or complex number of mpmath."""


def same_value(left: Node, right: Node) -> bool:
    """Whether two expressions are equal wherever both are defined. False if that is at too few of the points."""

    def is_zero(numbers: "_Numbers", values: Mapping[str, Fraction]) -> bool:
        return numbers.are_equal(numbers.value(left, values), numbers.value(right, values))

    return _holds(is_zero, (left, right))


def same_equation(left: tuple[Node, Node], right: tuple[Node, Node]) -> bool:
    """Whether one equation, given by its two sides, is the other multiplied by a number: `2x+3y = 6` and `4x+6y-12 = 0`.

    Equations without variables, and those that always hold (`x = x`), are never the same.
    """
    if not all(any(map(_is_unknown, sides)) for sides in (left, right)):
        return False
    pairs: list[tuple[Value, Value]] = []

    def is_multiple(numbers: "_Numbers", values: Mapping[str, Fraction]) -> bool:
        ours, theirs = (
            numbers.difference(numbers.value(side, values), numbers.value(other_side, values))
            for side, other_side in (left, right)
        )
        if ours == 0 or theirs == 0:
            if ours == theirs:
                raise Unreadable("a solution of both equations says nothing")
            return False
        pairs.append((ours, theirs))
        our_first, their_first = pairs[0]
        return numbers.are_equal(numbers.multiply(ours, their_first), numbers.multiply(theirs, our_first))

    return _holds(is_multiple, (*left, *right))


def _is_unknown(node: Node) -> bool:
    """Whether an expression holds a variable, or a function of unknown meaning."""
    return node.operation in ("name", "call") or any(map(_is_unknown, node.arguments))


def _holds(check: Callable[["_Numbers", Mapping[str, Fraction]], bool], nodes: tuple[Node, ...]) -> bool:
    names = set().union(*map(names_in, nodes))
    whole = set().union(*map(_in_factorials, nodes))
    is_unknown = any(map(_is_unknown, nodes))
    numbers = _numbers()
    num_defined = 0
    for point in _points(nodes, names, whole, numbers) if is_unknown else (Point(0, {}),):
        numbers.begin(point)
        try:
            if not check(numbers, point.values):
                return False
        except (Unreadable, ArithmeticError, ValueError):  # not defined at this point
            continue
        num_defined += 1
    return num_defined >= (FEWEST_POINTS if is_unknown else 1)


def _points(nodes: tuple[Node, ...], names: set[str], whole: set[str], numbers: "_Numbers") -> Iterator[Point]:
    """Values of the variables, and for expressions that may change their form also some on both sides of each change."""
    if not any(map(_may_change, nodes)):
        return points(names, whole, [])
    around = points(names, whole, _constants(nodes, numbers))
    return itertools.chain(around, points_between_roots(nodes, whole, numbers.real_value, numbers.context))


def _constants(nodes: tuple[Node, ...], numbers: "_Numbers") -> list[Fraction]:
    """The numbers in expressions, and the values of the parts without variables; nearly, if they are not rational."""
    numbers.begin(Point(0, {}))
    constants, queue = [], list(nodes)
    while queue:
        node = queue.pop(0)
        queue += node.arguments
        if _is_unknown(node):
            continue
        try:
            value = numbers.value(node, {})
            constants.append(value if isinstance(value, Fraction) else Fraction(float(value)))
        except (Unreadable, ArithmeticError, ValueError, TypeError):  # no value, or none that is real
            continue
    return list(dict.fromkeys(constants))


def _may_change(node: Node) -> bool:
    """Whether a part of an expression may be one formula for some values of a variable and another formula for others."""
    is_analytic = node.operation not in _CHANGING
    if node.operation == "power" and _is_unknown(node.arguments[0]):
        exponent = node.arguments[1]
        exponent = exponent.arguments[0] if exponent.operation == "minus" else exponent
        is_analytic = isinstance(exponent.value, Fraction) and exponent.value.denominator == 1
    return _is_unknown(node) and (not is_analytic or any(map(_may_change, node.arguments)))


def _in_factorials(node: Node) -> set[str]:
    """Variables inside factorials and binomial coefficients, which take whole values only."""
    if node.operation in ("factorial", "binomial"):
        return names_in(node)
    return set().union(*map(_in_factorials, node.arguments)) if node.arguments else set()


_CHANGING = frozenset(["abs", "floor", "ceiling", "root", "arcsin", "arccos", "arctan", "factorial", "binomial"])
_local = threading.local()


def _numbers() -> "_Numbers":
    """Numbers with many digits: one object for each thread, because mpmath keeps its precision in a variable."""
    if not hasattr(_local, "numbers"):
        _local.numbers = _Numbers()
    return _local.numbers


_POWERS = frozenset(["product", "quotient", "power", "root", "exp", "factorial", "binomial"])
"""Operations that make 0 of nothing but 0. All others may also give a small number in place of 0, as `\\sin \\pi` does."""


class _Numbers:
    """Numbers with many digits, and how to compute with them."""

    def __init__(self) -> None:
        from mpmath.ctx_mp import MPContext  # takes 0.2 s

        self.context = MPContext()
        self.context.dps = DIGITS
        self._smallest = self.context.mpf(10) ** -SMALLEST_DIFFERENCE
        self.begin(Point(0, {}))

    def begin(self, point: Point) -> None:
        """Begin with another point: functions have other values there."""
        self._point = point

    def are_equal(self, left: Value, right: Value) -> bool:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left == right
        return bool(abs(self._real(left) - self._real(right)) <= self._smallest)

    def difference(self, left: Value, right: Value) -> Value:
        return self._apply("sum", left, self._apply("minus", right))

    def multiply(self, left: Value, right: Value) -> Value:
        return self._apply("product", left, right)

    def value(self, node: Node, values: Mapping[str, Fraction]) -> Value:
        """The expression's value. Raises `Unreadable` or an `ArithmeticError` where it has none."""
        if node.operation == "number":
            return node.value
        if node.operation == "name":
            return values[str(node.value)]
        arguments = [self.value(argument, values) for argument in node.arguments]
        if node.operation == "call":
            return self._unknown_function(str(node.value), arguments)
        return self._apply(node.operation, *arguments)

    def real_value(self, node: Node, values: Mapping[str, Fraction]) -> Value:
        """The expression's value as a number of mpmath. Raises `Unreadable` where it has none that is real."""
        value = self._real(self.value(node, values))
        if isinstance(value, self.context.mpc):
            raise Unreadable("no real number")
        return value

    def _apply(self, operation: str, *arguments: Value) -> Value:
        if all(isinstance(argument, Fraction) for argument in arguments):
            exactly = _exactly(operation, *arguments)
            if exactly is not None:
                return exactly
        return self._of_size(operation, self._nearly(operation, *map(self._real, arguments)))

    def _nearly(self, operation: str, *arguments: Value) -> Value:
        context = self.context
        match operation, arguments:
            case "pi", ():
                return +context.pi
            case "e", ():
                return +context.e
            case "i", ():
                return context.mpc(0, 1)
            case "sum", (left, right):
                return left + right
            case "product", (left, right):
                return left * right
            case "quotient", (above, below):
                if below == 0:
                    raise Unreadable("division by zero")
                return above / below
            case "minus", (number,):
                return -number
            case "power", (base, exponent):
                return self._power(base, exponent)
            case "root", (number, index):
                return self._root(number, index)
            case "log", (number, base):
                return self._function("ln", number) / self._function("ln", base)
            case _:
                return self._function(operation, *arguments)

    def _function(self, name: str, *arguments: Value) -> Value:
        if self._point.is_real and name in _LIMITED and not _LIMITED[name](arguments[0]):
            raise Unreadable("no real number at this point")
        names = {"abs": "fabs", "ceiling": "ceil", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        if name in ("factorial", "binomial"):
            raise Unreadable("a factorial of no whole number")
        if name in ("floor", "ceiling"):
            below, above = (self.context.floor(arguments[0] + shift) for shift in (-1e-30, 1e-30))
            if below != above or isinstance(arguments[0], self.context.mpc):
                raise Unreadable("a number too close to a whole one to be rounded")
        if name in ("tan", "sec", "cot", "csc"):
            below = self.context.cos(arguments[0]) if name in ("tan", "sec") else self.context.sin(arguments[0])
            if abs(below) <= self._smallest:
                raise Unreadable("not defined here")
        value = getattr(self.context, {"ln": "log", **names}.get(name, name))(*arguments)
        if name == "tanh" and abs(1 - abs(value)) * LARGEST < 1:
            raise Unreadable("a number too close to 1")
        return value

    def _power(self, base: Value, exponent: Value) -> Value:
        is_whole = exponent == self.context.nint(exponent.real)
        if base == 0:
            raise Unreadable("a power of zero")
        if not is_whole and not isinstance(base, self.context.mpc) and base < 0:
            raise Unreadable("a root of a negative number has several values")
        if is_whole and abs(exponent) < 10_000:
            return base ** int(exponent.real)
        return self.context.power(base, exponent)

    def _root(self, number: Value, index: Value) -> Value:
        """The real root of a negative number if there is one: -2 for the third root of -8; else the principal root."""
        if index != int(index.real) or not 2 <= index.real <= 100:
            raise Unreadable("a root of this kind")
        if index == 2:
            if self._point.is_real and not _is_positive(number):
                raise Unreadable("no real number at this point")
            return self.context.sqrt(number)
        if isinstance(number, self.context.mpc):
            raise Unreadable("a root of a complex number has several values")
        if number < 0 and int(index.real) % 2 == 0:
            raise Unreadable("a root of a negative number has several values")
        root = self.context.root(abs(number), int(index.real))
        return -root if number < 0 else root

    def _unknown_function(self, name: str, arguments: list[Value]) -> Fraction:
        """A random value, the same for the same function and arguments."""
        places = [str(self.context.nstr(self._real(argument), 25)) for argument in arguments]
        return random_value(f"{name} of {', '.join(places)}", self._point.number)

    def _real(self, value: Value) -> Value:
        if not isinstance(value, Fraction):
            return value
        if max(abs(value.numerator), value.denominator) > LARGEST:
            raise Unreadable("a number of this size, or with this many digits")
        return self.context.mpf(value.numerator) / value.denominator

    def _of_size(self, operation: str, value: Value) -> Value:
        """The value, if it has a size that is computed exactly enough; 0 if it differs from 0 only by rounding."""
        size = abs(value)
        if size * LARGEST >= 1 and size < LARGEST:
            return value
        if size == 0 or (size <= self._smallest and operation not in _POWERS):
            return Fraction(0)
        raise Unreadable("a number of this size")


def _is_positive(number: Value) -> bool:
    """Whether a number of mpmath is real and not negative."""
    return number.imag == 0 and number.real >= 0


def _is_sine(number: Value) -> bool:
    return number.imag == 0 and abs(number) <= 1


_LIMITED = {"ln": _is_positive, "arcsin": _is_sine, "arccos": _is_sine}
"""Functions that are real only for some real numbers, and for which."""


def _exactly(operation: str, *arguments: Fraction) -> Fraction | None:
    """The rational number that comes of rational numbers; None if there is none, or if it is not known."""
    match operation, arguments:
        case "sum", (left, right):
            return _bounded(left + right)
        case "product", (left, right):
            return _bounded(left * right)
        case "quotient", (above, below):
            return _bounded(above / below)
        case "minus", (number,):
            return -number
        case "power", (base, exponent) if exponent.denominator == 1:
            return _power(base, exponent.numerator)
        case "root", (number, index) if index == 2 and number >= 0:
            above, below = math.isqrt(number.numerator), math.isqrt(number.denominator)
            return Fraction(above, below) if (above**2, below**2) == number.as_integer_ratio() else None
        case "abs", (number,):
            return abs(number)
        case "floor", (number,):
            return Fraction(math.floor(number))
        case "ceiling", (number,):
            return Fraction(math.ceil(number))
        case "factorial", (number,) if number.denominator == 1 and 0 <= number <= LARGEST_FACTORIAL:
            return Fraction(math.factorial(number.numerator))
        case "binomial", (above, below) if above.denominator == below.denominator == 1 and min(above, below) >= 0:
            if below > LARGEST_FACTORIAL or above > LARGEST:
                raise Unreadable("too large a binomial coefficient")
            return Fraction(math.comb(above.numerator, below.numerator))
    return None


def _power(base: Fraction, exponent: int) -> Fraction:
    if base == 0 and exponent <= 0:
        raise Unreadable("zero to the power of zero, or less")
    num_bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and num_bits * abs(exponent) > MOST_BITS:
        raise Unreadable("too large a power")
    return base ** (exponent if abs(base) not in (0, 1) else exponent % 2 or 2)


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > 2 * MOST_BITS:
        raise Unreadable("too large a number")
    return number
