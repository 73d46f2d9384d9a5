"""The trackers beside wandb, each with its real library: what was sent is read again with that library's own reader."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.report import tracker as tracker_module
from open_instruct.report.histogram import histogram
from open_instruct.report.tracker import BackgroundTracker, TrackerOptions, Trackers
from open_instruct.report.trackers import LIBRARIES, how_to_install, make_tracker, tracker_names, trackers_are_installed

ROOT = Path(__file__).parents[2]
NAMES = [name for name in LIBRARIES if name != "wandb"]
Rows = dict[int, dict[str, float]]
"""Numbers by step and metric."""


def needs(name: str) -> None:
    """Skip the test where the library is absent."""
    if how_to_install(name):
        pytest.skip(f"{name} is not installed")


each_tracker = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackerOptions:
    for variable in (
        "MLFLOW_TRACKING_URI",
        "SWANLAB_API_KEY",
        "SWANLAB_MODE",
        "TRACKIO_SPACE_ID",
        "TRACKIO_SERVER_URL",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "swanlab_home"))
    monkeypatch.setattr(
        tracker_module, "FINISH_TIMEOUT_S", 300.0
    )  # making MLflow's database takes long on a busy machine
    if find_spec("trackio"):
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio, trackio.utils, trackio.sqlite_storage):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return TrackerOptions(project="test", name="run 1", run_id="abc123def4560000", output_dir=str(tmp_path / "out"))


# --- readers: each library's own ----------------------------------------------------------------------------------------


def read_tensorboard(options: TrackerOptions) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(options.output_dir, "tensorboard")))
    events.Reload()
    rows: Rows = {}
    tags = events.Tags()["scalars"]
    assert isinstance(tags, list)
    for tag in tags:
        for event in events.Scalars(tag):
            assert tag not in rows.setdefault(event.step, {}), "a step stands twice"
            rows[event.step][tag] = event.value
    return rows


def read_trackio(options: TrackerOptions) -> Rows:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(options.project)
    rows: Rows = {}
    for entry in SQLiteStorage.get_logs(options.project, run.name):
        numbers = {key: value for key, value in entry.items() if isinstance(value, float)}
        assert not numbers.keys() & rows.setdefault(entry["step"], {}).keys(), "a step stands twice"
        rows[entry["step"]] |= numbers
    return rows


def read_mlflow(options: TrackerOptions) -> Rows:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{options.output_dir}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name(options.project)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    rows: Rows = {}
    for metric in run.data.metrics:
        for point in sorted(client.get_metric_history(run.info.run_id, metric), key=lambda point: point.timestamp):
            rows.setdefault(point.step, {})[metric] = point.value
    return rows


def read_swanlab(options: TrackerOptions) -> Rows:
    """Of several folders the newest counts for a step."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    rows: Rows = {}
    for path in sorted(Path(options.output_dir, "swanlab").glob("run-*/run-*.swanlab"), key=os.path.getmtime):
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = Record.FromString(data)
            if record.HasField("scalar"):
                rows.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
        reader.close()
    return rows


READERS: dict[str, Callable[[TrackerOptions], Rows]] = {
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
}


# --- runs ---------------------------------------------------------------------------------------------------------------


def row(step: int, scale: float = 1.0) -> dict[str, float]:
    return {"scores": step * scale, "objective/math_reward": step * scale / 2}


@each_tracker
def test_a_finished_run_has_its_rows(name: str, options: TrackerOptions) -> None:
    needs(name)
    tracker = make_tracker([name], options, {"seed": 1, "model": "m"})
    tracker.started(-1)
    tracker.log({"eval/scores": 0.25}, 0)
    for step in (1, 2, 3):
        tracker.log({**row(step), "val/advantages_hist": histogram([0.0, 1.0]), "kl": float("nan"), "text": "x"}, step)
    tracker.log({"eval/scores": 0.5}, 3)
    tracker.log_table("sample_completions", [{"prompt": "p|<b>", "ground_truth": ["x"], "score": 1.0}], 3)
    tracker.alert("entropy", "the entropy has collapsed", 3)
    tracker.finish()
    assert READERS[name](options) == {0: {"eval/scores": 0.25}, 1: row(1), 2: row(2), 3: row(3) | {"eval/scores": 0.5}}


