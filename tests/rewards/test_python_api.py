"""GRPO from Python: the same options and checks; rows and functions reach other processes."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.python_api import GRPO
from open_instruct.rewards.functions import RewardCall
from open_instruct.rewards.pool import RewardFunctions
from open_instruct.rewards.targets import targets_of

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(3)]


def of_a_module(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_functions_of_modules_are_named_and_others_are_pickled(tmp_path: Path) -> None:
    factor = 3.0

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [factor * (text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    named, pickled, text = targets_of([of_a_module, right, "mine.py:f"], tmp_path)
    assert named == f"{Path(__file__).resolve()}:of_a_module"
    assert (pickled, text) == (f"{tmp_path}/right.pkl", "mine.py:f")
    pool = RewardFunctions([RewardFunctionSpec(pickled)], timeout_s=20.0, num_processes=1)
    try:
        (result,) = pool.submit(RewardCall("?", ["2", "3"], [[1], [1]], {"answer": "2"})).result(timeout=60)
    finally:
        pool.close()
    assert result.rewards == [3.0, 0.0]


def test_options_and_rows_are_checked_as_on_the_command_line(tmp_path: Path) -> None:
    run = GRPO(TINY_MODEL, train=ROWS, rewards=of_a_module, output_dir=tmp_path, response_length=32, pack_length=512)
    args, inputs = run._checked()
    assert args.reward_funcs == [f"{Path(__file__).resolve()}:of_a_module"]
    assert args.response_length == 32
    assert [row.columns for row in inputs.train_dataset] == ROWS
    assert inputs.train_dataset[2].place == f"{tmp_path}/data/train.jsonl line 3"


def test_mistakes_are_one_value_error(tmp_path: Path) -> None:
    def needs(completions: list[str], topic: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="learning_rat: no such option"):
        GRPO(TINY_MODEL, train=ROWS, rewards=of_a_module, output_dir=tmp_path, learning_rat=1).train()
    with pytest.raises(ValueError, match="it needs the column 'topic'"):
        GRPO(TINY_MODEL, train=ROWS, rewards=[needs], output_dir=tmp_path, pack_length=512).train()
    with pytest.raises(ValueError, match="train: row 1 is str"):
        GRPO(TINY_MODEL, train=["text"], rewards=of_a_module, output_dir=tmp_path).train()  # type: ignore[list-item]
    with pytest.raises(ValueError, match="are verifiers"):
        GRPO(TINY_MODEL, train=ROWS, rewards=["gsm8k", "math"], output_dir=tmp_path).train()
