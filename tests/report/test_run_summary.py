"""What a run says at its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from open_instruct.report.run_summary import (
    PromptCounts,
    RunSummary,
    SetAccuracy,
    format_summary_table,
    format_table,
    read_summary,
    write_summary,
)


@pytest.fixture
def summary() -> RunSummary:
    return RunSummary(
        eval_accuracy_before=0.375,
        eval_accuracy_after=0.9375,
        training_steps=100,
        wall_seconds=312.4,
        tokens_per_second=2345.6,
        prompts=PromptCounts(issued=1620, consumed=1500, dropped={"zero_std": 100, "run_ended": 20}, reissued=3),
        checkpoint="out/x/final",
        plot="out/x/reward_curve.png",
        eval_sets={
            "plus": SetAccuracy(0.25, 0.75),
            "minus": SetAccuracy(None, 0.5),
            "own": SetAccuracy(None, None, -1.0, 0.5),
        },
        alarms={"entropy_collapse": 62, "cut_off_answers": 40},
    )


def test_summary_json_has_the_documented_keys(tmp_path: Path, summary: RunSummary) -> None:
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "eval_accuracy_before": 0.375,
        "eval_accuracy_after": 0.9375,
        "eval_reward_before": None,
        "eval_reward_after": None,
        "training_steps": 100,
        "wall_seconds": 312.4,
        "tokens_per_second": 2345.6,
        "prompts": {
            "issued": 1620,
            "consumed": 1500,
            "dropped": {"zero_std": 100, "run_ended": 20},
            "reissued": 3,
        },
        "checkpoint": "out/x/final",
        "plot": "out/x/reward_curve.png",
        "eval_sets": {
            "plus": {"before": 0.25, "after": 0.75, "reward_before": None, "reward_after": None},
            "minus": {"before": None, "after": 0.5, "reward_before": None, "reward_after": None},
            "own": {"before": None, "after": None, "reward_before": -1.0, "reward_after": 0.5},
        },
        "alarms": {"entropy_collapse": 62, "cut_off_answers": 40},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(tmp_path / "summary.json") == summary


def test_the_table_says_all_of_it(summary: RunSummary) -> None:
    table = format_summary_table(summary)
    texts = [
        "37.5%",
        "93.8%  (+56.2 points)",
        "plus                 25.0% → 75.0%  (+50.0 points)",
        "minus                not measured → 50.0%",
        "own                  reward -1.000 → 0.500",
        "2,346",
        "1,620",
        "1,500",
        "120  (run_ended 20, zero_std 100)",
        "5m12s",
        "out/x/final",
        "out/x/reward_curve.png",
        "alarms                 cut_off_answers (step 40), entropy_collapse (step 62)",
    ]
    assert [text for text in texts if text not in table] == []


def test_the_table_of_a_run_without_evaluation(summary: RunSummary) -> None:
    nothing = PromptCounts(issued=0, consumed=0, dropped={}, reissued=0)
    table = format_summary_table(RunSummary(None, None, 0, 0.0, 0.0, nothing, None, None))
    assert table.count("not measured") == 2
    assert "points" not in table
    assert "alarms" not in table


def test_cells_stand_below_each_other_and_the_rules_are_as_long_as_the_longest_line() -> None:
    table = format_table([["cycle", "right"], ["1", "50.0%"], ["10"]], "<>")
    assert table.splitlines() == [
        "────────────────",
        "  cycle  right",
        "  1      50.0%",
        "  10",
        "────────────────",
    ]
    assert len(format_table([["a", "x" * 300]], "<<").splitlines()[0]) == 100


def test_the_table_says_how_to_talk_to_a_saved_model(tmp_path: Path, summary: RunSummary) -> None:
    (tmp_path / "model").mkdir()
    saved = replace(summary, checkpoint=str(tmp_path / "model"))
    assert "talk to it" not in format_summary_table(saved)  # a checkpoint, or nothing
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert f"python -m open_instruct.chat {tmp_path / 'model'}" in format_summary_table(saved)
