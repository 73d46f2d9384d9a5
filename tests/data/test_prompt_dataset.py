"""Rows in flat arrays come out as they went in."""

import pickle
import sys

import numpy as np
import pytest
from dataset_files import PLACE
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.prompt_dataset import PromptDatasetBuilder, prompt_key

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
        builder.add(token_ids=token_ids, ground_truth=ground_truth, dataset=dataset, raw_query=raw_query, **PLACE)
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
    builder.add(token_ids=[1], ground_truth="4", dataset="gsm8k", raw_query="q", **PLACE)
    data = builder.build()
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            data[row]
    assert len(list(data)) == 1


def test_prompts_cannot_be_written_to() -> None:
    builder = PromptDatasetBuilder()
    builder.add(token_ids=[1], ground_truth="4", dataset="gsm8k", raw_query="q", **PLACE)
    with pytest.raises(ValueError, match="read-only"):
        builder.build()[0].prompt[0] = 2


def test_a_row_costs_little_more_than_its_bytes() -> None:
    builder = PromptDatasetBuilder()
    for i in range(10_000):
        builder.add(token_ids=list(range(100)), ground_truth=str(i), dataset="gsm8k", raw_query="x" * 300, **PLACE)
    assert sys.getsizeof(pickle.dumps(builder.build(), 5)) / 10_000 < 4 * 100 + 300 + 50


# The order
