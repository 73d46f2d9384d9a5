"""The reward of an empty response is put at the last place of the padding."""

from collections.abc import Callable

import numpy as np
import pytest
from exhibit import Exhibit
from group_fakes import make_group, samples_of

from open_instruct.rollouts.collation import collate_padded

EXHIBIT = Exhibit(
    reports=("verl-project/verl #6310", "verl-project/verl #6476"),
    subject="rewards",
    happened="The reward was stored at the index of the last token, number of tokens - 1. For an empty response that is "
    "-1, the last place of the padding: outside the mask, where some sums counted it and others lost it.",
    here="A reward belongs to a response and not to a token. An empty response counts in the baseline of its group and"
    " brings no token into the batch, and nothing outside the mask has an advantage "
    "(`rollouts/training_samples.py`, `rollouts/collation.py`).",
)
Signal = Callable[[list[float], list[int]], tuple[np.ndarray, np.ndarray]]
"""Rewards and lengths of the responses to one prompt -> what each token is trained on, and the mask, both by row."""


def check(signal: Signal) -> None:
    for lengths in ([2, 0, 1, 3], [0, 1, 1, 1], [5, 5, 0, 0]):
        values, mask = signal([1.0, 1.0, 0.0, 1.0], lengths)
        assert not values[~mask].any(), lengths
        assert mask.sum() == sum(lengths)


def theirs(rewards: list[float], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    values_GT = np.zeros((len(rewards), max(lengths)))
    for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        values_GT[number, length - 1] = reward
    return values_GT, np.arange(max(lengths)) < np.array(lengths)[:, None]


def ours(rewards: list[float], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    samples = samples_of(make_group(rewards, lengths=lengths))
    right, wrong = (10 / 4 if rewards[i] else -30 / 4 for i in (0, 2))  # of 10 and 0, with the empty responses counted
    assert {sample.advantage for sample in samples} <= {right, wrong}
    batch = collate_padded(samples, pad_token_id=0)
    return batch.advantages, batch.response_masks


def test_reward_in_the_padding_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_nothing_outside_the_mask_is_trained_on_here() -> None:
    check(ours)
