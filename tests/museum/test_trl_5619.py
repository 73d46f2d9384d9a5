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
    happened="The token-mean losses (DAPO, CISPO) were divided by the tokens of the whole batch, and then once more by the"
    " number of accumulation steps, or by the tokens of a batch that did not match these steps: the gradient "
    "shrank with the number of micro-batches.",
    here="Learners add up sums over all micro-batches and ranks and divide once, by the number of tokens of the whole "
    "optimizer step (`algorithms/denominators.py`).",
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
    num_tokens = sum(len(losses) for micro_batch in division for losses in micro_batch)
    return sum(float(np.concatenate(micro_batch).sum()) / num_tokens / len(division) for micro_batch in division)


def ours(division: MicroBatches) -> float:
    total = sum(float(losses.sum()) for micro_batch in division for losses in micro_batch)
    num_tokens = sum(len(losses) for micro_batch in division for losses in micro_batch)
    return total / loss_divisor(TOKEN, num_tokens=num_tokens, num_sequences=len(LOSSES), response_length=8)


def test_division_by_the_accumulation_steps_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_division_into_micro_batches_does_not_matter_here() -> None:
    check(ours)
