"""Which responses share a prompt, and what their rows look like."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from open_instruct.data_types import TrainingSample
from open_instruct.rollouts.collation import collate_padded, pack_rows, pad_rows
from open_instruct.rollouts.packing import prepare_collated_data_for_workers
from open_instruct.rollouts.shared_prompts import Shared, share_prompts


def group(prompt: int, num_prompt_tokens: int, lengths: list[int]) -> list[TrainingSample]:
    """Responses of these lengths to one prompt. Every response token occurs once among all samples."""
    query = np.arange(num_prompt_tokens, dtype=np.int32) + 1000 * prompt
    starts = 10**6 * (prompt + 1) + 1000 * np.arange(len(lengths))
    return [
        TrainingSample(
            query=query.copy(),
            response=np.arange(start, start + length, dtype=np.int32),
            mask=np.ones(length, dtype=bool),
            logprobs=np.full(length, -float(number + 1), dtype=np.float32),
            advantage=float(number),
        )
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def sizes(
    samples: list[TrainingSample], pairs_per_token: float | None, most_tokens: int = 10**6, *, has_mask: bool = True
) -> list[int]:
    shared = share_prompts(samples, pairs_per_token=pairs_per_token, most_tokens=most_tokens, has_mask=has_mask)
    assert [sample for one in shared for sample in one.samples] == samples
    return [len(one.samples) for one in shared]


def test_long_prompts_are_shared_and_short_ones_are_not() -> None:
    assert sizes(group(0, 500, [50] * 8), 1000.0) == [8]
    assert sizes(group(0, 17, [64] * 8), 1000.0) == [8]
    assert sizes(group(0, 1, [64] * 8), 1000.0) == [1] * 8
    assert sizes(group(0, 500, [50] * 8), None) == [1] * 8
    assert sizes(group(0, 500, [50] * 8) + group(1, 1, [64] * 2) + group(2, 500, [50] * 3), 1000.0) == [8, 1, 1, 3]


def test_a_row_holds_no_more_than_it_may() -> None:
    assert sizes(group(0, 500, [50] * 8), 1000.0, most_tokens=700) == [4, 4]
    assert sizes(group(0, 500, [50] * 7), 1000.0, most_tokens=700) == [3, 4]
    assert sizes(group(0, 500, [50] * 8), 1000.0, most_tokens=599) == [1] * 8
    assert sizes(group(0, 4000, [4000] * 4), 1e9) == [2, 2]  # a mask of 4000 * 8000 pairs for each response


def test_where_attention_is_what_costs_none_share_a_row() -> None:
    assert sizes(group(0, 100, [100] * 8), 600.0) == [8]
    assert sizes(group(0, 100, [1000] * 8), 600.0) == [1] * 8
    # Of attention alone: 10**2 / 2 + 2 * r * (10 + r) pairs in one row, (10 + r)**2 in two.
    assert sizes(group(0, 10, [7] * 2), 0.0) == [2]
    assert sizes(group(0, 10, [8] * 2), 0.0) == [1, 1]


def test_without_a_mask_all_share_that_a_row_holds() -> None:
    for prompt, response in ((5, 1000), (500, 2048), (1000, 4096)):
        assert sizes(group(0, prompt, [response] * 8), 1000.0, has_mask=False) == [8]
        assert sizes(group(0, prompt, [response] * 8), 1000.0) == [1] * 8
    assert sizes(group(0, 4000, [4000] * 4), 1e9, has_mask=False) == [4]
    assert sizes(group(0, 500, [2048] * 8), 1000.0, most_tokens=8192, has_mask=False) == [2, 3, 3]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_packed_rows_are_for_attention_without_a_mask(layout: Literal["padded", "packed"]) -> None:
    [[mini_batch]] = prepare_collated_data_for_workers(
        group(0, 50, [500] * 8),
        dp_world_size=1,
        pack_length=5000,
        rows=1,
        layout=layout,
        pad_token_id=0,
        pairs_per_token=100.0,
    )
    [micro_batch] = mini_batch.micro_batches
    assert micro_batch.query_responses.shape == ((8, 550) if layout == "padded" else (1, 50 + 8 * 500))


def test_padded_rows_with_a_shared_prompt() -> None:
    batch = pad_rows([Shared(group(0, 3, [2, 1])), Shared(group(1, 2, [3]))], 99)
    np.testing.assert_array_equal(
        batch.query_responses,
        [[0, 1, 2, 10**6, 10**6 + 1, 10**6 + 1000], [1000, 1001, 2 * 10**6, 2 * 10**6 + 1, 2 * 10**6 + 2, 99]],
    )
    np.testing.assert_array_equal(batch.position_ids, [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 4, 0]])
    np.testing.assert_array_equal(batch.branches, [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.segments, [[1] * 6, [2] * 5 + [0]])
    np.testing.assert_array_equal(batch.predictors, [[0, 0, 1, 2, 3, 2], [0, 0, 1, 2, 3, 0]])
    np.testing.assert_array_equal(batch.response_masks, [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.vllm_logprobs, [[0, 0, 0, -1, -1, -2], [0, 0, -1, -1, -1, 0]])


def test_packed_rows_with_a_shared_prompt() -> None:
    batch = pack_rows([Shared(group(1, 2, [3])), Shared(group(0, 3, [2, 1]))], 99)
    np.testing.assert_array_equal(batch.position_ids, [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 3]])
    np.testing.assert_array_equal(batch.branches, [[0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 2]])
    np.testing.assert_array_equal(batch.segments, [[1] * 5 + [2] * 6])
    np.testing.assert_array_equal(batch.predictors, [[0, 0, 1, 2, 3, 5, 5, 6, 7, 8, 7]])


def test_rows_without_a_shared_prompt_are_as_before() -> None:
    samples = group(0, 3, [2, 1])
    batch = pad_rows([Shared([sample]) for sample in samples], 99)
    assert batch.branches is None
    for name, array in vars(collate_padded(samples, 99)).items():
        np.testing.assert_array_equal(array, getattr(batch, name))


@settings(max_examples=150)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=6
    ),
    layout=st.sampled_from(["padded", "packed"]),
    num_ranks=st.integers(1, 4),
    num_mini_batches=st.integers(1, 3),
    pairs_per_token=st.sampled_from([None, 1.0, 50.0, 10.0**6]),
)
def test_every_response_is_trained_on_once_with_its_own_values(
    groups, layout, num_ranks, num_mini_batches, pairs_per_token
) -> None:
    samples = [one for number, (prompt, lengths) in enumerate(groups) for one in group(number, prompt, lengths)]
    ranks = prepare_collated_data_for_workers(
        samples,
        dp_world_size=num_ranks,
        pack_length=80,
        rows=1,
        layout=layout,
        pad_token_id=99,
        num_mini_batches=num_mini_batches,
        pairs_per_token=pairs_per_token,
    )
    assert len({len(mini.micro_batches) for rank in ranks for mini in rank[:1]}) == 1  # ranks wait for each other
    trained = []
    for batch in (micro for rank in ranks for mini in rank for micro in mini.micro_batches):
        mask = batch.response_masks
        columns = batch.query_responses[mask], batch.advantages[mask], batch.vllm_logprobs[mask]
        trained += zip(*(column.tolist() for column in columns), strict=True)
    expected = [
        (token, sample.advantage, logprob)
        for sample in samples
        for token, logprob in zip(sample.response.tolist(), sample.logprobs.tolist(), strict=True)
    ]
    assert sorted(trained) == sorted(expected)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_rank_is_left_without_work_for_the_sake_of_a_prompt(layout: str) -> None:
    ranks = prepare_collated_data_for_workers(
        group(0, 500, [10] * 4),
        dp_world_size=2,
        pack_length=2000,
        rows=1,
        layout=layout,  # type: ignore[arg-type]
        pad_token_id=99,
        pairs_per_token=1e6,
    )
    assert [rank[0].micro_batches[0].num_tokens for rank in ranks] == [20, 20]
