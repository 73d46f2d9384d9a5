"""Micro-batches with few tokens weigh as much as micro-batches with many."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from exhibit import Exhibit

from open_instruct.algorithms.denominators import TOKEN, loss_divisor
from open_instruct.algorithms.losses import LOSSES, losses_of_tokens
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs

EXHIBIT = Exhibit(
    reports=("huggingface/trl #7249", "PrimeIntellect-ai/prime-rl #583"),
    subject="loss and advantages",
    happened="The loss was averaged within each micro-batch, and then over the micro-batches: 100 tokens of loss 2 and 900"
    " of loss 0.5 gave 1.25 in place of 0.65.",
    here="A micro-batch contributes the sum over its tokens, and the sum of all micro-batches is divided once by all "
    "trained tokens of the optimizer step (`algorithms/objective.py`, `algorithms/denominators.py`).",
)
MicroBatches = list[np.ndarray]
"""Losses of the tokens of each micro-batch, of a policy whose ratio is 1: the negative advantages."""


def check(gradient: Callable[[MicroBatches], float]) -> None:
    losses = np.repeat([2.0, 0.5], [100, 900])
    for cuts in ([], [100], [550], [1, 2, 3], [100, 999]):
        assert gradient(np.split(losses, cuts)) == pytest.approx((100 * 2 + 900 * 0.5) / 1000), cuts


def theirs(micro_batches: MicroBatches) -> float:
    return float(np.mean([losses.mean() for losses in micro_batches]))


def ours(micro_batches: MicroBatches) -> float:
    """The derivative by a number that is added to every log-prob."""
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    entry = LOSSES["dapo"]
    for losses in micro_batches:
        tokens_BT = torch.zeros(1, len(losses), dtype=torch.float64)
        inputs = make_loss_inputs(
            new_logprobs=tokens_BT + shift,
            old_logprobs=tokens_BT,
            behaviour_logprobs=tokens_BT,
            ref_logprobs=None,
            advantages=-torch.from_numpy(losses)[None],
            mask=torch.ones_like(tokens_BT, dtype=torch.bool),
            position_ids=torch.arange(len(losses))[None],
        )
        loss = lambda inputs: losses_of_tokens(entry, inputs, entry.options())  # noqa: E731
        compute_objective(inputs, loss, beta=0.0, kl_estimator=2)[0].backward()
    assert shift.grad is not None
    num_tokens = sum(map(len, micro_batches))
    return shift.grad.item() / loss_divisor(TOKEN, num_tokens=num_tokens, num_sequences=1, response_length=1000)


def test_mean_of_the_means_of_micro_batches_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_tokens_weigh_the_same_in_every_micro_batch_here() -> None:
    check(ours)
