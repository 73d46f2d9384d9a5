"""The model in `assets/tiny_judge_model/` grades as its build script and its record say."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import build_tiny_judge_model as script
import pytest
import torch
from build_tiny_model import RECORD, Task, load_tasks, sha256_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.verifiers.judge_prompts import TASKS

ASSETS = Path(__file__).parents[2] / "assets"
DIRECTORY = ASSETS / "tiny_judge_model"
TASK_153 = Task("60 + 93 =", {"answer": "153", "metadata": {"expression": "60 + 93"}})


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((DIRECTORY / RECORD).read_text())


def test_directory_is_small_and_holds_the_recorded_files(record: dict[str, Any]) -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*")) < 5_000_000
    assert record["sha256"] == sha256_of(DIRECTORY)


def test_script_has_the_recorded_parameters(record: dict[str, Any]) -> None:
    assert record["config"] == dataclasses.asdict(script.CONFIG)
    assert record["forms"] == script.FORMS
    assert record["right_share"] == script.RIGHT_SHARE


@pytest.mark.parametrize(
    ("response", "form", "number", "score"),
    [
        ("153", "The number", "153", 1.0),
        (r"\boxed{153}", "A box", "153", 0.6),
        ("The result is 153.", "A sentence", "153", 0.4),
        ("So 60 + 93 = 153. First, 60", "Workings", "153", 0.2),
        ("135", "The number", "135", 0.1),
    ],
)
def test_a_judgement_is_read_by_the_verifier(response: str, form: str, number: str, score: float) -> None:
    said = script.judgement(TASK_153, script.Judged(response, form, number))
    assert f"{number} for 153" in said
    assert TASKS[script.TASK].read(said) == score


def test_demonstrated_responses_hold_the_number_that_is_judged() -> None:
    rng = random.Random(0)
    seen = [script.respond(TASK_153, rng) for _ in range(500)]
    assert all(one.number in one.response for one in seen)
    assert {one.form for one in seen} == set(script.FORMS)
    right = sum(one.number == "153" for one in seen) / len(seen)
    assert right == pytest.approx(script.RIGHT_SHARE, abs=0.1)


def test_the_model_grades_as_it_was_taught(record: dict[str, Any]) -> None:
    assert record["right_judgements"] >= 0.95
    tasks = load_tasks(script.EVAL_ENTRY)[:64]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(DIRECTORY), AutoTokenizer.from_pretrained(DIRECTORY)
    assert script.share_right(model, tokenizer, tasks, random.Random(7)) >= 0.88


def test_rows_of_evaluation_are_none_of_training() -> None:
    prompts = {}
    for name, number in (("train", script.NUM_TRAIN), ("eval", script.NUM_EVAL)):
        rows = [json.loads(line) for line in (ASSETS / f"judged_sums_{name}.jsonl").read_text().splitlines()]
        assert len(rows) == number
        assert {row["dataset"] for row in rows} == {f"general-{script.TASK}"}
        prompts[name] = {row["messages"][0]["content"] for row in rows}
    assert not prompts["train"] & prompts["eval"]


def test_same_seed_builds_the_same_model() -> None:
    config = dataclasses.replace(script.CONFIG, batch_size=8, arithmetic_steps=2, lr_warmup_steps=1)
    tasks = load_tasks(f"{script.EVAL_ENTRY.replace('size=512', 'size=1200')}")
    (first, first_tokenizer, _), (second, second_tokenizer, _) = (script.build(config, tasks) for _ in range(2))
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
