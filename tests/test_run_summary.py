"""What a run says at its end."""

import json
from pathlib import Path

import pytest

from open_instruct.logger_utils import MetricsWriter
from open_instruct.run_summary import (
    ACCURACY_KEY,
    CYCLE_KEY,
    REWARD_KEY,
    PromptCounts,
    RunSummary,
    format_summary_table,
    plot_reward_curve,
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
    )


def test_summary_json_has_the_documented_keys(tmp_path: Path, summary: RunSummary) -> None:
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "eval_accuracy_before": 0.375,
        "eval_accuracy_after": 0.9375,
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
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(tmp_path / "summary.json") == summary


def test_the_table_says_all_of_it(summary: RunSummary) -> None:
    table = format_summary_table(summary)
    said = [
        "37.5%",
        "93.8%  (+56.2 points)",
        "2,346",
        "1,620",
        "1,500",
        "120  (run_ended 20, zero_std 100)",
        "5m12s",
        "out/x/final",
        "out/x/reward_curve.png",
    ]
    assert [text for text in said if text not in table] == []


def test_the_table_of_a_run_without_evaluation(summary: RunSummary) -> None:
    nothing = PromptCounts(issued=0, consumed=0, dropped={}, reissued=0)
    table = format_summary_table(RunSummary(None, None, 0, 0.0, 0.0, nothing, None, None))
    assert table.count("not measured") == 2
    assert "points" not in table


CYCLES = {f"{CYCLE_KEY}{cycle}" for cycle in (1, 2, 3)}


@pytest.mark.parametrize(
    "keys", [{REWARD_KEY, ACCURACY_KEY}, {REWARD_KEY}, {ACCURACY_KEY}, {REWARD_KEY, ACCURACY_KEY, *CYCLES}]
)
def test_a_curve_is_drawn_of_whatever_was_measured(tmp_path: Path, keys: set[str]) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(30):
            values = {REWARD_KEY: step / 30 if step else float("nan"), ACCURACY_KEY: 0.4 + step / 60}
            values |= {f"{CYCLE_KEY}{cycle}": cycle / 4 for cycle in (1, 2, 3)}
            writer.write(step, {key: values[key] for key in keys if key == REWARD_KEY or step % 10 == 0})
    png = plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "plots" / "reward_curve.png")
    assert png == tmp_path / "plots" / "reward_curve.png"
    assert png is not None
    assert png.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "x.png") is None
    assert caplog.records == []
    assert plot_reward_curve(tmp_path / "absent.jsonl", tmp_path / "x.png") is None
    assert "the reward curve failed" in caplog.text
