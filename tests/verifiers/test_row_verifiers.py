"""Rows that several verifiers score."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_args

from open_instruct.data.run_inputs import load_inputs
from open_instruct.scored_groups import ScoredGroup, ScorePart
from open_instruct.verifiers.row_verifiers import checks_of_row, combined, names_of_verifiers
from open_instruct.verifiers.scoring_processes import Scored

GONE = Scored(None, "timeout")


def test_a_row_of_one_verifier_is_what_it_was() -> None:
    assert checks_of_row("reasoning_gym/chain_sum", {"a": [1]}) == [("reasoning_gym/chain_sum", {"a": [1]})]
    assert checks_of_row("gsm8k", ["4"]) == [("gsm8k", ["4"])]


def test_each_verifier_has_its_ground_truth() -> None:
    assert checks_of_row("math + max_length", ["42", "500"]) == [("math", "42"), ("max_length", "500")]
    assert names_of_verifiers("math + max_length") == ["math", "max_length"]


def test_scores_are_weighed_and_one_that_is_missing_makes_all_unknown() -> None:
    first = [Scored(1.0, cost=0.1), Scored(1.0), Scored(0.0), GONE]
    second = [Scored(1.0, cost=0.2), Scored(0.0), Scored(1.0), Scored(1.0)]
    results = combined([first, second], [3.0, 1.0])
    assert [result.score for result in results] == [1.0, 0.75, 0.25, None]
    assert results[0].cost == pytest.approx(0.3)
    assert results[3].failure == "timeout"


def loaded(tmp_path: Path, **options: Any) -> tuple[Any, list[str]]:
    settings: dict[str, Any] = {
        "dataset_mixer_list": [str(tmp_path / "rows.jsonl"), "1.0"],
        "dataset_mixer_eval_list": [],
    }
    return load_inputs(make_args(**settings | options))


def write_row(tmp_path: Path, **columns: Any) -> None:
    row = {"messages": [{"role": "user", "content": "6 * 7 ="}], "ground_truth": "42", "dataset": "math"} | columns
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))


def test_rows_with_lists_are_read(tmp_path: Path) -> None:
    write_row(tmp_path, dataset=["MATH", "max_length"], ground_truth=["42", "500"])
    inputs, mistakes = loaded(tmp_path)
    assert mistakes == []
    assert inputs.train_dataset.dataset_names == ("MATH + max_length",)
    assert inputs.train_dataset[0].ground_truth == ["42", "500"]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"dataset": ["math", "max_length"]}, "2 verifiers need a list of 2 ground truths, got '42'"),
        ({"dataset": ["math", "max_length"], "ground_truth": ["42"]}, "2 verifiers need a list of 2 ground truths"),
        (
            {"dataset": ["math", "maths"], "ground_truth": ["42", "1"]},
            "unknown verifier 'maths' in 'dataset'; nearest: math",
        ),
        (
            {"dataset": ["math", "max_length"], "ground_truth": ["42", "long"]},
            "the ground truth must be a number of tokens, got 'long'",
        ),
        ({"dataset": [["math"]]}, "'dataset' must be the name of a verifier, or a list of names"),
        ({"dataset": "math_dapo"}, "unknown verifier 'math_dapo' in 'dataset'; nearest: math"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(tmp_path: Path, columns: dict[str, Any], problem: str) -> None:
    write_row(tmp_path, **columns)
    inputs, (mistake,) = loaded(tmp_path)
    assert inputs is None
    assert problem in mistake


def test_verifiers_have_other_names(tmp_path: Path) -> None:
    write_row(tmp_path, dataset="Math_DAPO")
    inputs, mistakes = loaded(tmp_path, remap_verifier=["math_dapo=math", "x=gsm8k"])
    assert mistakes == []
    assert inputs.train_dataset.dataset_names == ("math",)


def test_metrics_tell_the_verifiers_apart() -> None:
    parts = (ScorePart("math", 3.0, np.array([1.0, 0.0])), ScorePart("reasoning_gym/x", 1.0, np.array([0.0, 1.0])))
    group = ScoredGroup(None, "math + reasoning_gym/x", np.array([0.75, 0.25]), reward_weight=4.0, parts=parts)  # type: ignore[arg-type]
    assert [part.name for part in group.by_verifier] == ["math", "reasoning_gym"]
    assert group.weighted_scores.tolist() == [3.0, 1.0]
