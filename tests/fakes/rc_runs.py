"""Runs of `rc_actor.py` as a user starts them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from open_instruct.workflows.rc.types import TrainingText

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90.0


def start(arguments: Sequence[str], cwd: Path = ROOT, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "open_instruct.rc_actor", *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, start_new_session=True, **pipes)


def run(
    arguments: Sequence[str], cwd: Path = ROOT, timeout_s: float = TIMEOUT_S, **environment: str
) -> tuple[int, str]:
    process = start(arguments, cwd, **environment)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def table(turns: Sequence[TrainingText]) -> list[tuple[int, str, int]]:
    return [(t.metadata["cycle_step"], t.metadata["turn_type"], t.metadata["turn_number"]) for t in turns]


def summary_of(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "summary.json").read_text())
