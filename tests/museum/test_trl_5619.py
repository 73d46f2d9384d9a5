"""The loss depends on how a batch is divided into micro-batches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.algorithms.denominators import TOKEN, loss_divisor
from open_instruct.algorithms.losses import LOSSES, losses_of_tokens
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs
from open_instruct.data_types import CollatedBatchData, MiniBatch, TrainingSample
from open_instruct.registry import options_of
from open_instruct.rollouts.packing import prepare_collated_data_for_workers

EXHIBIT = Exhibit(
    reports=("modelscope/ms-swift #10117", "huggingface/trl #5619", "huggingface/trl #6024"),
    subject="loss and advantages",
    happened="The token-mean losses (DAPO, CISPO) were divided by the tokens of the whole batch, and then once more by the"
    " number of accumulation steps, or by the tokens of a batch that did not match these steps: the gradient "
    "shrank with the number of micro-batches.",
    here="Learners add up sums over all micro-batches and ranks and divide once, by the number of tokens of the whole "
    "optimizer step (`rollouts/packing.py`, `algorithms/objective.py`, `algorithms/denominators.py`).",
)
LENGTHS, ADVANTAGES = (1, 3, 2, 1), (1.0, 4.0, 0.5, 8.0)
"""Tokens and advantage of four responses."""
LOSS = -22 / 7
"""1 * 1 + 3 * 4 + 2 * 0.5 + 1 * 8 over seven tokens, where the ratio is 1."""


def share_out(*, num_ranks: int, pack_length: int) -> list[MiniBatch]:
    """The one optimizer step of each rank. The shorter the rows, the more micro-batches."""
    samples = [
        TrainingSample(
            query=np.array([9], np.int32),
            response=np.arange(length, dtype=np.int32),
            mask=np.ones(length, bool),
            logprobs=np.full(length, -1.0, np.float32),
            advantage=advantage,
        )
        for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True)
    ]
    ranks = prepare_collated_data_for_workers(
        samples, dp_world_size=num_ranks, pack_length=pack_length, rows=1, layout="packed", pad_token_id=0
    )
    return [mini_batch for [mini_batch] in ranks]


def summed_loss(micro_batch: CollatedBatchData) -> float:
    """The sum of the loss over the trained tokens, as a learner computes it before the first update."""
    arrays = vars(micro_batch)
    names = ("vllm_logprobs", "advantages", "response_masks", "position_ids")
    logprobs, advantages, mask, positions = (torch.from_numpy(arrays[name][:, 1:]) for name in names)
    inputs = make_loss_inputs(
        new_logprobs=logprobs,
        old_logprobs=logprobs,
        behaviour_logprobs=logprobs,
        ref_logprobs=None,
        advantages=advantages,
        mask=mask,
        position_ids=positions,
    )
    options = options_of(make_args(), LOSSES["dapo"].options)
    loss, _ = compute_objective(
        inputs, lambda inputs: losses_of_tokens(LOSSES["dapo"], inputs, options), beta=0.0, kl_estimator=2
    )
    return float(loss)


def check(loss: Callable[[list[MiniBatch]], float]) -> None:
    numbers = set()
    for num_ranks in (1, 2, 4):
        for pack_length in (4, 6, 64):
            ranks = share_out(num_ranks=num_ranks, pack_length=pack_length)
            numbers.add(len(ranks[0].micro_batches))
            assert loss(ranks) == pytest.approx(LOSS), (num_ranks, pack_length)
    assert len(numbers) > 1


def theirs(ranks: list[MiniBatch]) -> float:
    losses = [
        summed_loss(micro_batch) / mini_batch.num_global_tokens / len(mini_batch.micro_batches)
        for mini_batch in ranks
        for micro_batch in mini_batch.micro_batches
    ]
    return sum(losses)


def ours(ranks: list[MiniBatch]) -> float:
    first = ranks[0]
    divisor = loss_divisor(
        TOKEN,
        num_tokens=first.num_global_tokens,
        num_sequences=first.num_global_sequences,
        response_length=max(LENGTHS),
    )
    return sum(summed_loss(micro_batch) for mini_batch in ranks for micro_batch in mini_batch.micro_batches) / divisor


def test_division_by_the_accumulation_steps_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_division_into_micro_batches_does_not_matter_here() -> None:
    check(ours)
