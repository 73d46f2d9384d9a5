"""A disk that is full, or full in the middle of a row: one message, nothing torn; with room again the same command goes on."""

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from whole_runs import assert_ledger_balances, command, rows

from open_instruct.rc.stream import StreamWriter, read_stream
from open_instruct.report.metrics_file import MetricsWriter, read_metrics
from open_instruct.storage.checkpoints import CheckpointStore
from open_instruct.storage.output_directory import is_of_storage, names_a_full_disk
from open_instruct.workflows.rc.types import TrainingText


@contextmanager
def room_for(path: Path, num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond what `path` has now and `num_bytes` more: as on a disk, a write is cut short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_there_is_no_room_for_is_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 1.0})
        with room_for(path, 10), pytest.raises(OSError, match="File too large") as full:
            writer.write(2, {"a": 2.0, "b": "x" * 1000})
        assert is_of_storage(full.value)
        assert [row["training_step"] for row in read_metrics(path)] == [1]
        writer.write(2, {"a": 2.0})
    assert path.read_text() == '{"training_step": 1, "a": 1.0}\n{"training_step": 2, "a": 2.0}\n'


def test_a_row_whose_evaluation_has_no_room_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 1.0})
        with room_for(path, 10), pytest.raises(OSError, match="File too large"):
            writer.add(1, {"b": "x" * 1000})
        assert path.read_text() == '{"training_step": 1, "a": 1.0}\n'
        writer.add(1, {"b": "x"})
    assert path.read_text() == '{"training_step": 1, "a": 1.0, "b": "x"}\n'


def test_a_trajectory_that_there_is_no_room_for_is_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "actor.jsonl"
    ids = np.array([1], dtype=np.int32)
    turns = [TrainingText("x", ids, ids, np.array([-1.0], dtype=np.float32), 0.0, finished=True)]
    with StreamWriter(path, max_entry_bytes=10_000) as stream:
        stream.write(turns)
        size = path.stat().st_size
        with room_for(path, 10), pytest.raises(OSError, match="File too large"):
            stream.write(turns)
        assert path.stat().st_size == size
        stream.write(turns)
    assert len(list(read_stream(path))) == 2


def test_what_a_killed_run_was_writing_goes(tmp_path: Path) -> None:
    (tmp_path / ".step_000200.partial").mkdir()
    (tmp_path / ".step_000200.partial" / "half").write_bytes(b"x")
    (tmp_path / "step_000100").mkdir()
    CheckpointStore(tmp_path, keep_last=1).remove_partial()
    assert os.listdir(tmp_path) == ["step_000100"]


def test_an_error_on_a_disk_with_room_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug"), names_a_full_disk(tmp_path):
        raise RuntimeError("a bug")


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[None]:
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_run_whose_disk_is_full_says_so_and_goes_on_with_room_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    words = command(disk / "out", total_episodes=16 * 6, checkpoint_state_freq=1, keep_last_n_checkpoints=-1)
    with small_disk(disk, 24):  # 16 MiB have to be free at the start; a checkpoint takes 8
        process = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert process.returncode == 1, process.stderr
        assert "Traceback" not in process.stderr
        assert "No space left on device" in process.stderr
        assert "MiB are free" in process.stderr
        assert list((disk / "out").rglob("*.partial")) == []
        for line in (disk / "out" / "metrics.jsonl").read_text().splitlines():
            json.loads(line)
        subprocess.run(["mount", "-o", "remount,size=800m", str(disk)], check=True)
        process = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert process.returncode == 0, process.stderr
        assert [row["training_step"] for row in rows(disk / "out" / "metrics.jsonl")] == list(range(1, 7))
        assert_ledger_balances(disk / "out")
