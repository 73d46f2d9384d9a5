"""Advantages, collation and the division of samples among ranks."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_teachers import said_of

from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.rollouts.collation import collate_packed, collate_padded, reset_position_ids
from open_instruct.rollouts.packing import prepare_collated_data_for_workers

PAD = 0
LAYOUTS = ["padded", "packed"]


def make_samples(lengths: list[tuple[int, int]]) -> list[TrainingSample]:
    """Samples of (query, response) lengths whose token ids occur once in all of them, so that each can be traced."""
    rng = np.random.default_rng(0)
    ids = itertools.count(1)
    return [
        TrainingSample(
            query=np.array([next(ids) for _ in range(q)], dtype=np.int32),
            response=np.array([next(ids) for _ in range(r)], dtype=np.int32),
            mask=rng.random(r) < 0.8,
            logprobs=-rng.random(r).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for q, r in lengths
    ]


def trained(samples: list[TrainingSample]) -> list[tuple[int, float, float]]:
    """(token id, advantage, log-prob) of each trained token, sorted."""
    return sorted(
        (int(token), float(np.float32(s.advantage)), float(logprob))
        for s in samples
        for token, logprob in zip(s.response[s.mask], s.logprobs[s.mask], strict=True)
    )


def trained_in(mini_batches: list[MiniBatch]) -> list[tuple[int, float, float]]:
    rows = []
    for batch in (b for m in mini_batches for b in m.micro_batches):
        mask = batch.response_masks
        columns = (batch.query_responses[mask], batch.advantages[mask], batch.vllm_logprobs[mask])
        rows += zip(*(c.tolist() for c in columns), strict=True)
    return sorted(rows)


def tokens_in(mini_batches: list[MiniBatch]) -> list[int]:
    ids = [b.query_responses.ravel() for m in mini_batches for b in m.micro_batches]
    return sorted(t for t in np.concatenate(ids).tolist() if t != PAD)


# ------------------------------------------------------------------------------------------------ small formulas


def test_reset_position_ids_starts_again_with_each_segment() -> None:
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    positions = reset_position_ids(segments)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(
        positions, [[0, 1, 2, 0, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 0, 0]]
    )


# ------------------------------------------------------------------------------------------------ collation


@pytest.fixture
def two_samples() -> list[TrainingSample]:
    f32 = np.float32
    return [
        TrainingSample(np.array([5]), np.array([6, 7]), np.array([True, False]), np.array([-1, np.nan], f32), 2.0),
        TrainingSample(np.array([8, 9]), np.array([3, 4]), np.array([True, True]), np.array([-3, -4], f32), -1.0),
    ]


def test_collate_padded(two_samples: list[TrainingSample]) -> None:
    batch = collate_padded(two_samples, pad_token_id=99)
    np.testing.assert_array_equal(batch.query_responses, [[5, 6, 7, 99], [8, 9, 3, 4]])
    np.testing.assert_array_equal(batch.position_ids, [[0, 1, 2, 3], [0, 1, 2, 3]])
    np.testing.assert_array_equal(batch.response_masks, [[0, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(batch.advantages, [[0, 2, 0, 0], [0, 0, -1, -1]])
    np.testing.assert_array_equal(batch.vllm_logprobs, [[0, -1, 0, 0], [0, 0, -3, -4]])


def test_collate_packed(two_samples: list[TrainingSample]) -> None:
    batch = collate_packed(two_samples, pad_token_id=99)
    np.testing.assert_array_equal(batch.query_responses, [[5, 6, 7, 8, 9, 3, 4]])
    np.testing.assert_array_equal(batch.position_ids, [[0, 1, 2, 0, 1, 2, 3]])
    np.testing.assert_array_equal(batch.response_masks, [[0, 1, 0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(batch.advantages, [[0, 2, 0, 0, 0, -1, -1]])
    np.testing.assert_array_equal(batch.vllm_logprobs, [[0, -1, 0, 0, 0, -3, -4]])


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_collated_dtypes_are_those_of_the_message(collate, two_samples: list[TrainingSample]) -> None:
    batch = collate(two_samples, 99)
    assert batch.query_responses.dtype == batch.position_ids.dtype == np.int32
    assert batch.advantages.dtype == batch.vllm_logprobs.dtype == np.float32
    assert batch.response_masks.dtype == np.bool_


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_what_a_teacher_says_lies_on_its_tokens(collate, two_samples: list[TrainingSample]) -> None:
    taught = [replace(sample, teacher=said_of(sample.response)) for sample in two_samples]
    batch = collate(taught, 99)
    of_response = batch.teacher_logprobs != 0
    tokens = batch.query_responses[of_response]
    assert sorted(tokens) == [3, 4, 6, 7]
    np.testing.assert_array_equal(batch.teacher_top_ids[of_response], said_of(tokens).top_ids)
    np.testing.assert_array_equal(batch.teacher_top_logprobs[of_response], said_of(tokens).top_logprobs)
    assert np.isneginf(batch.teacher_top_logprobs[~of_response]).all()
    assert (batch.teacher_top_ids.dtype, batch.teacher_top_logprobs.dtype) == (np.int32, np.float32)
    with pytest.raises(AssertionError, match="some of the samples only"):
        collate([taught[0], two_samples[1]], 99)


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_a_sample_without_a_query_is_refused(collate) -> None:
    with pytest.raises(AssertionError, match="query token"):
        collate(make_samples([(0, 3)]), PAD)


# ------------------------------------------------------------------------------------------------ the division

lengths_of_samples = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_of_samples,
    layout=st.sampled_from(LAYOUTS),
    dp_world_size=st.integers(1, 6),
    pack_length=st.integers(1, 64),
    rows=st.integers(1, 4),
    num_mini_batches=st.integers(1, 5),
)
def test_every_sample_is_trained_on_once(lengths, layout, dp_world_size, pack_length, rows, num_mini_batches) -> None:
    samples = make_samples(lengths)
    ranks = prepare_collated_data_for_workers(
        samples,
        dp_world_size=dp_world_size,
        pack_length=pack_length,
        rows=rows,
        layout=layout,
        pad_token_id=PAD,
        num_mini_batches=num_mini_batches,
    )
    assert len(ranks) == dp_world_size
    everything = [mini_batch for rank in ranks for mini_batch in rank]
    assert tokens_in(everything) == list(range(1, sum(map(len, samples)) + 1))
    assert trained_in(everything) == trained(samples)

    expected_mini_batches = max(1, min(num_mini_batches, len(samples)))
    assert {len(rank) for rank in ranks} == {expected_mini_batches}
    start = 0
    for step in zip(*ranks, strict=True):
        assert len({len(m.micro_batches) for m in step}) == 1, "ranks must agree on the number of micro-batches"
        assert {m.num_global_tokens for m in step} == {sum(b.num_tokens for m in step for b in m.micro_batches)}
        check_budget(step, [len(s) for s in samples], rows * pack_length)

        ids = tokens_in(list(step))  # mini-batches take the samples in their order
        assert ids == list(range(start + 1, start + len(ids) + 1))
        start += len(ids)

        real = [sum(bool((b.query_responses != PAD).any()) for b in m.micro_batches) for m in step]
        share = [s for s in samples if s.query[0] in ids]
        assert len(step[0].micro_batches) == max(1, -(-sum(real) // dp_world_size)), "no more rounds than needed"
        if len(share) >= dp_world_size:
            assert min(real) >= 1, "every rank has work when there are samples enough"
        if len(share) >= dp_world_size * len(step[0].micro_batches):
            assert min(real) == max(real), "no dummies when there are samples enough"


def check_budget(step: tuple[MiniBatch, ...], lengths: list[int], budget: int) -> None:
    for batch in (b for m in step for b in m.micro_batches):
        alone = (batch.position_ids == 0).sum() == 1
        is_dummy = not (batch.query_responses != PAD).any()
        assert batch.query_responses.size <= budget or alone or is_dummy
        assert batch.query_responses.shape[1] >= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_division_is_deterministic(layout) -> None:
    samples = make_samples([(3, n % 7) for n in range(30)])
    options = {"dp_world_size": 3, "pack_length": 16, "rows": 2, "layout": layout, "pad_token_id": PAD}
    first, second = (prepare_collated_data_for_workers(samples, **options) for _ in range(2))
    for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
            np.testing.assert_array_equal(x.query_responses, y.query_responses)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_are_balanced_between_ranks_and_between_micro_batches(layout) -> None:
    rng = np.random.default_rng(1)
    samples = make_samples([(20, int(n)) for n in rng.integers(5, 200, size=256)])
    ranks = prepare_collated_data_for_workers(
        samples, dp_world_size=8, pack_length=2048, rows=1, layout=layout, pad_token_id=PAD
    )
    sizes = np.array([[b.query_responses.size for b in rank[0].micro_batches] for rank in ranks])
    assert sizes.sum(axis=1).max() <= 1.05 * sizes.sum(axis=1).mean()
    # Ranks wait for each other after each micro-batch.
    assert sizes.max(axis=0).sum() <= 1.1 * sizes.sum(axis=1).mean()
    assert sizes.sum() <= 1.2 * sum(map(len, samples)), "padding"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_more_micro_batches_than_the_budget_asks_for(layout) -> None:
    samples = make_samples([(2, 6)] * 32)
    ranks = prepare_collated_data_for_workers(
        samples, dp_world_size=2, pack_length=64, rows=1, layout=layout, pad_token_id=PAD
    )
    assert [[b.query_responses.size for b in rank[0].micro_batches] for rank in ranks] == [[64, 64]] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_samples_than_ranks_leaves_dummies_without_a_trained_token(layout) -> None:
    ranks = prepare_collated_data_for_workers(
        make_samples([(2, 6)] * 2), dp_world_size=4, pack_length=64, rows=1, layout=layout, pad_token_id=7
    )
    batches = [rank[0].micro_batches for rank in ranks]
    assert [len(b) for b in batches] == [1, 1, 1, 1]
    assert [b[0].query_responses.shape for b in batches] == [(1, 8), (1, 8), (1, 2), (1, 2)]
    for (dummy,) in batches[2:]:
        assert dummy.num_tokens == 0
        np.testing.assert_array_equal(dummy.query_responses, [[7, 7]])
        np.testing.assert_array_equal(dummy.position_ids, [[0, 1]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_are_split_where_a_rank_would_idle(layout) -> None:
    """Six equal samples, two to a micro-batch, are three; no budget gives four, which four ranks want."""
    ranks = prepare_collated_data_for_workers(
        make_samples([(2, 6)] * 6), dp_world_size=4, pack_length=16, rows=1, layout=layout, pad_token_id=PAD
    )
    assert [[b.query_responses.size for b in rank[0].micro_batches] for rank in ranks] == [[16], [16], [8], [8]]
    assert tokens_in([mini_batch for rank in ranks for mini_batch in rank]) == list(range(1, 49))


def test_no_samples_at_all() -> None:
    ranks = prepare_collated_data_for_workers(
        [], dp_world_size=2, pack_length=64, rows=1, layout="packed", pad_token_id=7, num_mini_batches=3
    )
    assert [[(m.num_global_tokens, len(m.micro_batches)) for m in rank] for rank in ranks] == [[(0, 1)], [(0, 1)]]


def test_mini_batches_differ_by_one_sample_at_most() -> None:
    samples = make_samples([(1, 1)] * 11)
    (rank,) = prepare_collated_data_for_workers(
        samples,
        dp_world_size=1,
        pack_length=1000,
        rows=1,
        layout="padded",
        pad_token_id=PAD,
        num_mini_batches=4,
    )
    sizes = [sum(len(b.query_responses) for b in m.micro_batches) for m in rank]
    assert sum(sizes) == 11
    assert sorted(sizes) == [2, 3, 3, 3]


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
def test_masks_of_the_cross_entropy_lie_on_the_inserted_tokens(collate: Any) -> None:
    plain = TrainingSample(
        query=np.array([1, 2], dtype=np.int32),
        response=np.array([3, 4, 5], dtype=np.int32),
        mask=np.ones(3, dtype=bool),
        logprobs=np.zeros(3, dtype=np.float32),
        advantage=1.0,
    )
    with_tool = replace(plain, mask=np.array([True, False, True]), inserted=np.array([False, True, False]))
    assert collate([plain, plain], 0).ce_masks is None
    batch = collate([plain, with_tool], 0)
    assert batch.query_responses[batch.ce_masks].tolist() == [4]
    assert not (batch.ce_masks & batch.response_masks).any()
    assert batch.ce_masks.sum() == 1
