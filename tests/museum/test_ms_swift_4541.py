"""`a = 1 or a = -2` in LaTeX is not understood."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.math_equivalence import are_equal

EXHIBIT = Exhibit(
    reports=("modelscope/ms-swift #4541",),
    subject="rewards",
    happened="Answers with words between their parts, such as two solutions with `or`, were read as one of them or not at "
    "all, so right answers got 0.",
    here="`or`, `and` and their spellings in LaTeX divide an answer into parts; alternatives and named values have no "
    "order, plain lists have one (`verifiers/math_parts.py`, `verifiers/math_equivalence.py`).",
)
OR, AND = r"\text{ or }", r"\text{ and }"
PAIRS = (
    (f"a=1 {OR} a=-2", f"a=-2 {OR} a=1", True),
    (f"a=1 {OR} a=-2", f"a=1 {OR} a=2", False),
    (f"a=1 {OR} a=-2", "a=1", False),
    ("1, 2, 3", f"1, 2, {AND} 3", True),
    ("1, 2", f"1 {OR} 3", False),
    ("1, 2", "2, 1", False),
    ("x=3, y=4", f"y=4 {AND} x=3", True),
    ("x=3, y=4", f"y=3 {AND} x=4", False),
)


def check(equal: Callable[[str, str], bool]) -> None:
    for label, answer, expected in PAIRS:
        assert equal(answer, label) == expected, (label, answer)


def theirs(answer: str, label: str) -> bool:
    """What stands before the first word is the answer."""
    return answer.partition(r"\text")[0].strip(" ,") == label.partition(r"\text")[0].strip(" ,")


ours = are_equal


def test_first_of_several_parts_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_words_between_parts_are_understood_here() -> None:
    check(ours)
