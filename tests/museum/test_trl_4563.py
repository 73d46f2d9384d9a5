"""The grader reads the thoughts."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("huggingface/trl #4563",),
    subject="rewards",
    happened="The math reward searched the whole completion, so a right result that the model had thought of and dropped "
    "was paid, and a wrong one in the thoughts could cost a right answer.",
    here="Every verifier that reads text reads what stands behind the last `</think>`. Where thoughts were begun, by "
    "the response or by the template, and never ended, there is no answer (`verifiers/thoughts.py`).",
)
OPENED = "What is 6 * 7?\n<think>"
RESPONSES = (
    (r"<think>Perhaps \boxed{41}.</think> It is \boxed{42}.", "", True),
    (r"<think>Perhaps \boxed{42}.</think> It is \boxed{41}.", "", False),
    (r"<think>It must be \boxed{42}.</think> I give up.", "", False),
    (r"<think>It must be \boxed{42}.", "", False),
    (r"It must be \boxed{42}.", OPENED, False),
    (r"Perhaps \boxed{41}, no.</think>The answer is $42$.", OPENED, True),
)
"""Response, prompt, and whether the final answer is 42."""


def check(is_right: Callable[[str, str], bool]) -> None:
    for response, prompt, expected in RESPONSES:
        assert is_right(response, prompt) == expected, response


def theirs(response: str, prompt: str) -> bool:
    del prompt
    return "42" in re.findall(r"\\boxed\{(.*?)\}", response)


def ours(response: str, prompt: str) -> bool:
    return score_response("math", "42", [], response, prompt).score == 1


def test_box_in_the_thoughts_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_answer_is_behind_the_thoughts_here() -> None:
    check(ours)
