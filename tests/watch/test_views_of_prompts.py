"""What became of a prompt, and of a row over time: sentences word for word, numbers from the record's table."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from made_records import NUM_ROWS, TRAIN, copy_of, shared_record, tokenizer

from open_instruct.record.reader import RunRecord
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer
from open_instruct.watch.views_prompt import _find, verdict


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs([shared_record().directory])


def sentences(runs: Runs, prompt_id: str) -> list[str]:
    return answer(runs, "why", {"prompt_id": prompt_id})["sentences"]


def raw() -> list[dict[str, Any]]:
    files = sorted((shared_record().directory / "record" / "steps").iterdir())
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_prompt_that_is_trained_on_has_its_life_told(runs: Runs) -> None:
    assert sentences(runs, "train-21") == [
        f"train-21 is line 2 of {TRAIN}.",
        "It was issued at version 4 to engine 1, which began at 2026-05-28 20:29:00 UTC and needed 2.00 s, "
        "0.50 s of them waiting for tools.",
        "5 responses: 12 to 46 tokens; sampled by version 4; 4 ended by themselves, 1 were cut off.",
        "math gave 2 of 5 responses the score 1, 2 the score 0, 1 no score in 0.25 s.",
        "Step 5 trained on it. Rewards: 0 to 10, 2 of 4 right.",
        "52 of 101 tokens are trained on; 18 are written by a tool, an environment or the chat template; "
        "16 are of a response that was cut off (--mask_truncated_completions); "
        "15 are of a group or response that no step trains on; `outcome` says why.",
        "1 response of it could not be used for lack of a score: math: not scored: timeout.",
    ]


def test_prompt_whose_responses_were_not_scored_is_told_with_the_reason(runs: Runs) -> None:
    view = answer(runs, "why", {"prompt_id": "train-45"})
    assert [(a["attempt"], a["step"], a["outcome"], a["rewards"]) for a in view["attempts"]][:1] == [
        (0, 9, "not_scored", [None, 10.0])
    ]
    assert view["attempts"][1]["attempt"] == 1
    assert view["sentences"][4:6] == [
        "Step 9 could not use it, because too few of its responses were scored.",
        "2 responses of it could not be used for lack of a score: math: not scored: timeout.",
    ]
    assert any("gave it up" in text and "It is tried again." in text for text in view["sentences"])


@pytest.mark.parametrize(
    ("prompt_id", "reason"),
    [
        (
            "train-14",
            "Step 3 left it out, because all its responses have the same reward, so that their advantages are 0. "
            "Rewards: all 10, all right.",
        ),
        (
            "train-4",
            "Step 1 left it out, because all its responses have the same reward, so that their advantages are 0. "
            "Rewards: all 0, all wrong.",
        ),
        (
            "train-9",
            "Step 2 left it out, because all its responses were cut off (--mask_truncated_completions). "
            "Rewards: all 0, all wrong.",
        ),
        ("train-60", "Step 13 has taken it and is not trained yet."),
    ],
)
def test_reason_for_which_a_prompt_is_not_trained_on_is_told(runs: Runs, prompt_id: str, reason: str) -> None:
    assert reason in sentences(runs, prompt_id)


def test_prompt_that_was_too_old_has_both_attempts(runs: Runs) -> None:
    view = answer(runs, "why", {"prompt_id": "train-15"})
    assert [(a["attempt"], a["step"], a["outcome"]) for a in view["attempts"]] == [
        (0, 3, "too_old"),
        (1, 4, "consumed"),
    ]
    assert view["row"] == f"{TRAIN} line 6"
    assert (
        "Step 3 discarded it, because its tokens were older than the bound of staleness; the prompt was issued again. "
        in (view["sentences"][4] + " ")
    )
    assert view["sentences"][5].startswith("It was issued again (attempt 1) at version 2 to engine 1")


def test_failures_of_a_prompt_are_told_in_their_time(runs: Runs) -> None:
    assert sentences(runs, "train-8")[1:3] == [
        "Engine 1 gave it up at 2026-05-28 20:28:31 UTC: it took longer than 600 s. It is tried again.",
        "It was lost with its engine at 2026-05-28 20:28:31 UTC, and issued again.",
    ]


def test_prompt_that_is_under_way_is_told(runs: Runs) -> None:
    assert sentences(runs, "train-64") == [
        "train-64 is of a row that is not known.",
        "It was issued at version 12, at 2026-05-28 20:30:29 UTC, and no step has it yet: it is with the engines, being scored, "
        "or waits for a step.",
    ]


def test_attempts_of_every_prompt_are_those_of_the_table(runs: Runs) -> None:
    expected: dict[str, dict[tuple[int, int, str], list[Any]]] = {}
    for row in raw():
        outcome = "consumed" if row["outcome"] == "not_scored" and row["step"] == 5 else row["outcome"]
        group = row["attempt"], row["step"], outcome
        expected.setdefault(row["prompt_id"], {}).setdefault(group, []).append((row["sample"], row["reward"]))
    assert len(expected) == 60
    for prompt_id, groups in expected.items():
        attempts = answer(runs, "why", {"prompt_id": prompt_id})["attempts"]
        assert {(a["attempt"], a["step"], a["outcome"]): a["rewards"] for a in attempts} == {
            group: [reward for _, reward in sorted(rewards)] for group, rewards in groups.items()
        }


def test_reader_has_the_samples_of_all_attempts_of_a_prompt() -> None:
    table = RunRecord(shared_record().directory).of_prompt("train-15")
    places = list(zip(table["step"].to_pylist(), table["attempt"].to_pylist(), strict=True))
    assert places == [(3, 0)] * 4 + [(4, 1)] * 4
    assert RunRecord(shared_record().directory).of_prompt("train-60").num_rows == 4, "of an open step"
    assert RunRecord(shared_record().directory).of_prompt("train-999").num_rows == 0


def test_prompt_that_the_record_has_no_samples_of_is_told_from_the_account(tmp_path: Path) -> None:
    directory = copy_of(shared_record(), tmp_path / "out")
    with open(directory / "prompts.jsonl", "a") as file:
        prompt = {"prompt_id": "train-70", "row": f"{TRAIN} line 1", "index": 0, "fate": "failed"}
        file.write(json.dumps({"training_step": 12, "prompts": [prompt]}) + "\n")
    view = answer(Runs([directory]), "why", {"prompt_id": "train-70"})
    assert view["sentences"] == [
        f"train-70 is line 1 of {TRAIN}.",
        "Step 12 dropped it, because the engines gave it up too often.",
        "The record has no samples of it.",
    ]


def test_unknown_prompt_is_a_mistake_that_names_those_there_are(runs: Runs) -> None:
    with pytest.raises(
        Mistake, match=r"nothing of the prompt train-999: .* Prompts of finished steps are train-0 to train-59"
    ):
        answer(runs, "why", {"prompt_id": "train-999"})


@pytest.mark.parametrize(
    ("prompt_id", "hint"),
    [
        ("3", "Did you mean train-3?"),
        ("Train-3", "Did you mean train-3?"),
        (
            "eval-5-1",
            "eval-5-1 is a prompt of the evaluation of plus at version 5, .* Its answers: evaluation_sample 5 plus eval-5-1 0; "
            "over time: row 'data/test.jsonl line 2'",
        ),
    ],
)
def test_prompt_of_another_name_is_a_mistake_with_a_hint(runs: Runs, prompt_id: str, hint: str) -> None:
    with pytest.raises(Mistake, match=hint):
        answer(runs, "why", {"prompt_id": prompt_id})


@pytest.mark.parametrize("line", range(1, NUM_ROWS + 1))
def test_row_over_time_is_every_group_of_the_row(runs: Runs, line: int) -> None:
    place = f"{TRAIN} line {line}"
    view = answer(runs, "row", {"row": place})
    expected: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in raw():
        if row["row"] == place and not row["goes_on"] and not (row["step"] == 5 and row["outcome"] == "not_scored"):
            expected.setdefault((row["step"], row["prompt_id"]), []).append(row)
    trained = [group for group in view["groups"] if group["step"] <= 12]
    assert [(group["step"], group["prompt_id"]) for group in trained] == sorted(expected)
    for group in trained:
        rows = expected[group["step"], group["prompt_id"]]
        assert group["rewards"] == [row["reward"] for row in rows]
        right = sum(row["score"] == 1 for row in rows)
        assert group["share"] == (None if group["outcome"] == "not_scored" else pytest.approx(right / len(rows)))
        assert group["texts"] == [tokenizer().decode(row["response_ids"], skip_special_tokens=False) for row in rows]
        assert {json.loads(row["ground_truth"]) for row in rows} == {view["ground_truth"]}
    scored = [group for group in view["groups"] if group["outcome"] != "not_scored"]
    assert view["verdict"] == verdict([group["share"] for group in scored])


def test_row_of_an_evaluation_shows_its_answers_by_version(runs: Runs) -> None:
    view = answer(runs, "row", {"row": "data/test.jsonl line 2"})
    assert view["groups"] == []
    assert [(entry["set"], entry["version"], entry["share"]) for entry in view["evaluations"]] == [
        ("plus", 0, 0.0),
        ("plus", 5, 0.5),
    ]
    assert view["verdict"] == "mostly right"


@pytest.mark.parametrize("text", ["data/train.jsonl line 7", "train.jsonl line 7", "7", "line 7", "ain.jsonl line 7"])
def test_row_is_found_by_the_end_of_its_place(runs: Runs, text: str) -> None:
    assert answer(runs, "row", {"row": text})["row"] == "data/train.jsonl line 7"


def test_row_that_is_several_rows_or_none_is_a_mistake(runs: Runs) -> None:
    with pytest.raises(Mistake, match=r"'line 1' fits 2 rows. Give .*: 'a.jsonl line 1', 'b.jsonl line 1'\."):
        _find("line 1", ["a.jsonl line 1", "b.jsonl line 1"], [])
    with pytest.raises(Mistake, match="'77' is no row that this run has used so far"):
        answer(runs, "row", {"row": "77"})


def test_row_of_training_is_meant_where_one_of_an_evaluation_fits_too(runs: Runs) -> None:
    view = answer(runs, "row", {"row": "line 1"})
    assert (view["row"], view["others"]) == ("data/train.jsonl line 1", ["data/test.jsonl line 1"])
    assert answer(runs, "row", {"row": "data/test.jsonl line 1"})["others"] == []


def test_row_that_is_not_there_is_refused_with_those_like_it(runs: Runs) -> None:
    with pytest.raises(Mistake) as refusal:
        answer(runs, "row", {"row": "trein.jsonl line 7"})
    rows = re.findall(r"'(data/[^']*)'", str(refusal.value))
    assert rows[0] == "data/train.jsonl line 7"
    assert any(row.startswith("data/test.jsonl") for row in rows), "also of evaluations"
    assert len(rows) == 8


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([0.5], "once"),
        ([0.0, 0.0], "never right"),
        ([0.0, 0.5], "mostly right"),
        ([1.0, 0.0], "forgotten"),
        ([0.25, 0.0], "mixed"),
        ([0.0, None], "not known"),
    ],
)
def test_verdict_of_a_row(shares: list[float | None], words: str) -> None:
    assert verdict(shares) == words
