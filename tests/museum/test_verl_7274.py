"""The answer is lost because more text follows it."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("verl-project/verl #7274",),
    subject="rewards",
    happened="Only the last 300 characters of a response were searched for `#### 42`. A model that went on writing got 0 "
    "for a right answer, on the data set that every tutorial uses.",
    here="The whole response behind the thoughts is read, in time that grows with its length alone "
    "(`verifiers/answer_reading.py`).",
)
TAIL = " and the sum above confirms that this is so."


def check(score: Callable[[str], float]) -> None:
    for repeats in (0, 1, 8, 1000):
        assert score("2 + 40 = 42\n#### 42\n" + TAIL * repeats) == 1, repeats
        assert score("2 + 40 = 41\n#### 41\n" + TAIL * repeats) == 0, repeats


def theirs(response: str) -> float:
    answers = re.findall(r"#### ([0-9]+)", response[-300:])
    return float(answers[-1:] == ["42"])


def ours(response: str) -> float:
    return score_response("gsm8k", "42", [], response).score


def test_window_at_the_end_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_answer_before_any_length_of_text_counts_here() -> None:
    check(ours)
