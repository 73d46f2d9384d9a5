"""What a run tells while it runs, and that none of it can stop the run."""

import contextlib
import http.server
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from open_instruct.report import metrics_file
from open_instruct.report.histogram import histogram
from open_instruct.report.isolation import Isolation
from open_instruct.report.live_line import Accuracy, Progress, ProgressLine, format_duration
from open_instruct.report.log_files import setup_logging
from open_instruct.report.metrics_file import MetricsWriter, read_metrics, to_json_value
from open_instruct.report.tracker import TrackerOptions, Trackers
from open_instruct.report.trackers import make_tracker, wandb_tracker
from open_instruct.report.trackers.wandb_tracker import WandbTracker
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.interruption import Interrupted

PROGRESS = Progress(step=1, reward=0.5, tokens_per_second=1234.5, prompt_queue=3, result_queue=2, age=1.0)


def strict_json(line: str | bytes) -> Any:
    """As a reader parses that knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = {"scores": np.float32(0.5), "episode": np.int64(128), "lr": torch.tensor(1e-4), "hist": np.eye(2)}
    with MetricsWriter(tmp_path / "deep" / "metrics.jsonl") as writer:
        writer.write(1, metrics)
        row = strict_json((tmp_path / "deep" / "metrics.jsonl").read_text())
    assert row == {
        "training_step": 1,
        "scores": 0.5,
        "episode": 128,
        "lr": pytest.approx(1e-4),
        "hist": [[1.0, 0.0], [0.0, 1.0]],
    }


def test_what_is_not_finite_is_null_and_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in (1, 2):
            writer.write(step, {"val/ratio": float("nan"), "kl": np.float32("inf"), "absent": None})
    rows = [strict_json(line) for line in writer.path.read_text().splitlines()]
    assert rows[1] == {"training_step": 2, "val/ratio": None, "kl": None, "absent": None}
    warned = sorted(record.getMessage().split()[1] for record in caplog.records)
    assert warned == ["kl", "val/ratio"]


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON_LIKE)
def test_any_value_becomes_strict_json(value: Any) -> None:
    strict_json(json.dumps(to_json_value(value), allow_nan=False))


TORN_ROW = b'{"training_step": 1, "scores": 9}'


@example(last_step=1, num_rows=1, torn=len(TORN_ROW))
@given(last_step=st.integers(0, 8), num_rows=st.integers(0, 8), torn=st.integers(0, len(TORN_ROW)))
def test_truncating_keeps_the_rows_of_the_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, last_step: int, num_rows: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, num_rows + 1):
            writer.write(step, {"scores": step / 10})
    with path.open("ab") as file:
        file.write(TORN_ROW[:torn])  # whole but for its line end, or torn

    with MetricsWriter(path) as writer:
        cut = writer.truncate_after(last_step)
        writer.write(last_step + 1, {"scores": 0.0})
    steps = [strict_json(line)["training_step"] for line in path.read_text().splitlines()]
    assert steps == [*range(1, min(last_step, num_rows) + 1), last_step + 1]
    assert cut == max(0, num_rows - last_step) + bool(torn)
    assert [row["training_step"] for row in read_metrics(path)] == steps


def test_truncating_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    """A run of 100,000 steps with 128 prompts each has 0.7 GB of fates, and each resume goes through them."""
    path = tmp_path / "prompts.jsonl"
    fates = [{"prompt_id": f"train-{number}", "row": number, "fate": "consumed"} for number in range(128)]
    line = json.dumps({"prompts": fates})[1:]
    path.write_text("".join(f'{{"training_step": {step}, {line}\n' for step in range(1, 1001)))
    num_bytes = path.stat().st_size
    assert num_bytes > 6_000_000
    with MetricsWriter(path) as writer:
        tracemalloc.start()
        assert writer.truncate_after(900) == 100
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        writer.write(901, {})
    assert peak < num_bytes / 20
    assert [row["training_step"] for row in read_metrics(path)] == list(range(1, 902))


def test_rows_of_the_checkpoint_are_kept_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"training_step": {step}}}\n' for step in (1, 5, 2, 6, 3)))
    with MetricsWriter(path) as writer:
        assert writer.truncate_after(4) == 2
        writer.write(4, {})
    assert [row["training_step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_are_added_to_the_last_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.add(0, {"eval": 0.1})
        assert writer.last_row() == {"training_step": 0, "eval": 0.1}
        writer.write(1, {"scores": 0.5, "hist": [1, 2], "alerts": {"scores": "high"}})
        writer.add(1, {"eval": float("nan"), "alerts": {"scores": "high", "eval": "low"}})
        writer.write(2, {"scores": 1e-7})
        writer.add(1, {"eval": 0.3})  # not the last row any more
    assert path.read_text().splitlines() == [
        '{"training_step": 0, "eval": 0.1}',
        '{"training_step": 1, "scores": 0.5, "hist": [1, 2], "eval": null, "alerts": {"scores": "high", "eval": "low"}}',
        '{"training_step": 2, "scores": 1e-07}',
        '{"training_step": 1, "eval": 0.3}',
    ]


def test_a_row_longer_than_what_is_read_at_once_gets_its_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        assert writer.last_row() is None
        writer.write(1, {"text": "x" * 100})
        writer.write(2, {"text": "y" * 200_000})
        writer.add(2, {"eval": 0.5})
        assert writer.last_row() == {"training_step": 2, "text": "y" * 200_000, "eval": 0.5}
        writer.add(2, {"text": ""})  # shorter than before
        writer.write(3, {})
    assert list(read_metrics(path)) == [
        {"training_step": 1, "text": "x" * 100},
        {"training_step": 2, "eval": 0.5, "text": ""},
        {"training_step": 3},
    ]


@pytest.mark.parametrize("alerts", [{}, {"alerts": {"scores": "high"}}])
def test_a_kill_while_metrics_are_added_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alerts: dict[str, Any]
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"scores": 0.5})
    writer.write(2, {"scores": 0.25, **alerts})
    before = path.read_bytes()
    writes: list[tuple[int, bytes]] = []
    monkeypatch.setattr(metrics_file, "_write_at", lambda file, offset, part: writes.append((offset, part)))
    writer.add(2, {"eval": 0.75, **alerts})
    writer.close()
    (behind, long_part), (inside, short_part) = writes
    contents = [before + long_part[:num_bytes] for num_bytes in range(len(long_part) + 1)]
    contents.append(contents[-1][:inside] + short_part + contents[-1][inside + len(short_part) :])
    assert behind == len(before)
    assert len(short_part) <= (2 if not alerts else 40)  # so few that the system writes them at once
    first, old = {"training_step": 1, "scores": 0.5}, {"training_step": 2, "scores": 0.25, **alerts}
    for number, content in enumerate(contents):
        path.write_bytes(content)
        evaluation = {"eval": 0.75} if number == len(contents) - 1 else {}
        assert list(read_metrics(path)) == [first, old | evaluation]
        with MetricsWriter(path) as resumed:
            resumed.truncate_after(2)
            resumed.write(3, {})
        assert [strict_json(line)["training_step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_file_that_is_being_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"training_step": 1}\n{"training_st')
    assert list(read_metrics(path)) == [{"training_step": 1}]


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")

    def disk_full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


# --- isolation --------------------------------------------------------------------------------------------------------


def test_isolation_warns_once_and_lets_interrupts_through(caplog: pytest.LogCaptureFixture) -> None:
    isolation = Isolation("the plot")
    for _ in range(3):
        with isolation:
            raise OSError("disk full")
    assert [record.getMessage() for record in caplog.records] == [
        "the plot failed; the run goes on without it: OSError: disk full"
    ]
    with pytest.raises(KeyboardInterrupt), isolation:
        raise KeyboardInterrupt
    with pytest.raises(Interrupted), isolation:  # a signal that comes just then is no failure of what is isolated
        raise Interrupted(signal.SIGTERM)


# --- wandb ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackerOptions:
    """Of a machine where nobody has logged in to wandb."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return TrackerOptions(project="test", name="run 1", run_id="abc123", output_dir=str(tmp_path / "out"))


