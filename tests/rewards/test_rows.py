"""Rows and options of a run with reward functions, checked before anything starts."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import make_args

from open_instruct.config.checks import collect_mistakes
from open_instruct.data.reward_columns import reward_columns
from open_instruct.data.run_identity import differences, run_identity
from open_instruct.data.run_inputs import RunInputs, load_inputs

FUNCTIONS = """
def right(completions, answer, **kwargs):
    return [float(text[0]["content"] == wanted) for text, wanted in zip(completions, answer)]

def needs(completions, answer, topic, level=0):
    return [0.0] * len(completions)

def breaks(completions, **kwargs):
    return [completions[5]]

def of_progress(completions, trainer_state, topic):
    return [trainer_state.global_step / trainer_state.max_steps + (topic[0] is not None)] * len(completions)
"""
ROWS = [
    {"prompt": [{"role": "user", "content": f"{number} + 1 ="}], "answer": str(number + 1), "level": number}
    for number in range(3)
]


def run_with(tmp_path: Path, *functions: str, rows: Any = ROWS, **options: Any) -> tuple[RunInputs | None, list[str]]:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    targets = [f"{tmp_path}/mine.py:{name}" for name in functions]
    args = make_args(
        dataset_mixer_list=[f"{tmp_path}/train.jsonl", "1.0"],
        reward_funcs=targets,
        dataset_local_cache_dir=str(tmp_path),
        **options,
    )
    return load_inputs(args)


def test_rows_of_trl_need_no_verifier_and_keep_their_columns(tmp_path: Path) -> None:
    inputs, mistakes = run_with(tmp_path, "right")
    assert not mistakes
    assert inputs is not None
    row = inputs.train_dataset[1]
    assert (row.dataset, row.ground_truth) == ("passthrough", "")
    assert row.columns == ROWS[1]
    assert inputs.train_dataset.column_names == ("prompt", "answer", "level")


def test_without_reward_functions_rows_keep_no_columns(tmp_path: Path) -> None:
    rows = [row | {"dataset": "gsm8k", "ground_truth": "1"} for row in ROWS]
    inputs, mistakes = run_with(tmp_path, rows=rows)
    assert not mistakes
    assert inputs is not None
    assert inputs.train_dataset[0].columns is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "needs",
            "mine.py:needs: it needs the column 'topic', and the rows of --dataset_mixer_list have no such column. ",
        ),
        (
            "breaks",
            "train.jsonl line 1 and the response 'An invented answer, to try the reward function.': IndexError: list",
        ),
        ("gone", "mine.py:gone: "),
    ],
)
def test_a_function_that_does_not_fit_the_rows_is_a_mistake(function: str, words: str, tmp_path: Path) -> None:
    inputs, [mistake] = run_with(tmp_path, function)
    assert inputs is None
    assert mistake.startswith("--reward_funcs ")
    assert words in mistake
    if function == "needs":
        assert mistake.endswith("They have: answer, level.")


def test_the_trial_gives_what_the_run_gives(tmp_path: Path) -> None:
    _, mistakes = run_with(tmp_path, "of_progress", rows=[ROWS[0], ROWS[1] | {"topic": "sums"}, ROWS[2]])
    assert not mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward_funcs": ["a.py:f"], "reward_weights": [1.0, 2.0]}, "2 weights for 1 functions"),
        ({"reward_funcs": ["a.py:f", "b.py:f"]}, "two functions are called f"),
        ({"reward_funcs": ["a.py:f"], "reward_weights": [float("inf")]}, "a weight is not finite"),
        (
            {"reward_funcs": ["a.py:f"], "rollout_workflow": "rc"},
            "this workflow makes its rewards from verifiers' scores",
        ),
        ({"reward_jail": True}, "there are no --reward_funcs"),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict[str, Any], words: str) -> None:
    assert any(words in mistake for mistake in collect_mistakes(make_args(**options)))


def test_reward_functions_are_enough_of_a_reward() -> None:
    mistakes = collect_mistakes(make_args(reward_funcs=["a.py:f"], apply_verifiable_reward=False))
    assert not [mistake for mistake in mistakes if "apply_verifiable_reward" in mistake]


def test_a_resumed_run_may_have_another_function_but_no_other_columns(tmp_path: Path) -> None:
    def identity(**options: Any) -> dict[str, Any]:
        inputs, _ = run_with(tmp_path, "right", **options)
        return json.loads(json.dumps(run_identity(make_args(reward_funcs=["x.py:right"]), inputs)))

    before = identity()
    assert not differences(before, identity())
    mistakes = differences(before, identity(rows=[row | {"level": 9} for row in ROWS]))
    assert mistakes == ["the training data: 3 rows as then, but with other columns or in another order"]


def test_columns_are_values_of_json() -> None:
    row = {"price": Decimal("1.50"), "image": b"\x89", "prompt": "raw", "level": float("nan"), "most": float("inf")}
    row |= {"levels": [1.5, float("nan")]}
    assert reward_columns(row, "What?") == {"price": 1.5, "prompt": "What?", "level": None, "levels": [1.5, None]}
