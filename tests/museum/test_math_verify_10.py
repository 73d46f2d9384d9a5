"""Equality of relations depends on which is the label."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.math_equivalence import are_equal

EXHIBIT = Exhibit(
    reports=("huggingface/Math-Verify #10", "huggingface/Math-Verify #71", "huggingface/Math-Verify #25"),
    subject="rewards",
    happened="x < 3 and (-∞, 3) were equal with the one as the label and different with the other, so the same answer was "
    "right or wrong by the spelling of the data.",
    here="Equality is symmetric. Relations are compared side by side, intervals end by end, and a relation never "
    "equals an interval, whichever is the label (`verifiers/math_equivalence.py`).",
)
PAIRS = (
    ("x<3", r"(-\infty, 3)", False),
    ("(0, 12.5)", "0 < x < 12.5", False),
    ("(0, 12.5)", r"(0, \frac{25}{2})", True),
    ("(0, 12.5)", "[0, 12.5]", False),
    (r"x \geq 2", r"2 \leq x", True),
    ("1 < x < 2", "2 > x > 1", True),
    (r"x \leq \frac{1}{2}", r"x \le 0.5", True),
    (r"x \leq 3", "x < 3", False),
    (r"x \leq 3", "3", False),
)


def check(equal: Callable[[str, str], bool]) -> None:
    for left, right, expected in PAIRS:
        assert (equal(left, right), equal(right, left)) == (expected, expected), (left, right)


def theirs(label: str, answer: str) -> bool:
    """A relation in the label is solved for its set; one in the answer is not."""
    as_set = {"x<3": r"(-\infty, 3)", "0 < x < 12.5": "(0, 12.5)"}
    return as_set.get(label, label) == answer


ours = are_equal


def test_equality_in_one_direction_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_relations_are_compared_alike_both_ways_here() -> None:
    check(ours)
