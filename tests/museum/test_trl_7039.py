"""A response that ends with the second of two end tokens counts as cut off."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from exhibit import Exhibit
from group_fakes import make_group, samples_of

EXHIBIT = Exhibit(
    reports=("huggingface/trl #7039",),
    subject="tokens and turns",
    happened="Models such as Phi-3.5 name several end tokens in `generation_config.json`, and the engine stopped at each; "
    "the trainer knew the tokenizer's one alone. So nearly all responses counted as cut off, and where these are "
    "masked, nothing was trained on.",
    here="Whether a response ended is what the engine says (`finish_reason`), and no token is compared with an end "
    "token (`rollouts/training_samples.py`).",
)
END_OF_TEXT, END_OF_TURN = 32000, 32007
RESPONSES = (
    ([5, END_OF_TEXT], "stop", False),
    ([5, END_OF_TURN], "stop", False),
    ([5, 6], "stop", False),  # a stop string
    ([5, 6], "length", True),
)
"""Token ids, why the engine stopped, and whether the response was cut off."""


def check(is_cut: Callable[[list[int], str], bool]) -> None:
    for token_ids, reason, expected in RESPONSES:
        assert is_cut(token_ids, reason) == expected, (token_ids, reason)


def theirs(token_ids: list[int], reason: str) -> bool:
    del reason
    return token_ids[-1] != END_OF_TEXT


def ours(token_ids: list[int], reason: str) -> bool:
    group = make_group([1, 0], reasons=[reason, "stop"])
    first, other = group.result.samples
    first = replace(first, response_ids=np.array(token_ids, np.int32))
    group = replace(group, result=replace(group.result, samples=[first, other]))
    trained = [sample.response.tolist() for sample in samples_of(group, mask=True)]
    return token_ids not in trained


def test_comparison_with_one_end_token_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_responses_end_where_the_engine_says_here() -> None:
    check(ours)
