"""The step loop evaluates each set at its own steps, and a resumed run only what is missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_fakes import PowerLoss, go, played_around, played_run  # noqa: F401 - a fixture
from whole_runs import rows

SETS = ["plus=plus.jsonl", "minus=minus.jsonl", "minus.interval=4"]


def run_of_sets(out: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"dataset_mixer_eval_list": [], "eval_sets": SETS, **options}
    return played_run(out, **settings)


def evaluated(out: Path) -> Iterator[tuple[int, list[str]]]:
    """The steps with an evaluation, and what was measured."""
    for row in rows(out / "metrics.jsonl"):
        if names := [name.removesuffix("pass_at_1") for name in row if name.endswith("pass_at_1")]:
            yield row["training_step"], sorted(names)


BOTH = ["eval/", "eval/minus/", "eval/plus/"]


def test_a_set_is_evaluated_at_its_own_steps_and_after_the_last_step(tmp_path: Path) -> None:
    run = run_of_sets(tmp_path)
    assert go(run) == 0
    assert list(evaluated(tmp_path)) == [(2, ["eval/plus/"]), (4, BOTH), (6, BOTH)]
    assert {name: one["share"] for name, one in run.progress.eval_sets_after.items()} == {"plus": 0.06, "minus": 0.06}


def test_the_summary_has_the_accuracy_of_each_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(run_of_sets(tmp_path, eval_on_step_0=True, eval_sets=SETS[:2])) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: (one["before"], one["after"]) for name, one in summary["eval_sets"].items()} == {
        "plus": (0.0, 0.06),
        "minus": (0.0, 0.06),
    }
    assert "plus                 0.0% → 6.0%  (+6.0 points)" in capsys.readouterr().out


def test_an_evaluation_of_some_sets_says_nothing_of_all(tmp_path: Path) -> None:
    assert go(run_of_sets(tmp_path, eval_on_step_0=True, eval_sets=[*SETS[:2], "minus.interval=-1"])) == 0
    assert list(evaluated(tmp_path)) == [(0, BOTH), *((step, ["eval/plus/"]) for step in (2, 4, 6))]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_accuracy_before"] == 0.0
    assert summary["eval_accuracy_after"] is None
    assert {name: one["after"] for name, one in summary["eval_sets"].items()} == {"plus": 0.06, "minus": None}


def test_a_set_that_was_written_is_not_evaluated_again_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(PowerLoss):
        go(run_of_sets(tmp_path, during="the batch of step 4", power_fails=True, checkpoint_state_freq=2))
    run = run_of_sets(tmp_path, during="the batch of step 3", checkpoint_state_freq=2)
    assert go(run) == 85
    assert run.components.controller.evaluating is None
    assert {name: one["share"] for name, one in run.progress.eval_sets_after.items()} == {"plus": 0.02}
    assert go(run_of_sets(tmp_path)) == 0
    assert list(evaluated(tmp_path)) == [(2, ["eval/plus/"]), (4, BOTH), (6, BOTH)]


def test_a_resumed_run_evaluates_the_sets_that_were_under_way_and_those_that_are_due_now(tmp_path: Path) -> None:
    with pytest.raises(PowerLoss):
        go(run_of_sets(tmp_path, during="the evaluation of version 2", power_fails=True, checkpoint_state_freq=2))
    often = [*SETS[:2], "minus.interval=2"]
    assert go(run_of_sets(tmp_path, during="the batch of step 4", eval_sets=often)) == 85
    assert list(evaluated(tmp_path)) == [(2, BOTH)]
