"""Each rank divides its loss by its own number of tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.algorithms.denominators import TOKEN, loss_divisor
from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.rollouts.packing import prepare_collated_data_for_workers

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/prime-rl #2562", "PrimeIntellect-ai/prime-rl #2358"),
    subject="loss and advantages",
    happened="Every rank divided by the tokens of its own share of the batch, and the gradients were averaged over ranks: "
    "tokens on a rank with few of them counted more than the others.",
    here="The samples are counted before they are divided among ranks, and every rank divides by that one number "
    "(`rollouts/packing.py`).",
)
LENGTHS = (1, 2, 3, 40)
Ranks = Sequence[Sequence[MiniBatch]]


def check(weights: Callable[[Ranks], dict[float, float]]) -> None:
    """`weights` gives the weight of a token of each sample in the mean loss; the samples are told by their advantages."""
    for num_ranks in (1, 2):
        samples = [
            TrainingSample(
                query=np.array([1], np.int32),
                response=np.full(length, 2, np.int32),
                mask=np.ones(length, bool),
                logprobs=np.zeros(length, np.float32),
                advantage=float(number),
            )
            for number, length in enumerate(LENGTHS, start=1)
        ]
        ranks = prepare_collated_data_for_workers(
            samples, dp_world_size=num_ranks, pack_length=64, rows=1, layout="packed", pad_token_id=0
        )
        assert weights(ranks) == pytest.approx(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 1 / sum(LENGTHS))), num_ranks


def weights_of(ranks: Ranks, divisors: Sequence[float]) -> dict[float, float]:
    return {
        advantage: 1 / divisor
        for rank, divisor in zip(ranks, divisors, strict=True)
        for mini_batch in rank
        for micro_batch in mini_batch.micro_batches
        for advantage in micro_batch.advantages[micro_batch.response_masks].tolist()
    }


def theirs(ranks: Ranks) -> dict[float, float]:
    own = [sum(micro.num_tokens for mini in rank for micro in mini.micro_batches) for rank in ranks]
    return weights_of(ranks, [num_tokens * len(ranks) for num_tokens in own])


def ours(ranks: Ranks) -> dict[float, float]:
    counted = [rank[0].num_global_tokens for rank in ranks]
    return weights_of(
        ranks, [loss_divisor(TOKEN, num_tokens=n, num_sequences=len(LENGTHS), response_length=64) for n in counted]
    )


def test_division_by_the_tokens_of_one_rank_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_tokens_weigh_the_same_on_all_ranks_here() -> None:
    check(ours)
