"""What became of a run: whether it still runs, and how it ended."""

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

QUIET_S = 900.0
"""A run on another machine counts as running while one of its files is not older than this."""
FILES = ("metrics.jsonl", "record/events.jsonl", "record/starts.jsonl", "record/open", "logs/driver.log")


def state_of(output_dir: Path, starts: Sequence[Mapping[str, Any]]) -> str:
    """`running`, `ended`, `interrupted`, `failed` or `killed`; `no record` if there are no starts."""
    if not starts:
        return "no record"
    end = starts[-1]["end"]
    if end is None:
        return "running" if _runs(output_dir, starts[-1]) else "killed"
    if end["reason"].startswith("failed"):
        return "failed"
    return "ended" if end["exit_code"] == 0 else "interrupted"


def end_of(state: str, starts: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a run is over, in a sentence; None while it runs, and if all its steps are done."""
    if state == "killed":
        cure = "The same command goes on from the newest checkpoint."
        return f"The run was killed: its process is gone and has not said why. {cure}"
    if state == "interrupted":
        return f"The run was interrupted (exit code {starts[-1]['end']['exit_code']}). The same command goes on."
    if state != "failed":
        return None
    reason = str(starts[-1]["end"]["reason"])
    return f"The run {reason}" if reason.startswith("failed: ") else "The run failed. logs/driver.log says why."


def _runs(output_dir: Path, start: Mapping[str, Any]) -> bool:
    """Whether the process of this start is there; of a run on another machine, whether it wrote a moment ago."""
    if start["host"] != socket.gethostname():
        changes = [(output_dir / name).stat().st_mtime for name in FILES if (output_dir / name).exists()]
        return time.time() - max(changes, default=0.0) < QUIET_S
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(start["process"])
        # A process that began after the run has only the number of the run's process.
        return process.create_time() <= start["unix"] + 1 and process.status() != psutil.STATUS_ZOMBIE
    return False
