"""The model in `assets/tiny_rc_model/` takes turns as its build script and its record say, and leaves room to learn."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import build_tiny_rc_model as script
import pytest
import torch
from build_tiny_model import RECORD, Task, load_tasks, score, sha256_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.chat_codec import ChatCodec

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "assets" / "tiny_rc_model"
DEMO = ROOT / "scripts" / "train" / "debug" / "cpu_rc.sh"
NUM_MEASURED = 128
# Four standard deviations of a share of about 0.4 among NUM_MEASURED samples.
SAMPLING_TOLERANCE = 0.17

tokenizer: Any = AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((DIRECTORY / RECORD).read_text())


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return load_tasks(script.EVAL_ENTRY)


def task_of(expression: str, answer: int) -> Task:
    return Task(f"What is {expression}?", {"answer": str(answer), "metadata": {"expression": expression}})


# --- the asset --------------------------------------------------------------------------------------------------------


def test_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*")) < 3_000_000


def test_files_are_those_that_were_recorded(record: dict) -> None:
    assert record["sha256"] == sha256_of(DIRECTORY)


def test_script_has_the_recorded_parameters(record: dict) -> None:
    assert record["config"] == dataclasses.asdict(script.CONFIG)
    assert record["upbringing"] == json.loads(json.dumps(script.upbringing()))


def test_model_is_a_tied_fp32_qwen3(model: Any, record: dict) -> None:
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.num_parameters() == record["num_parameters"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_evaluation_is_held_out_of_the_warmup(record: dict, tasks: list[Task]) -> None:
    warmup = {task.prompt for task in script.warmup_tasks()}
    assert len(warmup) == record["warmup_questions"]
    assert not warmup & {task.prompt for task in tasks}


# --- the demonstrations -----------------------------------------------------------------------------------------------


def test_a_sum_is_worked_off_from_the_left_two_terms_a_turn() -> None:
    task = task_of("3 + 4 - 9 + 6 - 8", -4)
    rng = random.Random(0)
    assert script.reason(task, 1, rng) == "3 + 4 - 9 + 6 - 8 = 7 - 9 + 6 - 8 = -2 + 6 - 8"
    assert script.summary_after(task, 1) == "-2 + 6 - 8"
    assert script.reason(task, 2, rng).startswith("-2 + 6 - 8 = 4 - 8 = -4 ")
    assert [script.summary_after(task, turn) for turn in (0, 2, 3)] == ["", "-4", "-4"]


def test_every_problem_is_worked_out_in_three_turns_and_a_quarter_of_them_in_one(tasks: list[Task]) -> None:
    assert all(script.left_over(task, script.NUM_TURNS) == task.answer for task in tasks)
    solved = [sum(script.is_number(script.left_over(task, turn)) for task in tasks) / len(tasks) for turn in (1, 2)]
    assert solved == pytest.approx([0.25, 0.75], abs=0.06)


def test_no_demonstration_answers_before_one_number_is_left(tasks: list[Task]) -> None:
    rng = random.Random(0)
    for task in tasks:
        for turn in range(1, script.NUM_TURNS + 1):
            text = script.reason(task, turn, rng)
            answers = script.is_number(script.left_over(task, turn))
            assert script.works_off(script.summary_after(task, turn - 1) or task.expression, text)
            assert (script.EXPRESSION.sub("", text).strip(" =") != "") == answers


def test_what_a_summary_should_say_is_the_last_expression_of_the_reasoning(tasks: list[Task]) -> None:
    rng = random.Random(0)
    for turn in range(1, script.NUM_TURNS + 1):
        for task in tasks:
            reasoning = script.reason(task, turn, rng)
            assert script.last_expression(reasoning) == script.summary_after(task, turn)


WORKING = "3 + 4 - 9 + 6 = 7 - 9 + 6 = -2 + 6"


@pytest.mark.parametrize("text", [WORKING.replace("-2", "-3"), WORKING + " <answer>4</answer>", WORKING[4:], ""])
def test_a_wrong_working_counts_as_wrong(text: str) -> None:
    assert script.works_off("3 + 4 - 9 + 6", WORKING)
    assert not script.works_off("3 + 4 - 9 + 6", text)


def test_working_and_summaries_keep_to_the_limits(tasks: list[Task]) -> None:
    codec = ChatCodec(tokenizer)
    for task in tasks:
        for turn in range(script.NUM_TURNS):
            before, after = script.left_over(task, turn), script.left_over(task, turn + 1)
            answer = f" <answer>{after}</answer>" if script.is_number(after) else ""
            assert len(codec.encode(f"{script.working(before)}{answer}<|end|>")) <= script.MAX_REASONING_TOKENS
        assert len(codec.encode(script.left_over(task, 1) + "<|end|>")) <= script.MAX_SUMMARY_TOKENS


def test_only_the_asked_format_scores(tasks: list[Task]) -> None:
    rewards = {habit.__name__: score(tasks[0], habit(tasks[0], random.Random(0))) for habit in script.HABITS}
    assert rewards == {"as_asked": 1, "plain_sentence": 0, "boxed": 0, "repeat": 0}


# --- what the model does ----------------------------------------------------------------------------------------------


def test_record_is_in_the_range_that_learning_needs(record: dict) -> None:
    assert len(record["accuracy_by_cycle_and_seed"]) >= 3
    assert all(0.3 <= shares[-1] <= 0.45 for shares in record["accuracy_by_cycle_and_seed"])
    assert record["right_workings"] >= 0.95
    assert record["right_summaries"] >= 0.95
    first, _, last = record["worked_out_by_cycle"]
    assert last >= 0.9 >= 0.3 >= first


def test_fresh_turns_agree_with_the_record(model: Any, record: dict, tasks: list[Task]) -> None:
    shown = tasks[:NUM_MEASURED]
    states = script.run_trajectories(model, tokenizer, shown, seed=7)
    assert script.accuracy_by_cycle(states) == pytest.approx(record["accuracy_by_cycle"], abs=SAMPLING_TOLERANCE)
    assert script.right_summaries(states) == pytest.approx(record["right_summaries"], abs=0.04)
    assert script.right_workings(states, shown) == pytest.approx(record["right_workings"], abs=0.04)


def test_the_demo_gives_the_model_the_prompts_and_limits_it_knows() -> None:
    text = DEMO.read_text()
    known = {
        "rc_reasoning_prompt_template": f"'{script.REASONING_TEMPLATE}'",
        "rc_summarization_prompt_template": f"'{script.SUMMARIZATION_TEMPLATE}'",
        "rc_max_summary_tokens": str(script.MAX_SUMMARY_TOKENS),
        "rc_num_reasoning_steps": str(script.NUM_TURNS),
        "response_length": str(script.MAX_REASONING_TOKENS),
    }
    passed = dict(re.findall(r"^ +--(\w+) (.+?) \\$", text, flags=re.MULTILINE))
    assert {name: passed[name] for name in known} == known
    assert script.LIMITS in text


def test_same_seed_builds_the_same_model() -> None:
    config = dataclasses.replace(script.CONFIG, batch_size=16, arithmetic_steps=2, habit_steps=0, lr_warmup_steps=1)
    tasks = load_tasks(f"reasoning_gym/{script.TASK}?{script.LIMITS}&size=2000")
    (first, first_tokenizer, _), (second, second_tokenizer, _) = (script.build(config, tasks) for _ in range(2))
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
