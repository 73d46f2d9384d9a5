"""The end token is masked because padding has the same id."""

from collections.abc import Callable

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.data_types import TrainingSample
from open_instruct.rollouts.collation import collate_padded

EXHIBIT = Exhibit(
    reports=("huggingface/trl #6357", "huggingface/trl #4970"),
    subject="tokens and turns",
    happened="The mask of padding was made from token ids. Many tokenizers pad with their end token, so the end of each "
    "response was masked too, and the model never learned to stop.",
    here="Masks are made from the lengths of the samples, and token ids play no part in them "
    "(`rollouts/collation.py`).",
)
END = 2
PROMPT, LONG, SHORT = [7, END, 8], [4, 5, 6, END], [4, END]
"""A prompt of several turns holds the end token too."""


def check(trained: Callable[[list[list[int]]], list[list[int]]]) -> None:
    """The trained tokens of each response."""
    assert trained([LONG, SHORT]) == [LONG, SHORT]


def theirs(responses: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, responses))
    padded = np.array([response + [END] * (longest - len(response)) for response in responses])
    return [row[row != END].tolist() for row in padded]


def ours(responses: list[list[int]]) -> list[list[int]]:
    samples = [
        TrainingSample(
            query=np.array(PROMPT, np.int32),
            response=np.array(response, np.int32),
            mask=np.ones(len(response), bool),
            logprobs=np.zeros(len(response), np.float32),
            advantage=1.0,
        )
        for response in responses
    ]
    batch = collate_padded(samples, pad_token_id=END)
    return [row[mask].tolist() for row, mask in zip(batch.query_responses, batch.response_masks, strict=True)]


def test_mask_of_token_ids_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_end_of_a_response_is_trained_here() -> None:
    check(ours)
