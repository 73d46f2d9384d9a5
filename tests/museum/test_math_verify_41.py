"""A formula of which only a part is read equals that part."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("huggingface/Math-Verify #41", "huggingface/Math-Verify #82"),
    subject="rewards",
    happened="A formula that could not be read in full was taken for the number in it that could: 4√(2), badly written, "
    "was 4, and two formulas with the same number in them were equal. Wrong answers were paid.",
    here="A formula counts only if all of it was read; otherwise it equals nothing but the same text "
    "(`verifiers/math_syntax.py`, `verifiers/math_equivalence.py`).",
)
PAIRS = (
    ("4", r"4\sqrt(2)", False),
    ("5", "5^", False),
    ("3", "3+", False),
    ("10", "10_2", False),
    ("f(x)", "f'(x)", False),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}", False),
    (r"1-\frac{1}{\mathrm{e}}", r"1-\frac{1}{e}", True),
    (r"4\sqrt{2}", r"\sqrt{32}", True),
)


def check(is_right: Callable[[str, str], bool]) -> None:
    for label, answer, expected in PAIRS:
        assert is_right(label, answer) == expected, (label, answer)


def theirs(label: str, answer: str) -> bool:
    numbers = [re.search("[0-9]+", text) for text in (label, answer)]
    first, second = (number[0] if number else "" for number in numbers)
    return first == second


def ours(label: str, answer: str) -> bool:
    return score_response("math", label, [], rf"It is $\boxed{{{answer}}}$.").score == 1


def test_number_in_place_of_the_formula_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_formula_counts_as_a_whole_here() -> None:
    check(ours)
