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
import gc, multiprocessing, os, signal, subprocess, sys, time
from multiprocessing.resource_tracker import _resource_tracker
from open_instruct.worker_memory import clean_up_when_this_process_ends, files_of_workers
command = [sys.executable, "-c", sys.argv[2]]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
name = worker.stdout.readline().strip()
lock = multiprocessing.get_context("spawn").Lock()
gc.freeze()
names = {name, "sem." + lock._semlock.name.strip("/")}
files = files_of_workers()
assert {path.name for path in files} == names, (files, names)
stands_by = clean_up_when_this_process_ends([worker.pid], set())
print(*names, flush=True)
if sys.argv[1] == "killed":
    os.kill(_resource_tracker._pid, signal.SIGKILL)  # Ray ends the children of a worker that died
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_files_are_removed(how: str) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, how, WORKER], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    paths = [Path("/dev/shm") / name for name in engine.stdout.readline().split()]
    assert len(paths) == 2
    engine.wait(timeout=20)
    deadline = time.monotonic() + 20
    while any(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)
