"""How the samples of a training step are divided: optimizer steps, ranks, micro-batches, rows.

    samples ─► mini-batches (one optimizer step each) ─► micro-batches (one forward/backward each) ─► ranks

NumPy only, and deterministic: the same samples in the same order give the same arrays.
Shapes: B rows, T tokens, P prompts, G samples of one prompt.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from open_instruct.data_types import CollatedBatchData, MiniBatch, TrainingSample
from open_instruct.rollouts.collation import collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.shared_prompts import Shared, share_prompts

Bin = list[int]
"""Indices of the samples, or of the samples with a shared prompt, that share a micro-batch."""
Layout = Literal["padded", "packed"]


def _dummy(pad_token_id: int) -> CollatedBatchData:
    """The smallest batch that a model can run on: two tokens, neither of which is trained on."""
    nothing = TrainingSample(
        query=np.full(2, pad_token_id, dtype=np.int32),
        response=np.empty(0, dtype=np.int32),
        mask=np.empty(0, dtype=bool),
        logprobs=np.empty(0, dtype=np.float32),
        advantage=0.0,
    )
    return collate_padded([nothing], pad_token_id)


# ------------------------------------------------------------------------------------------------ micro-batches


def _bucket_by_length(lengths: Sequence[int], budget: int) -> list[Bin]:
    """Bins of samples of similar length, with a padded area of at most `budget`; a longer sample gets a bin of its own."""
    bins: list[Bin] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


def _best_fit_decreasing(lengths: Sequence[int], budget: int) -> list[Bin]:
    """Bins of at most `budget` tokens, few and full; a longer sample gets a bin of its own.

    Samples are placed from longest to shortest, each into the fullest bin that still has room. The number of bins is never
    much more than 11/9 of the minimum (Johnson et al., 1974).
    """
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = bisect_left(room, (lengths[i], -1))
        space, b = room.pop(fit) if fit < len(room) else (budget, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        insort(room, (space - lengths[i], b))
    return bins


def _padded_area(lengths: Iterable[int]) -> int:
    lengths = list(lengths)
    return len(lengths) * max(lengths)


@dataclass(frozen=True)
class _LayoutOps:
    """What distinguishes the two layouts."""

    partition: Callable[[Sequence[int], int], list[Bin]]
    cost: Callable[[Iterable[int]], int]
    """Token positions that a micro-batch of samples of these lengths occupies, padding included."""
    collate: Callable[[Sequence[Shared], int], CollatedBatchData]


_LAYOUTS: dict[Layout, _LayoutOps] = {
    "padded": _LayoutOps(_bucket_by_length, _padded_area, pad_rows),
    "packed": _LayoutOps(_best_fit_decreasing, sum, pack_rows),
}


def _partition_for_ranks(lengths: Sequence[int], budget: int, *, num_ranks: int, ops: _LayoutOps) -> list[Bin]:
    """Evenly loaded bins within `budget`; their number is a multiple of `num_ranks` if there are enough samples.

    Each rank runs as many micro-batches as the rank with the most of them, so bins up to the next multiple of `num_ranks` cost
    nothing. The budget is therefore lowered as far as that number of bins allows, which evens out their loads.
    """
    bins = ops.partition(lengths, budget)
    num_bins = min(-(-len(bins) // num_ranks) * num_ranks, len(lengths))
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        candidate = ops.partition(lengths, middle)
        if len(candidate) <= num_bins:
            bins, high = candidate, middle
        else:
            low = middle + 1
    while len(bins) < num_bins:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: ops.cost(lengths[i] for i in b))
        bins.remove(heaviest)
        middle = len(heaviest) // 2
        bins += [heaviest[:middle], heaviest[middle:]]
    return bins


# ------------------------------------------------------------------------------------------------ ranks


def _assign_to_ranks(costs: Sequence[int], num_ranks: int) -> list[Bin]:
    """Shares of at most `ceil(len(costs) / num_ranks)` items. Items are dealt from costliest to cheapest, each to the rank with
    the lowest total cost.

    Costs fall within each share, so ranks that wait for each other after every micro-batch wait little.
    """
    share_size = -(-len(costs) // num_ranks)
    shares: list[Bin] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min((r for r in range(num_ranks) if len(shares[r]) < share_size), key=lambda r: loads[r])
        shares[rank].append(i)
        loads[rank] += costs[i]
    return shares


def _share_mini_batch(
    samples: Sequence[TrainingSample],
    *,
    num_ranks: int,
    budget: int,
    ops: _LayoutOps,
    pad_token_id: int,
    pairs_per_token: float | None,
    most_tokens: int,
    has_mask: bool,
    first_number: int,
) -> list[MiniBatch]:
    """One `MiniBatch` per rank. `first_number`: the number of the first of `samples` in the partial batch."""
    number_of = {id(sample): number for number, sample in enumerate(samples, first_number)}
    rows = share_prompts(samples, pairs_per_token=pairs_per_token, most_tokens=most_tokens, has_mask=has_mask)
    if len(rows) < num_ranks:  # computing a prompt twice is better than letting a rank wait
        rows = share_prompts(samples, pairs_per_token=None, most_tokens=most_tokens)
    lengths = [len(row) for row in rows]
    bins = _partition_for_ranks(lengths, budget, num_ranks=num_ranks, ops=ops)
    shares = _assign_to_ranks([ops.cost(lengths[i] for i in b) for b in bins], num_ranks)
    micro_batches = [[ops.collate([rows[i] for i in bins[b]], pad_token_id) for b in share] for share in shares]
    numbers = [
        tuple(tuple(number_of[id(sample)] for i in bins[b] for sample in rows[i].samples) for b in share)
        for share in shares
    ]
    num_micro_batches = max(1, *map(len, micro_batches))
    num_global_tokens = sum(int(sample.mask.sum()) for sample in samples)
    return [
        MiniBatch(
            micro_batches=share + [_dummy(pad_token_id)] * (num_micro_batches - len(share)),
            num_global_tokens=num_global_tokens,
            num_global_sequences=num_conversations(samples),
            num_global_ce_tokens=sum(int(sample.inserted.sum()) for sample in samples if sample.inserted is not None),
            samples_of_micro_batches=numbers_of_share,
        )
        for share, numbers_of_share in zip(micro_batches, numbers, strict=True)
    ]


def num_conversations(samples: Sequence[TrainingSample]) -> int:
    """How many conversations have a trained token."""
    return sum(any(sample.mask.any() for sample in conversation) for conversation in conversations_of(samples))


def conversations_of(samples: Sequence[TrainingSample]) -> list[Sequence[TrainingSample]]:
    """The samples, divided into conversations. The samples of a conversation follow each other."""
    assert not (samples and samples[-1].goes_on), "the last conversation lacks its end"
    ends = [end for end, sample in enumerate(samples, 1) if not sample.goes_on]
    return [samples[start:end] for start, end in pairwise([0, *ends])]


def prepare_collated_data_for_workers(
    samples: Sequence[TrainingSample],
    *,
    dp_world_size: int,
    pack_length: int,
    rows: int,
    layout: Layout,
    pad_token_id: int,
    num_mini_batches: int = 1,
    pairs_per_token: float | None = None,
) -> list[list[MiniBatch]]:
    """Divide the samples of one training step among the ranks; every sample is trained on once.

    Args:
        samples: split in the given order into mini-batches whose numbers of conversations differ by one at most. All samples of
            a conversation are in one mini-batch, so that each optimizer step divides by whole conversations.
        dp_world_size: number of ranks.
        pack_length: one micro-batch holds at most `rows * pack_length` token positions, padding included. A single sample
            longer than that gets a micro-batch of its own.
        rows: `--per_device_train_batch_size`.
        layout: `"padded"`: rows of similar length, padded on the right; `"packed"`: one row without padding, for flash attention.
        num_mini_batches: optimizer steps in this training step; fewer when there are fewer conversations.
        pairs_per_token: as in `share_prompts`; None shares no prompt.

    Returns:
        For each rank its mini-batches, at least one. All ranks have the same number of mini-batches, and each mini-batch has the
        same number of micro-batches on all ranks (filled up with rows without a trained token). Without samples
        `num_global_tokens` is 0.
    """
    conversations = conversations_of(samples)
    num_mini_batches = max(1, min(num_mini_batches, len(conversations)))
    edges = [len(conversations) * i // num_mini_batches for i in range(num_mini_batches + 1)]
    mini_batches = [
        _share_mini_batch(
            list(chain.from_iterable(conversations[start:end])),
            num_ranks=dp_world_size,
            budget=rows * pack_length,
            ops=_LAYOUTS[layout],
            pad_token_id=pad_token_id,
            pairs_per_token=pairs_per_token,
            most_tokens=pack_length,
            has_mask=layout == "padded",
            first_number=sum(len(conversation) for conversation in conversations[:start]),
        )
        for start, end in pairwise(edges)
    ]
    return [[mini_batch[rank] for mini_batch in mini_batches] for rank in range(dp_world_size)]
