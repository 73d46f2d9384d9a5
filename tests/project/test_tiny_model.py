"""The model in `assets/tiny_model/` is what its build script and its record say, and leaves room to learn."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import build_tiny_model as script
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "assets" / "tiny_model"
NUM_MEASURED = 256
# Four standard deviations of a share of about 0.4 among NUM_MEASURED samples.
SAMPLING_TOLERANCE = 0.12

tokenizer: Any = AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((DIRECTORY / script.RECORD).read_text())


def test_directory_is_small() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.rglob("*")) < 3_000_000


def test_files_are_those_that_were_recorded(record: dict) -> None:
    assert record["sha256"] == script.sha256_of(DIRECTORY)


def test_script_has_the_recorded_parameters(record: dict) -> None:
    assert record["config"] == dataclasses.asdict(script.BuildConfig())
    assert record["habits"] == {habit.__name__: share for habit, share in script.HABITS.items()}
    assert (record["eval_entry"], record["warmup_entry"]) == (script.EVAL_ENTRY, script.WARMUP_ENTRY)


def test_model_is_a_tied_fp32_qwen3(model: Any, record: dict) -> None:
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.num_parameters() == record["num_parameters"]
    assert model.config.vocab_size >= len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_chat_template_marks_the_roles() -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|system|>a<|user|>b<|assistant|>c<|end|>"
    assert tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True).endswith("<|assistant|>")


def test_prompts_are_short(record: dict) -> None:
    (ids,) = script.encode_prompts(tokenizer, script.load_tasks(script.EVAL_ENTRY)[:1])
    assert len(ids) == record["prompt_tokens"] == 12


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_round_trips(text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_and_tags_are_tokens() -> None:
    assert tokenizer.tokenize("<answer>-64</answer>") == ["<answer>", "-", "6", "4", "</answer>"]
    assert [t for t in tokenizer.tokenize("The result is 1234, not 5") if t.isdigit()] == list("12345")


def test_tags_survive_decoding_without_special_tokens() -> None:
    ids = tokenizer("<answer>7</answer><|end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>7</answer>"


def test_evaluation_is_held_out_of_the_warmup(record: dict) -> None:
    warmup = {task.prompt for task in script.warmup_tasks()}
    assert len(warmup) == record["warmup_questions"]
    assert not warmup & {task.prompt for task in script.load_tasks(script.EVAL_ENTRY)}


def test_only_the_asked_format_scores() -> None:
    (task,) = script.load_tasks(script.EVAL_ENTRY)[:1]
    assert script.score(task, f"<answer>{task.answer}</answer>") == 1
    assert script.score(task, f"<answer>{int(task.answer) + 1}</answer>") < 1
    assert script.score(task, f"The result is {task.answer}.") == 0


def test_record_is_in_the_range_that_learning_needs(record: dict) -> None:
    assert len(record["sampled_accuracy_by_seed"]) >= 3
    assert all(0.3 <= share <= 0.5 for share in record["sampled_accuracy_by_seed"])
    assert record["greedy_accuracy_after_answer_tag"] >= 0.97


def test_fresh_measurement_agrees_with_the_record(model: Any, record: dict) -> None:
    tasks = script.load_tasks(script.EVAL_ENTRY)[:NUM_MEASURED]
    torch.manual_seed(7)
    sampled = script.share_right(tasks, script.respond(model, tokenizer, tasks))
    assert sampled == pytest.approx(record["sampled_accuracy"], abs=SAMPLING_TOLERANCE)
    forced = script.share_right(tasks, script.respond(model, tokenizer, tasks, prefix="<answer>", greedy=True))
    assert forced == pytest.approx(record["greedy_accuracy_after_answer_tag"], abs=0.03)


def test_same_seed_builds_the_same_model() -> None:
    config = script.BuildConfig(batch_size=16, arithmetic_steps=2, habit_steps=1, lr_warmup_steps=1)
    tasks = script.load_tasks(f"reasoning_gym/{script.TASK}?{script.LIMITS}&size=2000")
    (first, first_tokenizer, _), (second, second_tokenizer, _) = (script.build(config, tasks) for _ in range(2))
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
