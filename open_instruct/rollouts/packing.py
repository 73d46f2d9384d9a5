"""From scored samples to the arrays that learners train on: collation, packing, shares per rank.

    samples ─► mini-batches (one optimizer step each) ─► micro-batches (one forward/backward each) ─► ranks

NumPy only, and deterministic: the same samples in the same order give the same arrays.
Shapes: B rows, T tokens, P prompts, G samples of one prompt.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from open_instruct.data_types import CollatedBatchData, MiniBatch, TrainingSample

Bin = list[int]
"""Indices of the samples that share a micro-batch."""
Layout = Literal["padded", "packed"]


def reset_position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """Position of each token within its own sequence.

    Args:
        attention_mask: (B, T) integers; 1..k number the sequences that share a row, 0 is padding.

    Returns:
        (B, T) int32, from 0 in each sequence; 0 on padding.
    """
    columns = np.arange(attention_mask.shape[1])
    starts = np.diff(attention_mask, axis=1, prepend=-1) != 0
    start_columns = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return np.where(attention_mask == 0, 0, columns - start_columns).astype(np.int32)


# ------------------------------------------------------------------------------------------------ collation


def collate_padded(samples: Sequence[TrainingSample], pad_token_id: int) -> CollatedBatchData:
    """One sample a row, padded on the right to the longest."""
    lengths_B = np.array([len(sample) for sample in samples])
    columns_T = np.arange(lengths_B.max(), dtype=np.int32)
    is_token_BT = columns_T < lengths_B[:, None]

    def fill(values: np.ndarray, padding: float = 0) -> np.ndarray:
        padded_BT = np.full((*is_token_BT.shape, *values.shape[1:]), padding, dtype=values.dtype)
        padded_BT[is_token_BT] = values  # row by row, the order in which the samples stand in `values`
        return padded_BT

    tokens, mask, advantages, logprobs = _concatenate(samples)
    weights = _loss_weights(samples, mask)
    return CollatedBatchData(
        query_responses=fill(tokens, padding=pad_token_id),
        # Counting on through the padding keeps each row one sequence, for which attention has its fast causal path.
        position_ids=np.tile(columns_T, (len(samples), 1)),
        response_masks=fill(mask),
        advantages=fill(advantages),
        vllm_logprobs=fill(logprobs),
        loss_weights=None if weights is None else fill(weights),
        ce_masks=None if (inserted := _inserted(samples)) is None else fill(inserted),
        **{name: fill(values, padding=padding) for name, (values, padding) in _of_teacher(samples).items()},
    )


def collate_packed(samples: Sequence[TrainingSample], pad_token_id: int) -> CollatedBatchData:
    """All samples one after another in a single row (B = 1), without padding. `position_ids` begin at 0 where a sample begins."""
    del pad_token_id  # the two layouts share a signature
    lengths = [len(sample) for sample in samples]
    tokens, mask, advantages, logprobs = _concatenate(samples)
    weights = _loss_weights(samples, mask)
    return CollatedBatchData(
        query_responses=tokens[None],
        position_ids=reset_position_ids(np.repeat(np.arange(1, len(samples) + 1), lengths)[None]),
        response_masks=mask[None],
        advantages=advantages[None],
        vllm_logprobs=logprobs[None],
        loss_weights=None if weights is None else weights[None],
        ce_masks=None if (inserted := _inserted(samples)) is None else inserted[None],
        **{name: values[None] for name, (values, _) in _of_teacher(samples).items()},
    )


def _concatenate(samples: Sequence[TrainingSample]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, masks, advantages and log-probs of all samples, each as one flat array in the order of `samples`."""
    # A first token has no log-prob: its predecessor is nothing, or in a packed row somebody else's last token.
    assert all(len(sample.query) > 0 for sample in samples), "a sample needs at least one query token"
    tokens = np.concatenate([part for sample in samples for part in (sample.query, sample.response)])
    mask = np.concatenate([part for s in samples for part in (np.zeros(len(s.query), dtype=bool), s.mask)])
    logprobs = np.concatenate([part for s in samples for part in (np.zeros(len(s.query)), s.logprobs)])
    advantages = np.repeat([sample.advantage for sample in samples], [len(sample) for sample in samples])
    return (
        tokens.astype(np.int32),
        mask,
        np.where(mask, advantages, 0).astype(np.float32),
        np.where(mask, logprobs, 0).astype(np.float32),
    )


def _loss_weights(samples: Sequence[TrainingSample], mask: np.ndarray) -> np.ndarray | None:
    """Loss weights of all tokens, flat like the arrays of `_concatenate`; None if all samples weigh 1."""
    if all(sample.weight == 1.0 for sample in samples):
        return None
    weights = np.repeat([sample.weight for sample in samples], [len(sample) for sample in samples])
    return np.where(mask, weights, 0).astype(np.float32)


def _inserted(samples: Sequence[TrainingSample]) -> np.ndarray | None:
    """Masks of the cross-entropy, flat like the arrays of `_concatenate`; None if no sample has one."""
    if all(sample.inserted is None for sample in samples):
        return None
    nothing = [(np.zeros(len(s.query), dtype=bool), np.zeros(len(s.response), dtype=bool)) for s in samples]
    pairs = zip(samples, nothing, strict=True)
    return np.concatenate(
        [part for s, (query, none) in pairs for part in (query, none if s.inserted is None else s.inserted)]
    )


