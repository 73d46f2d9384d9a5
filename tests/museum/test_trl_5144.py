"""The mask of a conversation is longer than its tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.data_types import Completion
from open_instruct.workflows.conversations.ledger import Ledger

EXHIBIT = Exhibit(
    reports=("huggingface/trl #5144",),
    subject="tokens and turns",
    happened="After each tool call the conversation was made into tokens anew. Where this gave fewer tokens than the model"
    " had sampled, the mask and the log-probs stayed as long as before, and the loss failed on shapes that did "
    "not fit.",
    here="A ledger keeps the sampled ids as they are and adds at the end only; ids, mask and log-probs of a span are "
    "added together (`workflows/conversations/ledger.py`).",
)


class Conversation(NamedTuple):
    """Token ids behind the prompt, and for each whether it is trained on, and its log-prob."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]


A, B, AB = 1, 2, 12
"""The tokenizer has a token for `ab`, but the model has sampled `a` and `b`."""
TURNS = [([A, B], [90, 91]), ([A], [92]), ([B, A, B], [])]
"""Sampled tokens of each turn, and a tool's answer."""


def check(play: Callable[[Sequence[tuple[list[int], list[int]]]], Conversation]) -> None:
    expected_ids = [token for sampled, tool in TURNS for token in sampled + tool]
    expected_mask = [is_own for sampled, tool in TURNS for is_own in [True] * len(sampled) + [False] * len(tool)]
    conversation = play(TURNS)
    assert len(conversation.token_ids) == len(conversation.mask) == len(conversation.logprobs)
    assert conversation.token_ids == expected_ids
    assert conversation.mask == expected_mask
    assert [value == -0.5 for value in conversation.logprobs] == expected_mask


def theirs(turns: Sequence[tuple[list[int], list[int]]]) -> Conversation:
    conversation = Conversation([], [], [])
    for sampled, tool in turns:
        token_ids = conversation.token_ids + sampled + tool
        text = "".join(f"{token} " for token in token_ids).replace(f"{A} {B} ", f"{AB} ")
        conversation.mask.extend([True] * len(sampled) + [False] * len(tool))
        conversation.logprobs.extend([-0.5] * len(sampled) + [0.0] * len(tool))
        conversation.token_ids[:] = map(int, text.split())
    return conversation


def ours(turns: Sequence[tuple[list[int], list[int]]]) -> Conversation:
    ledger = Ledger([7, 8])
    for sampled, tool in turns:
        logprobs = np.full(len(sampled), -0.5, np.float32)
        ledger.sampled(
            Completion(
                token_ids=np.array(sampled, np.int32),
                logprobs=logprobs,
                finish_reason="stop",
                version_spans=[(0, len(sampled))],
            )
        )
        ledger.inserted(tool)
    sample = ledger.sample(finish_reason="stop")
    assert sample.loss_mask is not None
    return Conversation(sample.response_ids.tolist(), sample.loss_mask.tolist(), sample.logprobs.tolist())


def test_new_tokens_with_the_old_mask_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_tokens_stay_those_of_the_model_here() -> None:
    check(ours)
