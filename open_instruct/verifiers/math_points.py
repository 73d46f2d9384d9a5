"""The values of variables at which `math_values.py` compares two expressions.

An expression may change its form anywhere: `|x-10|` is `10-x` up to 10, and `\\lfloor x/10 \\rfloor` is 0 from 0 to 10. So
there are points near 0, points of several sizes, and points at and between the numbers at which the form may change.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

NUM_NEAR_ZERO = 10
SIZES = (7, 60, 500, 4_000, 10**6)
"""Largest absolute values of the points of several sizes. They lie above half of it."""
MOST_CHANGES = 30
"""Numbers of which both sides are tried, and of their negatives. With more, the first ones count."""
MOST_AROUND = 80


@dataclass(frozen=True)
class Point:
    """Values of variables."""

    number: int
    values: dict[str, Fraction]
    is_real: bool = False
    """Whether roots and logarithms of negative numbers have no value here. Of complex numbers not every rule holds:
    `\\sqrt{x/y}` is not `\\sqrt{x}/\\sqrt{y}` where x > 0 and y < 0."""


def points(names: set[str], whole: set[str], constants: list[Fraction]) -> Iterator[Point]:
    """Points for the variables in `names`. Those in `whole` are whole numbers, and never negative. Of `constants`, the numbers in
    the expressions, both sides are tried."""
    order = sorted(names)
    numbers = itertools.count()
    for number in itertools.islice(numbers, NUM_NEAR_ZERO):
        yield Point(number, {name: random_value(name, number, is_whole=name in whole) for name in order})
    for (position, size), sign in itertools.product(enumerate(SIZES), (1, -1)):
        number = next(numbers)
        values = {}
        for place, name in enumerate(order):
            value = sign * (size - random_value(name, number, is_whole=True) * size / 100)
            if position % 2:
                value = Fraction(round(value))  # at whole numbers too
            if (position >> place) % 2 and place:
                value = -value  # variables of different signs
            values[name] = Fraction(abs(round(value))) if name in whole else value
        yield Point(number, values, is_real=True)
    around = itertools.product(_around_changes(constants), order)
    for value, name in itertools.islice(around, MOST_AROUND):
        number = next(numbers)
        values = {other: random_value(other, number, is_whole=other in whole) for other in order}
        values[name] = Fraction(abs(math.floor(value))) if name in whole else value
        yield Point(number, values, is_real=True)


def random_value(name: str, number: int, *, is_whole: bool = False) -> Fraction:
    """A value near 0: mostly between 0 and 5, sometimes negative, or a whole number from 1 to 40; the same in each process."""
    digest = hashlib.sha256(f"{number} {name}".encode()).digest()
    above, below = int.from_bytes(digest[:2]), digest[2] % 50 + 51
    if is_whole:
        return Fraction(above % 40 + 1)
    size = Fraction(above % (5 * below) + 1, below)
    if number % 3 == 0:
        size = size / 6  # where arcsin is defined
    return -size if number % 5 in (1, 3) else size


def _around_changes(constants: list[Fraction]) -> list[Fraction]:
    """The first constants, and a value between each two neighbors of the numbers at which a form may change: a constant, the
    quotient of two constants (100/3 in `|3x-100|`), and their negatives; and one beyond each end."""
    sizes = list(dict.fromkeys(map(abs, constants)))
    quotients = [dividend / divisor for dividend, divisor in itertools.permutations(sizes[:8], 2) if divisor]
    changes = list(dict.fromkeys([*sizes, *quotients]))[:MOST_CHANGES]
    order = sorted({number * sign for number in changes for sign in (1, -1)})
    if not order:
        return []
    inner = [low + (high - low) * Fraction(3, 7) for low, high in itertools.pairwise(order)]
    values = [size * sign for size in sizes[:8] for sign in (1, -1)]
    return [order[-1] * Fraction(8, 7) + 1, order[0] * Fraction(8, 7) - 1, *values, *inner]