def offline_runs(options: TrackerOptions) -> list[Path]:
    return list(Path(options.output_dir).glob("wandb/offline-run-*/run-abc123.wandb"))


def wandb_of(trackers: Trackers) -> WandbTracker:
    (tracker,) = trackers.trackers
    assert isinstance(tracker, WandbTracker)
    return tracker


def run_id_of(trackers: Trackers) -> str:
    return wandb_of(trackers)._run.id


def test_without_tracking_nothing_is_written(options: TrackerOptions) -> None:
    tracker = make_tracker([], options, {})
    assert tracker.trackers == ()
    tracker.log({"scores": 1.0}, 1)
    tracker.finish()
    assert not Path(options.output_dir).exists()


@pytest.mark.timeout(120)
def test_without_a_key_wandb_tracks_offline_and_asks_nothing(options: TrackerOptions) -> None:
    tracker = make_tracker(["wandb"], options, {"seed": 1, "lists": ["a", 1.0]})
    assert run_id_of(tracker) == "abc123"
    tracker.log({"scores": np.float32(0.5), "val/solve_rate_hist": [0.0, 0.5, 1.0], "kl": float("nan")}, 1)
    tracker.log({"val/advantages_hist": histogram([0.0, 1.0])}, 2)
    tracker.log_table("sample_completions", [{"prompt": "p", "ground_truth": ["x"]}], 2)
    tracker.alert("entropy", "the entropy has collapsed", 2)
    tracker.finish()
    (run,) = offline_runs(options)
    logged = run.read_bytes()
    assert b"step 2: the entropy has collapsed" in logged
    assert b"scores" in logged
    assert b"val/solve_rate_hist" in logged
    assert logged.count(b'"histogram"') == 4  # of two metrics, in their rows and in wandb's summary
    (table,) = run.parent.glob("files/media/table/sample_completions*.table.json")
    assert json.loads(table.read_text())["data"] == [["p", "['x']"]]


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port that takes connections and never answers: a network that swallows packets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


