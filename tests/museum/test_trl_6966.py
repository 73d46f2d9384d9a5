"""A template opens the thoughts, and no response has the right form."""

import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.algorithms.reward_shaping import is_well_formed

EXHIBIT = Exhibit(
    reports=("huggingface/trl #6966",),
    subject="rewards",
    happened="The form reward wanted a response to begin with `<think>`. Where the chat template has already opened the "
    "thoughts, the response begins after that tag, so every response got 0, without a word.",
    here="The form begins where the thoughts end; whether the template or the response opened them does not matter "
    "(`algorithms/reward_shaping.py`).",
)


def check(is_of_the_form: Callable[[str], bool]) -> None:
    assert is_of_the_form("<think>2 + 2</think> <answer>4</answer>")
    assert is_of_the_form("2 + 2</think>\n<answer>4</answer>")
    assert not is_of_the_form("<answer>4</answer>")
    assert not is_of_the_form("<think>2 + 2 <answer>4</answer>")


def theirs(text: str) -> bool:
    return re.match(r"^<think>.*</think>\s*<answer>.*</answer>", text, re.DOTALL) is not None


ours = is_well_formed


def test_form_that_begins_with_the_tag_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_thoughts_that_the_template_opened_are_well_formed_here() -> None:
    check(ours)
