r"""Decides whether two expressions have the same value, for all values of their variables.

Rational numbers are computed exactly. All other numbers are computed to 1,000 digits, and no number in between may be above
10^300 or below 10^-300. Two values are equal if they differ by less than 10^-650: √2 and its first 640 digits are not. Variables
take some random values, the same in both expressions.

Example: `(x+1)^2` and `x^2+2x+1` are compared at up to 10 values of x, some of them negative. At the first two they must agree to
1,000 digits, at all others to 30 digits.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from open_instruct.verifiers.math_tokens import Node, Unreadable, names_in

DIGITS, ROUGH_DIGITS = 1000, 60
SMALLEST_DIFFERENCE = 650
"""Two values are equal if they differ by less than 10 to the power of minus this."""
ROUGH_DIFFERENCE = 1e-30
"""Of the largest number in between."""
LARGEST = 10**300
MOST_BITS = 40_000
"""Of a rational number, above and below the line."""
LARGEST_FACTORIAL = 300
NUM_POINTS, FEWEST_POINTS, EXACT_POINTS = 10, 3, 2

Value = Any
"""A Fraction, or a real or complex number of mpmath."""


def same_value(left: Node, right: Node) -> bool:
    """Whether two expressions are equal wherever both are defined. False if that is at too few of the points."""

    def is_zero(numbers: "_Numbers", points: Mapping[str, Fraction]) -> bool:
        return numbers.are_equal(numbers.value(left, points), numbers.value(right, points))

    return _holds(is_zero, (left, right))


def same_equation(left: tuple[Node, Node], right: tuple[Node, Node]) -> bool:
    """Whether one equation, given by its two sides, is the other multiplied by a number: `2x+3y = 6` and `4x+6y-12 = 0`.

    Equations without variables, and those that always hold (`x = x`), are never the same.
    """
    if not all(any(map(_is_unknown, sides)) for sides in (left, right)):
        return False
    first: dict[_Numbers, tuple[Value, Value]] = {}

    def is_multiple(numbers: "_Numbers", points: Mapping[str, Fraction]) -> bool:
        ours, theirs = (
            numbers.difference(numbers.value(one, points), numbers.value(other, points)) for one, other in (left, right)
        )
        if numbers.are_equal(ours, Fraction(0)) or numbers.are_equal(theirs, Fraction(0)):
            return False
        our_first, their_first = first.setdefault(numbers, (ours, theirs))
        return numbers.are_equal(numbers.multiply(ours, their_first), numbers.multiply(theirs, our_first))

    return _holds(is_multiple, (*left, *right))


def _is_unknown(node: Node) -> bool:
    """Whether an expression holds a variable, or a function of unknown meaning."""
    return node.operation in ("name", "call") or any(map(_is_unknown, node.arguments))


def _holds(check: Callable[["_Numbers", Mapping[str, Fraction]], bool], nodes: tuple[Node, ...]) -> bool:
    names = set().union(*map(names_in, nodes))
    whole = set().union(*map(_in_factorials, nodes))
    rough, exact = _numbers()
    num_defined = 0
    is_unknown = any(map(_is_unknown, nodes))
    for number in range(NUM_POINTS if is_unknown else 1):
        points = {name: _random_value(name, number, is_whole=name in whole) for name in names}
        rough.begin(number)
        exact.begin(number)
        try:
            if not all(check(one, points) for one in ((rough, exact) if num_defined < EXACT_POINTS else (rough,))):
                return False
        except (Unreadable, ArithmeticError, ValueError):  # not defined at this point
            continue
        num_defined += 1
    return num_defined >= (FEWEST_POINTS if is_unknown else 1)


def _in_factorials(node: Node) -> set[str]:
    """Variables inside factorials and binomial coefficients, which take whole values only."""
    if node.operation in ("factorial", "binomial"):
        return names_in(node)
    return set().union(*map(_in_factorials, node.arguments)) if node.arguments else set()


def _random_value(name: str, number: int, *, is_whole: bool = False) -> Fraction:
    """A value of a variable: mostly between 0 and 5, sometimes negative; the same in each process."""
    digest = hashlib.sha256(f"{number} {name}".encode()).digest()
    above, below = int.from_bytes(digest[:2]), digest[2] % 50 + 51
    if is_whole:
        return Fraction(above % 40 + 1)
    size = Fraction(above % (5 * below) + 1, below)
    if number % 3 == 0:
        size = size / 6  # where arcsin is defined
    return -size if number % 5 in (1, 3) else size


_kept = threading.local()


def _numbers() -> tuple["_Numbers", "_Numbers"]:
    """Numbers with few digits and with many: one pair for each thread, because mpmath keeps its precision in a variable."""
    if not hasattr(_kept, "numbers"):
        _kept.numbers = (_Numbers(ROUGH_DIGITS, is_rough=True), _Numbers(DIGITS, is_rough=False))
    return _kept.numbers


class _Numbers:
    """Numbers with a certain number of digits, and how to compute with them."""

    def __init__(self, digits: int, *, is_rough: bool) -> None:
        from mpmath.ctx_mp import MPContext  # takes 0.2 s

        self._context = MPContext()
        self._context.dps = digits
        self._is_rough = is_rough
        self._smallest = self._context.mpf(10) ** -SMALLEST_DIFFERENCE
        self.begin(0)

    def begin(self, point: int) -> None:
        """Begin with another point: functions have other values there."""
        self._point = point
        self._largest = self._context.mpf(1)

    def are_equal(self, left: Value, right: Value) -> bool:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left == right
        difference = abs(self._real(left) - self._real(right))
        return bool(difference <= (self._largest * ROUGH_DIFFERENCE if self._is_rough else self._smallest))

    def difference(self, left: Value, right: Value) -> Value:
        return self._apply("sum", left, self._apply("minus", right))

    def multiply(self, left: Value, right: Value) -> Value:
        return self._apply("product", left, right)

    def value(self, node: Node, points: Mapping[str, Fraction]) -> Value:
        """The expression's value. Raises `Unreadable` or an `ArithmeticError` where it has none."""
        if node.operation == "number":
            return node.value
        if node.operation == "name":
            return points[str(node.value)]
        arguments = [self.value(argument, points) for argument in node.arguments]
        if node.operation == "call":
            return self._unknown_function(str(node.value), arguments)
        value = self._apply(node.operation, *arguments)
        if not isinstance(value, Fraction):
            self._check_size(value)
        return value

    def _apply(self, operation: str, *arguments: Value) -> Value:
        if all(isinstance(argument, Fraction) for argument in arguments):
            exactly = _exactly(operation, *arguments)
            if exactly is not None:
                return exactly
        return self._nearly(operation, *map(self._real, arguments))

    def _nearly(self, operation: str, *arguments: Value) -> Value:
        context = self._context
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
                if self.are_equal(below, Fraction(0)):
                    raise Unreadable("division by zero")
                return above / below
            case "minus", (number,):
                return -number
            case "power", (base, exponent):
                return self._power(base, exponent)
            case "root", (number, index):
                return self._root(number, index)
            case "log", (number, base):
                return context.log(number) / context.log(base)
            case _:
                return self._function(operation, *arguments)

    def _function(self, name: str, *arguments: Value) -> Value:
        names = {"abs": "fabs", "ceiling": "ceil", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        if name in ("factorial", "binomial"):
            raise Unreadable("a factorial of no whole number")
        if name in ("floor", "ceiling"):
            below, above = (self._context.floor(arguments[0] + shift) for shift in (-1e-30, 1e-30))
            if below != above or isinstance(arguments[0], self._context.mpc):
                raise Unreadable("a number too close to a whole one to be rounded")
        if name in ("tan", "sec", "cot", "csc"):
            below = self._context.cos(arguments[0]) if name in ("tan", "sec") else self._context.sin(arguments[0])
            if self.are_equal(below, Fraction(0)):
                raise Unreadable("not defined here")
        return getattr(self._context, {"ln": "log", **names}.get(name, name))(*arguments)

    def _power(self, base: Value, exponent: Value) -> Value:
        is_whole = exponent == self._context.nint(exponent.real)
        if self.are_equal(base, Fraction(0)):
            raise Unreadable("a power of zero")
        if not is_whole and not isinstance(base, self._context.mpc) and base < 0:
            raise Unreadable("a root of a negative number has several values")
        if is_whole and abs(exponent) < 10_000:
            return base ** int(exponent.real)
        return self._context.power(base, exponent)

    def _root(self, number: Value, index: Value) -> Value:
        """The real root of a negative number if there is one: -2 for the third root of -8; else the principal root."""
        if index != int(index.real) or not 2 <= index.real <= 100:
            raise Unreadable("a root of this kind")
        if index == 2:
            return self._context.sqrt(number)
        if isinstance(number, self._context.mpc):
            raise Unreadable("a root of a complex number has several values")
        if number < 0 and int(index.real) % 2 == 0:
            raise Unreadable("a root of a negative number has several values")
        root = self._context.root(abs(number), int(index.real))
        return -root if number < 0 else root

    def _unknown_function(self, name: str, arguments: list[Value]) -> Fraction:
        """A random value, the same for the same function and arguments."""
        places = [str(self._context.nstr(self._real(argument), 25)) for argument in arguments]
        return _random_value(f"{name} of {', '.join(places)}", self._point)

    def _real(self, value: Value) -> Value:
        if not isinstance(value, Fraction):
            return value
        if value and not 1 <= abs(value) * LARGEST <= LARGEST**2:
            raise Unreadable("a number of this size")
        return self._context.mpf(value.numerator) / value.denominator

    def _check_size(self, value: Value) -> None:
        size = abs(value)
        if not size < LARGEST or self._smallest < size < self._context.mpf(1) / LARGEST:
            raise Unreadable("a number of this size")
        self._largest = max(self._largest, size)


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