@pytest.fixture
def failing_server() -> Iterator[int]:
    """A port that answers every request with an internal error."""

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(500)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("silent_server", "does not answer"),
        pytest.param("failing_server", "wandb is out of reach", marks=pytest.mark.slow),
    ],
)
def test_with_a_key_but_no_service_wandb_falls_back_to_offline(
    options: TrackerOptions,
    server: str,
    message: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{request.getfixturevalue(server)}")
    monkeypatch.setattr(wandb_tracker, "WANDB_INIT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(wandb_tracker, "WANDB_ANSWER_TIMEOUT_S", 1.0)
    start = time.monotonic()
    tracker = make_tracker(["wandb"], options, {})
    tracker.log({"scores": 1.0}, 1)
    tracker.finish()
    assert time.monotonic() - start < 60
    assert message in caplog.text
    assert len(offline_runs(options)) == 1


def test_something_else_than_a_web_server_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        assert not wandb_tracker.answers(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=5.0)
        thread.join(5.0)


@pytest.mark.timeout(120)
def test_a_broken_wandb_is_warned_of_once(
    options: TrackerOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = make_tracker(["wandb"], options, {})

    def broken(_: object) -> None:
        raise RuntimeError("service died")

    monkeypatch.setattr(wandb_of(tracker)._run, "log", broken)
    caplog.clear()
    for step in range(3):
        tracker.log({}, step)
    tracker.finish()
    assert [record.getMessage() for record in caplog.records if record.name == "open_instruct.report.isolation"] == [
        "wandb failed; the run goes on without it: RuntimeError: service died"
    ]


HUNG = """
import logging, sys, time
import psutil
from open_instruct.report import tracker as tracker_module
from open_instruct.report.tracker import TrackerOptions
from open_instruct.report.trackers import make_tracker

logging.basicConfig()
tracker_module.FINISH_TIMEOUT_S, tracker_module.GRACE_S, tracker_module.MAX_ROWS_WAITING = 1.0, 2.0, 50
tracker = make_tracker(["wandb"], TrackerOptions("test", "run 1", "abc123", sys.argv[1]), {})
helpers = [child for child in psutil.Process().children() if "wandb" in child.name()]
assert helpers
for helper in helpers:
    helper.suspend()
start = time.monotonic()
for step in range(400):
    tracker.log({f"metric {number}": step for number in range(120)}, step)
    time.sleep(0.002)
assert time.monotonic() - start < 20, time.monotonic() - start  # a second on a quiet machine; else for ever
tracker.finish()
psutil.wait_procs(helpers, timeout=5)
assert not any(helper.is_running() for helper in helpers)
"""


@pytest.mark.timeout(120)
def test_a_helper_of_wandb_that_hangs_holds_up_nobody(options: TrackerOptions) -> None:
    """Neither a step nor the end of the process. Without the thread the 110th row waits for ever."""
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", HUNG, options.output_dir], capture_output=True, text=True, timeout=90, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("wandb hangs: the run goes on") == 1
    assert process.stderr.count("wandb hangs: the rows that it has not sent yet") == 1
    assert time.monotonic() - start < 75


def test_a_wandb_that_cannot_start_leaves_a_run_without_tracker(
    options: TrackerOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb fails
    assert make_tracker(["wandb"], options, {}).trackers == ()
    assert "the run goes on without" in caplog.text


# --- the live line ----------------------------------------------------------------------------------------------------


def test_plain_lines_come_at_most_once_a_second_and_always_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(total=50) as line:
        for step in range(1, 51):
            line.update(replace(PROGRESS, step=step))
    lines = capsys.readouterr().err.splitlines()
    assert [text.split("  ")[0] for text in lines] == ["step 1/50", "step 50/50"]
    assert "reward 0.500  1,234 tok/s  queues 3/2  age 1.0  ETA 0s" in lines[-1]


def test_the_line_says_how_sure_the_reward_is_and_how_high_it_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine(total=1) as line:
        line.update(replace(PROGRESS, standard_error=0.125, highest_reward=10.0))
    assert "reward 0.500 ± 0.125 of 10  1,234 tok/s" in capsys.readouterr().err


def test_the_time_left_counts_this_process_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with ProgressLine(total=100, first_step=90) as line:
        now = 110.0
        line.update(replace(PROGRESS, step=92))
    assert "ETA 40s" in capsys.readouterr().err


def read_all(terminal: int) -> str:
    """All that was written to a terminal whose other side is closed; a single read may give a part of it."""
    parts = []
    with os.fdopen(terminal, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # EIO is a terminal's end
        while part := reader.read(4096):
            parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_shows_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal, ProgressLine(total=10, stream=terminal) as line:
        line.wait("step 1: 0/8 groups")
        line.update(replace(PROGRESS, step=4, accuracies=[Accuracy(0.75, 2)]))
        line.wait("step 5: 2/8 groups")
    text = read_all(reader)
    assert "4/10  ETA 0s  reward 0.500" in text
    assert "│ step 5: 2/8 groups" in text
    assert "eval 75% (step 2)" in text
    assert "\n" not in text.split("4/10  ETA")[0]


def test_a_closed_stream_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = (tmp_path / "log").open("w")
    with ProgressLine(total=10, stream=stream) as line:
        stream.close()
        line.update(PROGRESS)
        line.update(replace(PROGRESS, step=10))
    assert len(caplog.records) == 1
    assert "the progress line failed" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (float("nan"), "?"), (float("inf"), "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, logging.getLogger("open_instruct").level
    yield root
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.getLogger("open_instruct").setLevel(ours)


def log_a_little() -> None:
    for name in ("open_instruct.part", "library"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s %s", name, logging.getLevelName(level))


def messages(text: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in text.splitlines()]


ALL_MESSAGES = [
    "open_instruct.part DEBUG",
    "open_instruct.part INFO",
    "open_instruct.part WARNING",
    "library INFO",
    "library WARNING",
]


@pytest.mark.parametrize(
    ("verbose", "lines"),
    [(True, ALL_MESSAGES), (False, ["open_instruct.part INFO", "open_instruct.part WARNING", "library WARNING"])],
)
def test_the_file_holds_everything_and_stderr_what_a_user_wants(
    tmp_path: Path,
    root_logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    verbose: bool,
    lines: list[str],
) -> None:
    path = setup_logging(tmp_path, verbose)
    log_a_little()
    assert path == tmp_path / "logs" / "driver.log"
    assert messages(path.read_text()) == ALL_MESSAGES
    assert messages(capsys.readouterr().err) == lines


def test_setting_up_the_log_again_moves_it(tmp_path: Path, root_logger: logging.Logger) -> None:
    first, second = setup_logging(tmp_path / "a"), setup_logging(tmp_path / "b")
    log_a_little()
    assert first.read_text() == ""
    assert len(messages(second.read_text())) == len(ALL_MESSAGES)
