"""The loss depends on how a batch is divided into micro-batches."""

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.algorithms.denominators import TOKEN, loss_divisor

EXHIBIT = Exhibit(
    reports=("modelscope/ms-swift #10117", "huggingface/trl #5619", "huggingface/trl #6024"),
    subject="loss and advantages",
    happened="Each micro-batch was divided by its own number of tokens before the micro-batches were averaged, so gradient"
    " accumulation changed the loss: tokens in small micro-batches weighed more.",
    here="Learners add up sums over all micro-batches and ranks and divide once, by the number of tokens of the whole "
    "step (`algorithms/denominators.py`).",
)
LOSSES = [np.array([1.0]), np.array([2.0, 4.0, 6.0]), np.array([0.5, 0.5]), np.array([8.0])]
"""Losses of the tokens of four responses."""
MicroBatches = list[list[np.ndarray]]


def divisions() -> Iterator[MicroBatches]:
    for number in range(1, len(LOSSES) + 1):
        for cuts in combinations(range(1, len(LOSSES)), number - 1):
            ends = (0, *cuts, len(LOSSES))
            yield [LOSSES[ends[i] : ends[i + 1]] for i in range(number)]


def check(loss: Callable[[MicroBatches], float]) -> None:
    for division in divisions():
        assert loss(division) == pytest.approx(22 / 7)  # 1 + 12 + 1 + 8 over seven tokens


def theirs(division: MicroBatches) -> float:
    return float(np.mean([np.concatenate(micro_batch).mean() for micro_batch in division]))


def ours(division: MicroBatches) -> float:
    total = sum(float(losses.sum()) for micro_batch in division for losses in micro_batch)
    num_tokens = sum(len(losses) for micro_batch in division for losses in micro_batch)
    return total / loss_divisor(TOKEN, num_tokens=num_tokens, num_sequences=len(LOSSES), response_length=8)


def test_means_of_means_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_division_into_micro_batches_does_not_matter_here() -> None:
    check(ours)
