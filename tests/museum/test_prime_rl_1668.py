"""wandb drops the rows of a resumed run."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exhibit import Exhibit

from open_instruct.report.tracker import TrackerOptions
from open_instruct.report.trackers.wandb_tracker import WandbTracker

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/prime-rl #1668", "wandb/wandb #4482"),
    subject="evaluation and metrics",
    happened="wandb numbers its rows upwards and ignores a row whose number it has passed. A run that resumed from an "
    "earlier checkpoint, or whose counters had drifted apart, lost its rows with a warning.",
    here="Rows carry their training step as a value, which is the axis of all curves, and wandb's own number is never "
    "given (`report/trackers/wandb_tracker.py`). `metrics.jsonl` has all rows in any case.",
)
Row = Mapping[str, Any]
Log = Callable[["Service", int, Row], None]


class Service:
    """A run at wandb's service: it takes no row whose number is below that of its last row."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.axes: dict[str, str] = {}
        self._number = 0

    def log(self, row: Row, step: int | None = None) -> None:
        if step is not None and step < self._number:
            return
        self._number = self._number + 1 if step is None else step
        self.rows.append(row)

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def finish(self, exit_code: int) -> None: ...


def check(log: Log) -> None:
    service = Service()
    for step in (1, 2, 3, 4, 5, 4, 5, 6):  # killed behind step 5, resumed from the checkpoint of step 3
        log(service, step, {"scores": float(step)})
    assert [row["scores"] for row in service.rows] == [1, 2, 3, 4, 5, 4, 5, 6]


def theirs(service: Service, step: int, row: Row) -> None:
    service.log(row, step=step)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Log:
    monkeypatch.setenv("WANDB_MODE", "offline")

    def log(service: Service, step: int, row: Row) -> None:
        library = SimpleNamespace(Settings=dict, init=lambda **_: service, teardown=lambda exit_code: None)
        monkeypatch.setitem(sys.modules, "wandb", library)
        options = TrackerOptions(project="p", name="n", run_id="i", output_dir=str(tmp_path))
        tracker = WandbTracker(options, {})
        tracker.log(row, step)
        tracker.finish()
        assert service.rows[-1]["training_step"] == step
        assert service.axes == {"*": "training_step"}

    return log


def test_rows_numbered_by_step_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_rows_after_a_resume_are_kept_here(ours: Log) -> None:
    check(ours)
