"""Shared memory of workers is gone however the process that they belong to ends."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = """
from multiprocessing import resource_tracker, shared_memory
area = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(area._name, "shared_memory")
print(area.name, flush=True)
input()
"""
ENGINE = """
import subprocess, sys, time
from open_instruct.worker_memory import files_of_workers, remove_when_this_process_ends
command = [sys.executable, "-c", sys.argv[2]]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
name = worker.stdout.readline().strip()
files = files_of_workers()
assert [path.name for path in files] == [name], (files, name)
remove_when_this_process_ends(files)
print(name, flush=True)
time.sleep(60 if sys.argv[1] == "killed" else 0)
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_files_are_removed(how: str) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, how, WORKER], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    path = Path("/dev/shm") / engine.stdout.readline().strip()
    assert path.name
    if how == "killed":
        assert path.exists()
        engine.kill()
    engine.wait(timeout=20)
    deadline = time.monotonic() + 20
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
