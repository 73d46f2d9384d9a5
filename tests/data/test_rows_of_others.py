"""Rows as the source documents, verl and TRL write them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_files import Row, chat, load, make_row, mistakes_of, questions, write_json, write_lines, write_parquet

from open_instruct.data.sample_record import ItemShape, append_record, non_tensor_fields, to_proto_item


def make_proto_row(**changes: Any) -> Row:
    row = {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": "35", "style": "rule"},
        "extra_info": {"answer": "… #### 35", "index": 1421, "question": "5 * 7?", "split": "train"},
        "uid": "fab3e910",
        "index": 1421,
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("file", "write"), [("d.jsonl", write_lines), ("d.json", write_json), ("d.parquet", write_parquet)]
)
def test_rows_in_the_documents_format(tmp_path: Path, file: str, write: Any) -> None:
    rows = [
        make_proto_row(prompt=chat(("user", "as a chat"))),
        make_proto_row(prompt=chat(("user", "b")), data_source="string_matcher"),
    ]
    data = load(write(tmp_path / file, rows), "1.0")
    assert questions(data) == ["as a chat", "b"]
    assert [(row.dataset, row.ground_truth) for row in data] == [("gsm8k", "35"), ("string_matcher", "35")]
    (row,) = load(write(tmp_path / file, [make_proto_row()]), "1.0", system_prompt_override="be brief")
    assert row.raw_query == "system:be brief\nuser:5 * 7?\nassistant:"


@pytest.mark.parametrize("style", ["rule", "rule-lighteval/MATH_v2", None])
def test_the_style_of_a_rule_may_name_it(tmp_path: Path, style: str | None) -> None:
    row = make_proto_row(data_source="math_dapo", reward_model={"ground_truth": "35", "style": style})
    (read,) = load(write_lines(tmp_path / "d.jsonl", [row]), "1.0", remap={"math_dapo": "math"})
    assert (read.dataset, read.ground_truth) == ("math", "35")


@pytest.mark.parametrize(
    ("remap", "verifier"),
    [
        ({"openai/gsm8k": "math"}, "math"),
        ({"gsm8k": "math"}, "math"),
        ({"openai/gsm8k": "string_matcher", "gsm8k": "math"}, "string_matcher"),
        ({"openai/math": "math"}, "gsm8k"),
    ],
)
def test_a_publisher_may_be_named_in_a_remapping(tmp_path: Path, remap: dict[str, str], verifier: str) -> None:
    (read,) = load(write_lines(tmp_path / "d.jsonl", [make_proto_row(data_source="OpenAI/gsm8k")]), "1.0", remap=remap)
    assert read.dataset == verifier


def test_whole_samples_are_read_by_what_is_not_a_tensor(tmp_path: Path) -> None:
    for write, file in ((write_lines, "d.jsonl"), (write_parquet, "d.parquet")):
        row = {"batch": {"prompts": [1, 2]}, "non_tensor_batch": make_proto_row(), "meta_info": {"n": [3]}}
        assert questions(load(write(tmp_path / file, [row]), "1.0")) == ["5 * 7?"]


def test_the_record_of_a_run_gives_the_same_prompts_again(tmp_path: Path) -> None:
    (row,) = load("reasoning_gym/chain_sum?size=1&seed=7", "1.0")
    fields = non_tensor_fields(
        data_source=row.dataset,
        ground_truth=row.ground_truth,
        rendered_prompt=row.raw_query,
        uid="u",
        index=0,
        row=row.place,
    )
    shape = ItemShape(prompt_length=256, response_length=8, pad_token_id=0)
    item = to_proto_item(row.prompt, np.arange(3, dtype=np.int32), shape, non_tensor_batch=fields)
    append_record(tmp_path / "record.jsonl", [item])
    append_record(tmp_path / "record.jsonl", [item])
    for again in load(str(tmp_path / "record.jsonl"), "1.0"):
        assert again.prompt.tolist() == row.prompt.tolist()
        assert (again.dataset, again.ground_truth, again.raw_query) == (row.dataset, row.ground_truth, row.raw_query)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data_source": None}, "no 'data_source'; it has: data_source, ability"),
        ({"data_source": "nobody/knows"}, "unknown verifier 'nobody/knows' in 'data_source'"),
        ({"data_source": 3}, "'data_source' must be the name of a verifier, or a list of names, got 3"),
        ({"reward_model": "35"}, "'reward_model' must be {ground_truth, style}, got '35'"),
        ({"reward_model": {"style": "rule"}}, "no 'reward_model.ground_truth'"),
        ({"reward_model": {"ground_truth": "35", "style": "model"}}, "'reward_model.style' 'model': only 'rule'"),
        ({"reward_model": {"ground_truth": "many"}}, "a gsm8k ground truth must hold one number, got 'many'"),
        (
            {"extra_info": {}},
            "no prompt: it has none of 'prompt', 'raw_prompt', 'extra_info.question' and 'full_prompts'",
        ),
        ({"extra_info": {"question": 5}}, "a message's content must be text, got int"),
        ({"prompt": "5 * 7?"}, "messages must be a list of {role, content}, got str"),
        ({"extra_info": ..., "full_prompts": "\ud800"}, "'full_prompts' is not valid text"),
    ],
)
def test_bad_rows_in_the_documents_format(tmp_path: Path, changes: Row, problem: str) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_proto_row(), make_proto_row(**changes)])
    (mistake,) = mistakes_of(name, "1.0")
    assert mistake.startswith(f"{name} line 2: {problem}")
    name = write_lines(tmp_path / "d.jsonl", [{"non_tensor_batch": make_proto_row(**changes)}])
    assert mistakes_of(name, "1.0")[0].startswith(f"{name} line 1: {problem}")


def test_no_system_prompt_gets_into_finished_text(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "d.jsonl", [make_proto_row(extra_info=..., full_prompts="done")])
    assert load(name, "1.0")[0].raw_query == "done"
    assert "a system prompt cannot be put" in mistakes_of(name, "1.0", system_prompt_override="s")[0]


# Rows of TRL

TRL: dict[str, Any] = {"ground_truths_key": "solution", "default_verifier": "math"}


@pytest.mark.parametrize(("write", "file"), [(write_lines, "d.jsonl"), (write_parquet, "d.parquet")])
def test_rows_of_trl(tmp_path: Path, write: Any, file: str) -> None:
    conversation = {"prompt": chat(("user", "1 + 1?")), "solution": "2", "level": 3}
    name = write(tmp_path / file, [conversation])
    (row,) = load(name, "1.0", **TRL)
    assert (row.raw_query, row.dataset, row.ground_truth) == ("user:1 + 1?\nassistant:", "math", "2")
    (row,) = load(name, "1.0", **TRL, system_prompt_override="s")
    assert row.raw_query == "system:s\nuser:1 + 1?\nassistant:"


@pytest.mark.parametrize(("write", "file"), [(write_lines, "d.jsonl"), (write_parquet, "d.parquet")])
def test_a_prompt_that_is_a_text_has_no_chat_template(tmp_path: Path, write: Any, file: str) -> None:
    (row,) = load(write(tmp_path / file, [{"prompt": "1 + 1 =", "solution": "2"}]), "1.0", **TRL)
    assert row.raw_query == "1 + 1 ="
    assert row.prompt.tolist() == list(b"1 + 1 =")


def test_a_row_that_names_its_verifier_keeps_it(tmp_path: Path) -> None:
    rows = [make_row(), make_row(dataset=...)]
    found = load(write_lines(tmp_path / "d.jsonl", rows), "1.0", default_verifier="math")
    assert [row.dataset for row in found] == ["gsm8k", "math"]


@pytest.mark.parametrize(
    ("row", "options", "problem"),
    [
        (
            {"prompt": "x", "solution": "2"},
            {"default_verifier": None},
            "(--default_verifier names the verifier of such rows)",
        ),
        (
            {"prompt": "x", "answer": "2"},
            {},
            "no 'solution' (--ground_truths_key names the column); it has: prompt, answer",
        ),
        ({"prompt": "", "solution": "2"}, {}, "'prompt' is empty"),
        ({"prompt": 3, "solution": "2"}, {}, "messages must be a list of {role, content}, got int"),
        ({"prompt": "\ud800", "solution": "2"}, {}, "'prompt' is not valid text"),
        ({"prompt": "x", "solution": "2"}, {"system_prompt_override": "s"}, "a system prompt cannot be put"),
        (
            {"prompt": "x", "solution": "2"},
            {"default_verifier": "mth"},
            "unknown verifier 'mth' in 'dataset'; nearest: math",
        ),
    ],
)
def test_rows_of_trl_that_lack_something(tmp_path: Path, row: Row, options: dict[str, Any], problem: str) -> None:
    (mistake,) = mistakes_of(write_lines(tmp_path / "d.jsonl", [row]), "1.0", **TRL | options)
    assert problem in mistake


def test_a_parquet_file_without_a_verifier_says_how_to_name_one(tmp_path: Path) -> None:
    name = write_parquet(tmp_path / "d.parquet", [{"prompt": "x", "solution": "2"}])
    (mistake,) = mistakes_of(name, "1.0", ground_truths_key="solution")
    assert "has no column dataset; it has: prompt, solution" in mistake
    assert "--default_verifier" in mistake
