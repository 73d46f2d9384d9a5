"""Workers and their shared memory are gone however the process that they belong to ends."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

WORKER = """
import time
from multiprocessing import resource_tracker, shared_memory
area = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(area._name, "shared_memory")
print(area.name, flush=True)
time.sleep(60)
"""
ENGINE = """
import gc, multiprocessing, os, signal, subprocess, sys, time
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path
from open_instruct.engines.engine_cleanup import cleaned_up_when_this_process_ends, files_of_workers
def killed():
    os.kill(_resource_tracker._pid, signal.SIGKILL)  # Ray ends the children of a worker that died
    os.kill(os.getpid(), signal.SIGKILL)
how, abort_file = sys.argv[1], Path(sys.argv[3])
abort_file.touch()
with cleaned_up_when_this_process_ends(abort_file):
    command = [sys.executable, "-c", sys.argv[2]]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    name = worker.stdout.readline().strip()
    lock = multiprocessing.get_context("spawn").Lock()
    gc.freeze()
    names = {name, "sem." + lock._semlock.name.strip("/")}
    files = files_of_workers()
    assert {path.name for path in files} == names, (files, names)
    print(worker.pid, *names, flush=True)
    if how == "killed while it starts":
        killed()
later = subprocess.Popen(["sleep", "30"])
print(later.pid, flush=True)
if how == "killed":
    killed()
"""
LIMIT_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["killed", "ends", "killed while it starts"])
def test_nothing_of_an_engine_is_left(how: str, tmp_path: Path) -> None:
    abort_file = tmp_path / "abort"
    command = [sys.executable, "-c", ENGINE, how, WORKER, str(abort_file)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    worker, *names = engine.stdout.readline().split()
    paths = [Path("/dev/shm") / name for name in names]
    assert len(paths) == 2
    engine.wait(timeout=LIMIT_S)
    wait_until(lambda: has_ended(int(worker)) and not abort_file.exists())
    if how == "killed while it starts":  # what a worker has in shared memory by then, nobody has asked
        for path in paths:
            path.unlink()
        return
    wait_until(lambda: not any(path.exists() for path in paths))
    later = psutil.Process(int(engine.stdout.readline()))
    assert later.is_running()  # it does not belong to the engine
    later.kill()