def _of_teacher(samples: Sequence[TrainingSample]) -> dict[str, tuple[np.ndarray, float]]:
    """The fields of a micro-batch that hold what the teacher says, flat like the arrays of `_concatenate`, each with the value
    outside responses; empty without a teacher."""
    said = [sample.teacher for sample in samples if sample.teacher is not None]
    if len(said) < len(samples):
        assert not said, "the teacher was asked about some of the samples only"
        return {}
    nothing = {"teacher_top_ids": 0, "teacher_top_logprobs": -np.inf, "teacher_logprobs": 0}

    def flat(name: str) -> np.ndarray:
        of_responses = [getattr(one, name.removeprefix("teacher_")) for one in said]
        before = [
            np.full((len(sample.query), *values.shape[1:]), nothing[name], dtype=values.dtype)
            for sample, values in zip(samples, of_responses, strict=True)
        ]
        return np.concatenate([part for pair in zip(before, of_responses, strict=True) for part in pair])

    return {name: (flat(name), value) for name, value in nothing.items()}


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
    """Bins of samples of similar length, whose padded area is at most `budget`; a longer sample stands alone."""
    bins: list[Bin] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


def _best_fit_decreasing(lengths: Sequence[int], budget: int) -> list[Bin]:
    """Bins of at most `budget` tokens, few and full; a longer sample stands alone.

    The longest sample first, each into the fullest bin that can still take it: never much more than 11/9 of the fewest
    bins possible (Johnson et al., 1974).
    """
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = bisect_left(room, (lengths[i], -1))
        left, b = room.pop(fit) if fit < len(room) else (budget, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        insort(room, (left - lengths[i], b))
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
    collate: Callable[[Sequence[TrainingSample], int], CollatedBatchData]


_LAYOUTS: dict[Layout, _LayoutOps] = {
    "padded": _LayoutOps(_bucket_by_length, _padded_area, collate_padded),
    "packed": _LayoutOps(_best_fit_decreasing, sum, collate_packed),
}


def _partition_for_ranks(lengths: Sequence[int], budget: int, *, num_ranks: int, ops: _LayoutOps) -> list[Bin]:
    """Bins within `budget`, evenly loaded, in a number that the ranks can share (while there are samples enough).

    Each rank runs as many micro-batches as the rank with most of them, so bins up to the next multiple of `num_ranks` cost
    nothing: the budget is lowered as far as that number allows, which evens the bins out.
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
    """Shares of at most `ceil(len(costs) / num_ranks)` items: the costliest first, each to the rank with least to do.

    Within a share the costs fall, so ranks that wait for each other after every micro-batch wait little.
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
    samples: Sequence[TrainingSample], *, num_ranks: int, budget: int, ops: _LayoutOps, pad_token_id: int
) -> list[MiniBatch]:
    """One `MiniBatch` per rank."""
    lengths = [len(sample) for sample in samples]
    bins = _partition_for_ranks(lengths, budget, num_ranks=num_ranks, ops=ops)
    shares = _assign_to_ranks([ops.cost(lengths[i] for i in b) for b in bins], num_ranks)
    micro_batches = [[ops.collate([samples[i] for i in bins[b]], pad_token_id) for b in share] for share in shares]
    num_micro_batches = max(1, *map(len, micro_batches))
    num_global_tokens = sum(int(sample.mask.sum()) for sample in samples)
    return [
        MiniBatch(
            micro_batches=share + [_dummy(pad_token_id)] * (num_micro_batches - len(share)),
            num_global_tokens=num_global_tokens,
            num_global_sequences=sum(bool(sample.mask.any()) for sample in samples),
            num_global_ce_tokens=sum(int(sample.inserted.sum()) for sample in samples if sample.inserted is not None),
        )
        for share in micro_batches
    ]


def prepare_collated_data_for_workers(
    samples: Sequence[TrainingSample],
    *,
    dp_world_size: int,
    pack_length: int,
    rows: int,
    layout: Layout,
    pad_token_id: int,
    num_mini_batches: int = 1,
) -> list[list[MiniBatch]]:
    """Divide the samples of one training step among the ranks; every sample is trained on once.

    Args:
        samples: split in the given order into mini-batches whose sizes differ by one at most.
        dp_world_size: number of ranks.
        pack_length: `rows * pack_length` token positions, padding included, are the most that one micro-batch holds. A
            single sample longer than that gets a micro-batch of its own.
        rows: `--per_device_train_batch_size`.
        layout: `"padded"`: rows of similar length, padded on the right; `"packed"`: one row without padding.
        num_mini_batches: optimizer steps in this training step; fewer when there are fewer samples.

    Returns:
        For each rank its mini-batches, at least one. All ranks have the same number of mini-batches and, in each, of
        micro-batches (rows without a trained token fill up). Without samples `num_global_tokens` is 0.
    """
    num_mini_batches = max(1, min(num_mini_batches, len(samples)))
    edges = [len(samples) * i // num_mini_batches for i in range(num_mini_batches + 1)]
    mini_batches = [
        _share_mini_batch(
            samples[start:end],
            num_ranks=dp_world_size,
            budget=rows * pack_length,
            ops=_LAYOUTS[layout],
            pad_token_id=pad_token_id,
        )
        for start, end in pairwise(edges)
    ]
    return [[mini_batch[rank] for mini_batch in mini_batches] for rank in range(dp_world_size)]
