r"""Where the polynomials inside an expression change their sign, so that `math_values.py` compares on both sides.

`|x^2-500x+62499|` is `x^2-500x+62499` everywhere but between 249 and 251, and no number in it says so. Of a product or a quotient
in bars or under a root each factor is looked at; what is no polynomial is left out.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from open_instruct.verifiers.math_points import Point, random_value
from open_instruct.verifiers.math_tokens import Node, Unreadable, names_in

MOST_DEGREE = 12
MOST_POLYNOMIALS = 8
FIRST_NUMBER = 1000
"""Number of the first point here. Those of `math_points.py` have smaller ones."""
NUM_SETTINGS = 2
"""How many times the other variables get other values."""
HALVINGS = 80
DIGITS = 100
Real = Any
"""A real number of mpmath."""
Evaluate = Callable[[Node, Mapping[str, Fraction]], Real]


def points_between_roots(nodes: Sequence[Node], whole: set[str], evaluate: Evaluate, context: Any) -> Iterator[Point]:
    """Points on both sides of each sign change of each polynomial in bars or under a root, one variable at a time.

    Args:
        whole: variables that take only whole values; they are not tried here.
        evaluate: the real value of an expression.
        context: mpmath's numbers.
    """
    names = set().union(*map(names_in, nodes))
    polynomials = dict.fromkeys(part for node in nodes for part in _parts_that_change(node))
    numbers = itertools.count(FIRST_NUMBER)
    for part in list(polynomials)[:MOST_POLYNOMIALS]:
        settings = range(NUM_SETTINGS if len(names) > 1 else 1)
        for name, _ in itertools.product(sorted(names_in(part) - whole), settings):
            number = next(numbers)
            values = {other: random_value(other, number, is_whole=other in whole) for other in names}
            try:
                with context.workdps(DIGITS):
                    roots = sign_changes(_coefficients(part, name, values, evaluate))
                    places = [Fraction(context.nstr(place, DIGITS)) for place in _between(roots)]
            except (Unreadable, ArithmeticError, ValueError, TypeError):  # no polynomial, or none of real numbers
                continue
            yield from (Point(number, {**values, name: place}, is_real=True) for place in places)


def _parts_that_change(node: Node) -> Iterator[Node]:
    """The factors of what is in bars, under a root or in the base of a power that is no whole one."""
    if node.operation in ("abs", "root") or (node.operation == "power" and not _is_whole(node.arguments[1])):
        yield from _factors(node.arguments[0])
    for argument in node.arguments:
        yield from _parts_that_change(argument)


def _is_whole(exponent: Node) -> bool:
    return isinstance(exponent.value, Fraction) and exponent.value.denominator == 1


def _factors(node: Node) -> Iterator[Node]:
    if node.operation in ("product", "quotient", "minus"):
        for argument in node.arguments:
            yield from _factors(argument)
    elif node.operation == "power":
        yield from _factors(node.arguments[0])
    elif names_in(node):
        yield node


def _coefficients(node: Node, name: str, values: Mapping[str, Fraction], evaluate: Evaluate) -> list[Real]:
    """The coefficients of a polynomial in the variable `name`, the constant one first. Raises `Unreadable` if it is none."""
    if name not in names_in(node):
        return [evaluate(node, values)]
    if node.operation == "name":
        return [0, 1]
    if node.operation == "power":
        base, exponent = node.arguments
        if not _is_whole(exponent) or not 0 < Fraction(exponent.value) <= MOST_DEGREE:
            raise Unreadable("no polynomial")
        return _product([_coefficients(base, name, values, evaluate)] * int(exponent.value))
    if node.operation not in ("sum", "product", "minus", "quotient"):
        raise Unreadable("no polynomial")
    parts = [_coefficients(argument, name, values, evaluate) for argument in node.arguments]
    if node.operation == "sum":
        return [left + right for left, right in itertools.zip_longest(*parts, fillvalue=0)]
    if node.operation == "minus":
        parts.append([-1])
    if node.operation == "quotient":
        if len(parts[1]) > 1:
            raise Unreadable("no polynomial")
        parts[1] = [1 / parts[1][0]]
    return _product(parts)


def _product(factors: Sequence[list[Real]]) -> list[Real]:
    product = [1]
    for factor in factors:
        if len(product) + len(factor) - 2 > MOST_DEGREE:
            raise Unreadable("a polynomial of too high a degree")
        terms = [0] * (len(product) + len(factor) - 1)
        for (place, left), (other_place, right) in itertools.product(enumerate(product), enumerate(factor)):
            terms[place + other_place] += left * right
        product = terms
    return product


def sign_changes(coefficients: Sequence[Real]) -> list[Real]:
    """The real numbers at which a polynomial changes its sign, in order, nearly. `coefficients` begin with the constant one.

    Between two neighboring roots of the derivative a polynomial has at most one root, which is found by halving.
    """
    while coefficients and coefficients[-1] == 0:
        coefficients = coefficients[:-1]
    if len(coefficients) < 2:
        return []
    if len(coefficients) == 2:
        return [-coefficients[0] / coefficients[1]]
    derivative = [place * coefficient for place, coefficient in enumerate(coefficients)][1:]
    bound = 1 + max(abs(coefficient / coefficients[-1]) for coefficient in coefficients)  # Cauchy's
    ends = [-bound, *sign_changes(derivative), bound]
    intervals = itertools.pairwise(ends)
    signs = itertools.pairwise([_sign(coefficients, end) for end in ends])
    return [
        _root(coefficients, low, high, sign)
        for (low, high), (sign, other) in zip(intervals, signs, strict=True)
        if sign * other < 0
    ]


def _root(coefficients: Sequence[Real], low: Real, high: Real, sign: int) -> Real:
    """The root between `low`, where the polynomial has this sign, and `high`, where it has the other."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _sign(coefficients, middle) == sign else (low, middle)
    return (low + high) / 2


def _sign(coefficients: Sequence[Real], place: Real) -> int:
    value = _value(coefficients, place)
    return (value > 0) - (value < 0)


def _value(coefficients: Sequence[Real], place: Real) -> Real:
    value = 0
    for coefficient in reversed(coefficients):
        value = value * place + coefficient
    return value


def _between(roots: list[Real]) -> list[Real]:
    """A number in each of the intervals into which the roots divide all numbers."""
    if not roots:
        return []
    reach = 1 + abs(roots[0]) + abs(roots[-1])
    return [(low + high) / 2 for low, high in itertools.pairwise([roots[0] - reach, *roots, roots[-1] + reach])]
