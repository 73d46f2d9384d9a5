"""Samples in the document's layout: six int64 arrays that fit together, and JSON lines that come back as they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.data.sample_record import DataProtoItem, ItemShape, non_tensor_fields, to_proto_item

PAD = 9


def test_prompts_stand_right_and_responses_left() -> None:
    item = to_proto_item(np.array([1, 2]), np.array([3, 4]), ItemShape(4, 3, PAD), mask=np.array([True, False]))
    assert {name: values.tolist() for name, values in item.batch.items()} == {
        "prompts": [PAD, PAD, 1, 2],
        "responses": [3, 4, PAD],
        "input_ids": [PAD, PAD, 1, 2, 3, 4, PAD],
        "attention_mask": [0, 0, 1, 1, 1, 1, 0],
        "position_ids": [0, 0, 0, 1, 2, 3, 3],
        "response_mask": [1, 0, 0],
    }


def test_the_documents_sample_has_114688_bytes() -> None:
    item = to_proto_item(np.arange(100), np.arange(900), ItemShape(1024, 2048, PAD))
    assert {name: (len(values), values.dtype) for name, values in item.batch.items()} == {
        "attention_mask": (3072, np.int64),
        "input_ids": (3072, np.int64),
        "position_ids": (3072, np.int64),
        "prompts": (1024, np.int64),
        "response_mask": (2048, np.int64),
        "responses": (2048, np.int64),
    }
    assert sum(values.nbytes for values in item.batch.values()) == 114_688


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


@given(query=tokens, response=tokens, spare=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_tokens_can_be_had_back(query: list[int], response: list[int], spare: tuple[int, int]) -> None:
    shape = ItemShape(len(query) + spare[0], len(response) + spare[1], PAD)
    item = to_proto_item(np.array(query, np.int32), np.array(response, np.int32), shape)
    attended = item.batch["attention_mask"] == 1
    assert item.batch["input_ids"][attended].tolist() == query + response
    assert item.batch["position_ids"][attended].tolist() == list(range(len(query) + len(response)))
    assert item.batch["responses"][item.batch["response_mask"] == 1].tolist() == response


def test_what_does_not_fit_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"a prompt of 3 and a response of 1 tokens do not fit in 2 \+ 4"):
        to_proto_item(np.arange(3), np.arange(1), ItemShape(2, 4, PAD))
    with pytest.raises(ValueError, match="do not fit"):
        to_proto_item(np.arange(1), np.arange(5), ItemShape(2, 4, PAD))


def test_lines_come_back_as_they_were() -> None:
    fields = non_tensor_fields(
        data_source="gsm8k",
        ground_truth=["35", 35.0],
        rendered_prompt="5 · 7?",
        uid="u",
        index=1421,
        row="d.jsonl line 1500",
    )
    item = to_proto_item(
        np.arange(3), np.arange(2), ItemShape(4, 4, PAD), non_tensor_batch=fields, meta_info={"global_token_num": [5]}
    )
    again = DataProtoItem.from_json(item.to_json())
    assert (again.non_tensor_batch, again.meta_info) == (item.non_tensor_batch, item.meta_info)
    assert again.batch.keys() == item.batch.keys()
    for name, values in item.batch.items():
        np.testing.assert_array_equal(again.batch[name], values)
        assert again.batch[name].dtype == np.int64
