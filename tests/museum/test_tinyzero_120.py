"""The answer in the tags that the prompt asks for is not looked at."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.verifiers.registry import score_response

EXHIBIT = Exhibit(
    reports=("Jiayi-Pan/TinyZero #120", "huggingface/open-r1 #418"),
    subject="rewards",
    happened="The prompt asks for the answer in `<answer>` tags, but the reward searched the thoughts, or wanted the tags "
    "in lines of their own, so a response as asked for could score 0.",
    here="`math` reads the content of `<answer>`, with a box in it or without, however the tags stand in the text, and"
    " `string_matcher` and `puzzle` read it too (`verifiers/math_answers.py`, `verifiers/answer_reading.py`).",
)
RESPONSES = {
    "<think>6 * 7 = 42</think> <answer>42</answer>": True,
    "<think>\n6 * 7 = 42\n</think>\n<answer>\n42\n</answer>": True,
    r"<think>6 * 7</think><answer>It is \boxed{42}.</answer>": True,
    "<think>6 * 7 = 42</think> <answer>41</answer>": False,
    "<think>6 * 7 = 42, <answer>42</answer></think> <answer>41</answer>": False,
}


def check(is_right: Callable[[str], bool]) -> None:
    for response, expected in RESPONSES.items():
        assert is_right(response) == expected, response


def theirs_in_lines(response: str) -> bool:
    return re.search(r"</think>\n<answer>\n42\n</answer>$", response) is not None


def theirs_in_thoughts(response: str) -> bool:
    return re.findall("= ([0-9]+)", response)[:1] == ["42"]


def ours(response: str) -> bool:
    return score_response("math", "42", [], response).score == 1


@pytest.mark.parametrize("theirs", [theirs_in_lines, theirs_in_thoughts])
def test_tags_that_are_not_read_are_caught(theirs: Callable[[str], bool]) -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_answer_in_tags_counts_here() -> None:
    check(ours)
