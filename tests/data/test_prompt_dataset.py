"""Rows in flat arrays come out as they went in; the order of prompts depends on the seed alone."""

import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.prompt_dataset import PromptDatasetBuilder, PromptOrder, prompt_index, prompt_key

json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
row_values = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=5),
    json_values,
    st.sampled_from(["gsm8k", "reasoning_gym/chain_sum"]),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
)


@given(st.lists(row_values, max_size=6))
def test_rows_come_out_as_they_went_in(rows: list[tuple]) -> None:
    builder = PromptDatasetBuilder()
    for token_ids, ground_truth, dataset, raw_query in rows:
        builder.add(token_ids=token_ids, ground_truth=ground_truth, dataset=dataset, raw_query=raw_query)
    built = builder.build()
    for data in (built, pickle.loads(pickle.dumps(built))):
        assert len(data) == len(rows)
        assert data.longest_prompt == max((len(row[0]) for row in rows), default=0)
        assert set(data.dataset_names) == {row[2] for row in rows}
        assert list(data.prompt_keys()) == [prompt_key(row[0]) for row in rows]
        for i, (token_ids, ground_truth, dataset, raw_query) in enumerate(rows):
            row = data[i]
            assert row.prompt.dtype == np.int32
            assert row.prompt.tolist() == token_ids
            assert (row.ground_truth, row.dataset, row.raw_query) == (ground_truth, dataset, raw_query)


def test_rows_outside_are_an_index_error_and_iteration_ends() -> None:
    builder = PromptDatasetBuilder()
    builder.add(token_ids=[1], ground_truth="4", dataset="gsm8k", raw_query="q")
    data = builder.build()
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            data[row]
    assert len(list(data)) == 1


def test_prompts_cannot_be_written_to() -> None:
    builder = PromptDatasetBuilder()
    builder.add(token_ids=[1], ground_truth="4", dataset="gsm8k", raw_query="q")
    with pytest.raises(ValueError, match="read-only"):
        builder.build()[0].prompt[0] = 2


def test_a_row_costs_little_more_than_its_bytes() -> None:
    builder = PromptDatasetBuilder()
    for i in range(10_000):
        builder.add(token_ids=list(range(100)), ground_truth=str(i), dataset="gsm8k", raw_query="x" * 300)
    assert sys.getsizeof(pickle.dumps(builder.build(), 5)) / 10_000 < 4 * 100 + 300 + 50


# The order


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_each_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = PromptOrder(num_rows, seed)
    issued = [order[epoch * num_rows + position] for position in range(num_rows)]
    assert {issue_epoch for issue_epoch, _ in issued} == {epoch}
    assert sorted(row for _, row in issued) == list(range(num_rows))


@given(num_rows=st.integers(1, 20), seed=st.integers(0, 2**32), asked=st.lists(st.integers(0, 100), max_size=20))
def test_the_order_does_not_depend_on_what_was_asked_before(num_rows: int, seed: int, asked: list[int]) -> None:
    order = PromptOrder(num_rows, seed)
    for issue_number in asked:
        assert order[issue_number] == PromptOrder(num_rows, seed)[issue_number]
        assert order[issue_number][1] == prompt_index(issue_number, num_rows, seed)
        assert len(order._permutations) <= 2


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(PromptOrder(50, seed)[epoch * 50 + i][1] for i in range(50)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_written_down() -> None:
    """A checkpoint holds the number of prompts issued and no order: if this fails, old runs resume wrong."""
    assert [PromptOrder(10, 42)[i][1] for i in range(20)] == [
        5,
        6,
        0,
        7,
        3,
        2,
        4,
        9,
        1,
        8,
        0,
        8,
        7,
        4,
        3,
        1,
        2,
        9,
        6,
        5,
    ]


def test_turning_back_to_the_last_epoch_shuffles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order = PromptOrder(10, 1)
    before = [order[i] for i in range(25)]
    monkeypatch.setattr(np.random, "default_rng", None)
    assert [order[i] for i in range(10, 25)] == before[10:]


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="no order of 0 rows"):
        PromptOrder(0, 1)
    with pytest.raises(IndexError, match="numbered from 0"):
        PromptOrder(3, 1)[-1]
