"""Views of groups and samples say what the record's table holds, token by token."""

import json
import math
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_records import SETS, shared_record, tokenizer

from open_instruct.record.schema import USES
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer
from open_instruct.watch.views_group import parting, turns

Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def raw(name: str) -> list[Row]:
    return pq.read_table(shared_record().directory / "record" / name).to_pylist()


def decode(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


SAME = (
    *("sample", "reward", "score", "advantage", "environment_reward", "verdicts", "finish_reason", "engine", "kind"),
    *("number", "goes_on", "parent", "weight", "kv_age", "issue_version", "began", "generation_s", "tool_s", "score_s"),
    *("arrived", "rank", "mini_batch", "micro_batch", "position"),
)


@pytest.mark.parametrize("step", [1, 3, 4, 7, 12])
def test_group_is_the_rows_of_its_prompt(runs: Runs, step: int) -> None:
    rows = raw(f"steps/{step:06d}.parquet")
    for prompt_id, attempt in {(row["prompt_id"], row["attempt"]) for row in rows}:
        own = [row for row in rows if (row["prompt_id"], row["attempt"]) == (prompt_id, attempt)]
        view = answer(runs, "group", {"step": str(step), "prompt_id": prompt_id, "attempt": str(attempt)})
        for name in ("step", "prompt_id", "attempt", "row", "source", "outcome"):
            assert {row[name] for row in own} == {view[name]}
        assert {json.loads(row["ground_truth"]) for row in own} == {view["ground_truth"]}
        assert view["prompt_text"] == decode(own[0]["prompt_ids"])
        assert [{name: sample[name] for name in SAME} for sample in view["samples"]] == [
            {name: row[name] for name in SAME} for row in own
        ]
        assert [sample["text"] for sample in view["samples"]] == [decode(row["response_ids"]) for row in own]


def test_group_of_two_attempts_is_the_last_unless_another_is_asked_for(runs: Runs) -> None:
    assert answer(runs, "group", {"step": "3", "prompt_id": "train-15"})["outcome"] == "too_old"
    assert answer(runs, "group", {"step": "4", "prompt_id": "train-15"})["attempt"] == 1
    with pytest.raises(Mistake, match=r"step 4 has no prompt train-15 with attempt 0. It has 5: train-15, train-16"):
        answer(runs, "group", {"step": "4", "prompt_id": "train-15", "attempt": "0"})


@pytest.mark.parametrize("step", [1, 5, 8, 12])
def test_tokens_of_a_sample_are_the_columns_of_its_row(runs: Runs, step: int) -> None:
    for row in raw(f"steps/{step:06d}.parquet"):
        view = answer(
            runs,
            "sample",
            {
                "step": str(step),
                "prompt_id": row["prompt_id"],
                "sample": str(row["sample"]),
                "attempt": str(row["attempt"]),
            },
        )
        tokens = view["tokens"]
        assert "".join(token["text"] for token in tokens) == decode(row["response_ids"])
        assert "".join(view["prompt_tokens"]) == decode(row["prompt_ids"])
        assert [token["id"] for token in tokens] == row["response_ids"]
        assert [token["use"] for token in tokens] == row["use"]
        assert [token["use_text"] for token in tokens] == [USES[use] for use in row["use"]]
        sampled = [use != 1 for use in row["use"]]
        for name, column in (("version", "version"), ("engine_logprob", "engine_logprobs")):
            values = [value if own else None for value, own in zip(row[column], sampled, strict=True)]
            assert [token[name] for token in tokens] == values
        for name, column in (("learner_logprob", "learner_logprobs"), ("correction", "correction")):
            values = row[column] or [math.nan] * len(tokens)
            assert [token[name] for token in tokens] == [None if math.isnan(value) else value for value in values]
        for token, own in zip(tokens, sampled, strict=True):
            assert token["age"] == (step - 1 - token["version"] if own else None)
            assert token["advantage"] == (row["advantage"] if token["use"] == 0 else None)
            if token["learner_logprob"] is None:
                assert token["difference"] is token["ratio"] is None
            else:
                assert token["difference"] == pytest.approx(token["learner_logprob"] - token["engine_logprob"])
                assert token["ratio"] == pytest.approx(math.exp(token["difference"]))
        assert sum(view["uses"].values()) == view["num_tokens"] == len(tokens)
        assert view["uses"] == {text: row["use"].count(code) for code, text in USES.items() if code in row["use"]}


def test_every_use_of_a_token_that_a_run_without_inserted_text_has_is_shown(runs: Runs) -> None:
    uses = set()
    for step in (1, 3, 7):
        for row in raw(f"steps/{step:06d}.parquet"):
            values = {"step": str(step), "prompt_id": row["prompt_id"], "sample": str(row["sample"])}
            uses |= {token["use_text"] for token in answer(runs, "sample", values)["tokens"]}
    for row in raw("evaluations/000005_plus.parquet"):
        values = {"version": "5", "set": "plus", "prompt_id": row["prompt_id"], "sample": str(row["sample"])}
        uses |= {token["use_text"] for token in answer(runs, "evaluation_sample", values)["tokens"]}
    opened = answer(runs, "sample", {"step": "13", "prompt_id": "train-60", "sample": "0"})
    uses |= {token["use_text"] for token in opened["tokens"]}
    assert uses == {USES[code] for code in (0, 1, 3, 4, 6, 7, 8)}


def test_turns_tell_apart_what_the_model_thought_said_and_was_given(runs: Runs) -> None:
    view = answer(runs, "sample", {"step": "5", "prompt_id": "train-21", "sample": "3"})
    texts = [
        (turn["role"], "".join(t["text"] for t in view["tokens"][turn["from"] : turn["to"]])) for turn in view["turns"]
    ]
    assert texts == [
        ("model", "<calculator>1 + 4</calculator>"),
        ("given", "<output>5</output>"),
        ("model", "<answer>5</answer><|end|>"),
    ]
    view = answer(runs, "sample", {"step": "5", "prompt_id": "train-20", "sample": "3"})
    texts = [
        (turn["role"], "".join(t["text"] for t in view["tokens"][turn["from"] : turn["to"]])) for turn in view["turns"]
    ]
    assert texts == [("thought", "<think>0 and 4 make 4</think>"), ("model", "<answer>4</answer><|end|>")]


@pytest.mark.parametrize(
    ("pieces", "uses", "opens", "roles"),
    [
        (["a", "b"], [0, 0], False, [("model", 0, 2)]),
        (["a", "</think>", "b"], [0, 0, 0], True, [("thought", 0, 2), ("model", 2, 3)]),
        (["<think>", "a"], [0, 0], False, [("thought", 0, 2)]),
        (["<th", "ink>a</thi", "nk>", "b"], [0, 0, 0, 0], False, [("thought", 0, 3), ("model", 3, 4)]),
        (["a", "<think>", "b"], [0, 1, 1], False, [("model", 0, 1), ("given", 1, 3)]),
        (["", "", "日"], [0, 1, 1], False, [("model", 0, 1), ("given", 1, 3)]),
        ([], [], False, []),
    ],
)
def test_turns_of_a_response(
    pieces: list[str], uses: list[int], opens: bool, roles: list[tuple[str, int, int]]
) -> None:
    stretches = [(turn["role"], turn["from"], turn["to"]) for turn in turns(pieces, uses, opens_thought=opens)]
    assert stretches == roles


def test_answers_part_where_no_other_answer_goes_the_same_way() -> None:
    assert parting(["one two", "one three", "none", "one two x"]) == [7, 5, 0, 7]
    assert parting(["same", "same", "sand"]) == [None, None, 2]
    assert parting(["alone"]) == [0]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("version", [0, 5])
def test_evaluation_has_every_item_with_its_answers(runs: Runs, name: str, version: int) -> None:
    rows = raw(f"evaluations/{version:06d}_{name}.parquet")
    view = answer(runs, "evaluation", {"version": str(version), "set": name})
    assert view["num_items"] == len({row["prompt_id"] for row in rows}) == len(view["items"])
    told = [
        (item["prompt_id"], item["row"], item["ground_truth"], sample["sample"], sample["reward"], sample["text"])
        for item in view["items"]
        for sample in item["samples"]
    ]
    assert told == [
        (
            row["prompt_id"],
            row["row"],
            json.loads(row["ground_truth"]),
            row["sample"],
            row["reward"],
            decode(row["response_ids"]),
        )
        for row in rows
    ]
    assert {item["prompt_text"] for item in view["items"]} == {decode(row["prompt_ids"]) for row in rows}
    part = answer(runs, "evaluation", {"version": str(version), "set": name, "limit": "1", "offset": "2"})
    assert part["items"] == view["items"][2:3]


def test_without_a_tokenizer_texts_are_token_ids_and_the_view_says_so(tmp_path: Any) -> None:
    from made_records import copy_of

    directory = copy_of(shared_record(), tmp_path / "out")
    options = (directory / "options.json").read_text()
    (directory / "options.json").write_text(options.replace("tiny_model", "absent_model"))
    runs = Runs([directory])
    view = answer(runs, "group", {"step": "5", "prompt_id": "train-20"})
    row = next(row for row in raw("steps/000005.parquet") if row["prompt_id"] == "train-20")
    assert view["samples"][0]["text"] == "".join(f"[{number}]" for number in row["response_ids"])
    assert "absent_model is not on this machine, so texts are token ids" in view["tokenizer_problem"]
    sample = answer(runs, "sample", {"step": "5", "prompt_id": "train-20", "sample": "0"})
    assert [token["text"] for token in sample["tokens"]] == [f"[{number}]" for number in row["response_ids"]]


def test_sample_that_is_not_there_is_a_mistake_that_names_those_that_are(runs: Runs) -> None:
    with pytest.raises(Mistake, match="train-20 has no sample 9 in step 5: its samples are 0, 1, 2, 3"):
        answer(runs, "sample", {"step": "5", "prompt_id": "train-20", "sample": "9"})
