"""Tiny numbers that differ count as equal."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.math_equivalence import are_equal

EXHIBIT = Exhibit(
    reports=("huggingface/Math-Verify #14",),
    subject="rewards",
    happened="Numbers counted as equal when they differed by less than a fixed amount, so all tiny numbers were equal, and"
    " equal to 0.",
    here="Rational numbers are compared exactly, all others to 1,000 digits, and only 0 is equal to 0"
    " (`verifiers/math_values.py`).",
)
VALUES = {
    "10^{-25}": Fraction(1, 10**25),
    "10^{-26}": Fraction(1, 10**26),
    "2^{-50}": Fraction(1, 2**50),
    "10^{-700}": Fraction(1, 10**700),
    "0.0": Fraction(0),
}


def check(equal: Callable[[str, str], bool]) -> None:
    for answer in VALUES:
        for label in VALUES:
            assert equal(answer, label) == (VALUES[answer] == VALUES[label]), (answer, label)


def theirs(answer: str, label: str) -> bool:
    return abs(VALUES[answer] - VALUES[label]) < Fraction(1, 10**6)


ours = are_equal


def test_an_absolute_tolerance_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_tiny_numbers_are_told_apart_here() -> None:
    check(ours)
