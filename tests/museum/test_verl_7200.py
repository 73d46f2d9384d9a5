"""The distillation loss is divided within each micro-batch."""

from collections.abc import Callable, Sequence

import pytest
import torch
from exhibit import Exhibit

from open_instruct.algorithms.denominators import TOKEN, loss_divisor
from open_instruct.algorithms.losses import LossInputs
from open_instruct.algorithms.objective import compute_objective

EXHIBIT = Exhibit(
    reports=("verl-project/verl #7200",),
    subject="loss and advantages",
    happened="The distillation loss did not get the number of tokens of the whole batch, so each micro-batch was divided "
    "by its own. Loss and gradient then depended on how the batch was divided: micro-batches of one sequence gave"
    " a sum of means over sequences.",
    here="The loss towards a teacher is part of the same sum over tokens as the policy loss, and both are divided once"
    " (`algorithms/objective.py`).",
)
MicroBatches = Sequence[Sequence[float]]


def check(loss: Callable[[MicroBatches], float]) -> None:
    for division in ([[1.0, 2.0, 3.0, 6.0]], [[1.0], [2.0, 3.0, 6.0]], [[1.0, 2.0], [3.0], [6.0]]):
        assert loss(division) == pytest.approx(12 / 4), division


def theirs(micro_batches: MicroBatches) -> float:
    return sum(sum(losses) / len(losses) for losses in micro_batches)


def ours(micro_batches: MicroBatches) -> float:
    total, num_tokens = 0.0, sum(map(len, micro_batches))
    for losses in micro_batches:
        zeros = torch.zeros(1, len(losses))
        mask = torch.ones_like(zeros, dtype=torch.bool)
        inputs = LossInputs(zeros, zeros, zeros, zeros, mask, torch.arange(len(losses))[None])
        summed, _ = compute_objective(
            inputs, lambda _, zeros=zeros: (zeros, {}), beta=0.0, kl_estimator=2, distillation=torch.tensor([losses])
        )
        total += summed.item()
    return total / loss_divisor(TOKEN, num_tokens=num_tokens, num_sequences=2, response_length=4)


def test_division_within_micro_batches_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_distillation_does_not_depend_on_micro_batches_here() -> None:
    check(ours)
