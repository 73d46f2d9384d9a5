"""The pictures that a run makes."""

from pathlib import Path

import pytest

from open_instruct.report import plots
from open_instruct.report.accuracies import ACCURACY_KEY
from open_instruct.report.metrics_file import MetricsWriter
from open_instruct.report.plots import CYCLE_KEY, REWARD_KEY, plot_reward_curve

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


def test_each_evaluation_set_has_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        both = {"eval/plus/pass_at_1": 0.25, "eval/minus/pass_at_1": 0.5, ACCURACY_KEY: 0.375}
        writer.write(0, both)
        writer.write(1, {REWARD_KEY: 0.5})
        writer.write(2, {"eval/plus/pass_at_1": 0.75})
    drawn = {}
    monkeypatch.setattr(plots, "_draw_curves", lambda rewards, errors, accuracies, *_: drawn.update(accuracies))
    plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "x.png")
    assert drawn == {"eval plus": [(0, 0.25), (2, 0.75)], "eval minus": [(0, 0.5)]}
    monkeypatch.undo()
    png = plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "x.png")
    assert png is not None
    assert png.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "x.png") is None
    assert caplog.records == []
    assert plot_reward_curve(tmp_path / "absent.jsonl", tmp_path / "x.png") is None
    assert "the reward curve failed" in caplog.text
