"""GRPO from Python: the same options and checks; rows and functions reach other processes."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from datasets import Dataset, DatasetDict

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
        return [factor * (text == target) for text, target in zip(completions, answer, strict=True)]

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
        GRPO(TINY_MODEL, train=["text"], rewards=of_a_module, output_dir=tmp_path).train()
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)})
    with pytest.raises(ValueError, match=r"a DatasetDict has no rows\. Give one of its values: 'train', 'test'"):
        GRPO(TINY_MODEL, train=splits, rewards=of_a_module, output_dir=tmp_path).train()
    with pytest.raises(ValueError, match="are verifiers"):
        GRPO(TINY_MODEL, train=ROWS, rewards=["gsm8k", "math"], output_dir=tmp_path).train()


def test_what_is_given_twice_is_a_mistake(tmp_path: Path) -> None:
    twice: dict[str, Any] = {"reward_funcs": ["a.py:f"], "dataset_mixer_list": ["x.jsonl", "1.0"]}
    with pytest.raises(ValueError, match="it is given as train too") as raised:
        GRPO(TINY_MODEL, train=ROWS, rewards=of_a_module, output_dir=tmp_path, pack_length=512, **twice).train()
    assert "reward_funcs: it is given as rewards too. Leave one of them out." in str(raised.value)


def test_rows_that_can_be_read_once_are_there_when_the_run_goes_on(tmp_path: Path) -> None:
    run = GRPO(TINY_MODEL, train=iter(ROWS), rewards=of_a_module, output_dir=tmp_path)
    assert run._written([])["dataset_mixer_list"] == run._written([])["dataset_mixer_list"]
    assert len((tmp_path / "data/train.jsonl").read_text().splitlines()) == len(ROWS)


def test_a_dataset_is_rows(tmp_path: Path) -> None:
    rows = Dataset.from_list([{**row, "day": date(2024, 1, 2), "parts": {"a": [1]}} for row in ROWS])
    args, inputs = GRPO(
        TINY_MODEL,
        train=rows.select([0, 2]),
        eval=rows.select([1]),
        rewards=of_a_module,
        output_dir=tmp_path,
        pack_length=512,
    )._checked()
    assert args.dataset_mixer_eval_list == [f"{tmp_path}/data/eval.jsonl", "1.0"]
    assert inputs.train_dataset[1].columns == {**ROWS[2], "day": "2024-01-02", "parts": {"a": [1]}}
    assert inputs.eval_dataset is not None
    assert inputs.eval_dataset[0].columns == {**ROWS[1], "day": "2024-01-02", "parts": {"a": [1]}}


def test_a_pickled_function_may_import_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_a_notebook.py").write_text("value = 4.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as a notebook has it

    def helped(completions: list[str]) -> list[float]:
        import helper_of_a_notebook  # type: ignore[import-not-found]

        return [helper_of_a_notebook.value] * len(completions)

    pool = RewardFunctions([RewardFunctionSpec(targets_of([helped], tmp_path)[0])], timeout_s=20.0, num_processes=1)
    try:
        (result,) = pool.submit(RewardCall("?", ["2"], [[1]])).result(timeout=60)
    finally:
        pool.close()
    assert result.rewards == [4.0]