def test_mlflow_writes_only_into_the_output_directory(
    options: TrackerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tracker = make_tracker(["mlflow"], options, {})
    tracker.started(-1)
    tracker.log_table("sample_completions", [{"prompt": "p"}], 3)
    tracker.finish()
    assert list(elsewhere.iterdir()) == []
    assert list(Path(options.output_dir, "mlflow/artifacts").rglob("step_000003.json"))


@each_tracker
def test_a_resumed_run_has_each_step_once_and_the_later_row(name: str, options: TrackerOptions) -> None:
    """The first process reached step 6 after the checkpoint of step 4."""
    needs(name)
    tracker = make_tracker([name], options, {})
    tracker.started(-1)
    for step in range(1, 7):
        tracker.log(row(step), step)
    tracker.finish(1)
    tracker = make_tracker([name], options, {})
    tracker.started(4)
    for step in range(5, 8):
        tracker.log(row(step, scale=0.5), step)
    tracker.finish()
    rows = {step: row(step) for step in range(1, 5)} | {step: row(step, scale=0.5) for step in range(5, 8)}
    assert READERS[name](options) == rows


@each_tracker
def test_a_tracker_that_fails_is_warned_of_once(
    name: str, options: TrackerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory that it writes to is a file."""
    needs(name)
    Path(options.output_dir).write_text("")
    Path(options.output_dir, "..", "trackio").resolve().write_text("")
    tracker = make_tracker([name], options, {})
    tracker.started(-1)
    for step in range(3):
        tracker.log(row(step), step)
    tracker.finish()
    messages = [record.getMessage() for record in caplog.records if record.name == "open_instruct.report.isolation"]
    assert [message.partition(": ")[0] for message in messages] == [f"{name} failed; the run goes on without it"]


class Broken(BackgroundTracker):
    """Fails at each row."""

    def _log(self, row: object, step: int) -> None:
        raise RuntimeError("service died")


def test_a_tracker_that_fails_does_not_keep_rows_from_the_others(options: TrackerOptions) -> None:
    needs("tensorboard")
    both = Trackers([Broken("broken"), *make_tracker(["tensorboard"], options, {}).trackers])
    both.started(-1)
    both.log(row(1), 1)
    both.finish()
    assert read_tensorboard(options) == {1: row(1)}


def test_alerts_reach_trackio(options: TrackerOptions) -> None:
    needs("trackio")
    import trackio

    tracker = make_tracker(["trackio"], options, {})
    tracker.started(-1)
    tracker.alert("entropy", "the entropy has collapsed", 3)
    tracker.finish()
    (alert,) = trackio.Api().alerts(options.project)
    assert (alert["title"], alert["text"], alert["level"]) == ("entropy", "step 3: the entropy has collapsed", "warn")


def test_a_library_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = GRPOConfig(model_name_or_path="m", report_to=["trackio", "mlflow"])
    assert trackers_are_installed(args) == [
        f"--report_to trackio mlflow: {name} is not installed here. Install it: {sys.executable} -m pip install "
        f"{requirements}. Or leave out {name}."
        for name, requirements in {
            "trackio": "trackio==0.43.0",
            "mlflow": "mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1",
        }.items()
    ]


def test_no_library_is_imported_before_a_run_names_it() -> None:
    code = "import sys, open_instruct.report.trackers as t; print([n for n in t.LIBRARIES if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: list(LIBRARIES[name].requirements) for name in NAMES} == extras


@pytest.mark.parametrize(
    ("given", "trackers"),
    [
        ({}, []),
        ({"with_tracking": True}, ["wandb"]),
        ({"report_to": ["trackio", "tensorboard"]}, ["trackio", "tensorboard"]),
        ({"with_tracking": True, "report_to": ["wandb", "tensorboard"]}, ["wandb", "tensorboard"]),
    ],
)
def test_with_tracking_stays_wandb(given: dict[str, Any], trackers: list[str]) -> None:
    assert tracker_names(GRPOConfig(model_name_or_path="m", **given)) == trackers
