"""Countdown pays for numbers that the task does not have."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.reasoning_gym_data import encode_item
from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("open-thought/reasoning-gym #265", "open-thought/reasoning-gym #478"),
    subject="rewards",
    happened="The scorer of countdown compared values alone, so any expression of the right value won; later it compared "
    "the sets of numbers, so a number that is there twice could be left out, and the value's integer part was "
    "enough.",
    here="An expression must use exactly the numbers of the row, each as often as it is there, and have exactly the "
    "value of the target, whatever the installed library does (`verifiers/reasoning_gym_scorers.py`).",
)
NUMBERS, TARGET = [1, 81, 1, 1], 81
ANSWERS = {"81*1*1*1": True, "81+1-1*1": True, "81*1": False, "80+1": False, "81": False, "81+1/(1+1)": False}


def check(is_right: Callable[[str], bool]) -> None:
    for answer, expected in ANSWERS.items():
        assert is_right(answer) == expected, answer


def theirs_of_values(answer: str) -> bool:
    return eval(answer) == TARGET


def theirs_of_sets(answer: str) -> bool:
    return int(eval(answer)) == TARGET and set(map(int, re.findall("[0-9]+", answer))) == set(NUMBERS)


def ours(answer: str) -> bool:
    metadata = {"source_dataset": "countdown", "numbers": NUMBERS, "target": TARGET, "expression": "81*1*1*1"}
    label = encode_item({"question": "", "answer": "81*1*1*1", "metadata": metadata})
    return score_response("reasoning_gym/countdown", label, [], f"<answer>{answer}</answer>").score == 1


@pytest.mark.parametrize("theirs", [theirs_of_values, theirs_of_sets])
def test_other_numbers_are_caught(theirs: Callable[[str], bool]) -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_numbers_of_the_row_are_used_once_each_here() -> None:
    check(ours)
