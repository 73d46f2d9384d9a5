"""What an engine leaves behind is cleaned up however the engine ends: its processes, and their files in shared memory.

An engine core in a process of its own outlives an actor that was killed from outside, and holds its GPU memory, so that a
replacement finds no room. vLLM 0.32 ends its CPU workers without removing their files, and an engine that is killed removes
nothing at all. So a small process stands by: it waits until the engine's end of a pipe closes, which the kernel sees to.
"""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem.mp-"
"""What the names of Python's own begin with."""
START_S = 30.0
MARK = "OPEN_INSTRUCT_STARTED_BY"
"""In the environment of what is started while an engine is made."""
_STAND_BY = """
import json, os, signal, sys, time

def open_process(pid):
    try:
        return os.pidfd_open(pid)  # the number may belong to somebody else later
    except ProcessLookupError:
        return None

def marked():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        process = open_process(int(pid))
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_marked = mark in file.read().split(bytes(1))
        except OSError:
            continue
        if is_marked and int(pid) != os.getpid():
            yield process

def kill(processes):
    for process in processes:
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            pass

mark, files = sys.argv[1].encode(), sys.argv[2:]
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
line = sys.stdin.readline()
if line:
    known = json.loads(line)
    files += known["files"]
    processes = [process for process in map(open_process, known["processes"]) if process is not None]
    print("they are known", flush=True)
    sys.stdin.read()
    kill(processes)
else:  # it ended before it could say what it had started
    while processes := list(marked()):
        kill(processes)
        time.sleep(0.05)
for path in files:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


standing_by: list[subprocess.Popen] = []
"""One for each engine of this process that has processes of its own. Their pipes stay open for as long as this process lives."""


@contextmanager
def cleaned_up_when_this_process_ends(abort_file: Path) -> Iterator[None]:
    """Around the start of an engine: what the block starts is killed when this process ends, also when it ends in the block.

    `abort_file` is removed then, and the files that those processes have in shared memory when the block is through. The process
    that stands by outlives signals to this one's process group, and is nobody's child: Ray ends those of an actor that it kills.
    """
    not_of_the_engine = child_processes()
    os.environ[MARK] = uuid.uuid4().hex
    command = [sys.executable, "-S", "-c", _STAND_BY, f"{MARK}={os.environ[MARK]}", str(abort_file)]
    pipe = subprocess.PIPE
    stands_by = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    pid = int(_answer(stands_by))
    stands_by.wait(timeout=START_S)  # the one that was started has left its place to its child
    of_the_engine: set[int] = set()
    try:
        yield
        of_the_engine = child_processes() - not_of_the_engine
    finally:
        del os.environ[MARK]
        if not of_the_engine:  # nothing to clean up, or vLLM ends what it had begun to start
            os.kill(pid, signal.SIGKILL)
    if of_the_engine:
        _tell(stands_by, {"processes": sorted(of_the_engine), "files": [str(path) for path in files_of_workers()]})
        _answer(stands_by)
        standing_by.append(stands_by)


def _tell(stands_by: subprocess.Popen, known: dict[str, Any]) -> None:
    assert stands_by.stdin is not None
    stands_by.stdin.write(json.dumps(known) + "\n")
    stands_by.stdin.flush()


def _answer(stands_by: subprocess.Popen) -> str:
    assert stands_by.stdout is not None
    return stands_by.stdout.readline()


def child_processes() -> set[int]:
    """Process ids of everything below this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def files_of_workers() -> set[Path]:
    """Files that child processes of this one have mapped, found by their inodes: whoever makes a semaphore has mapped a file that
    was renamed since. Semaphores of this process are meant too."""
    mine = psutil.Process()
    of_workers = {inode for worker in mine.children(recursive=True) for inode in mapped(worker.pid)}
    own = mapped(mine.pid)
    return {
        Path(file.path)
        for file in os.scandir(SHARED_MEMORY)
        if file.inode() in of_workers or (file.inode() in own and file.name.startswith(SEMAPHORE))
    }


def mapped(pid: int) -> set[int]:
    """Inodes of files in shared memory; none of a process that has just ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in maps if str(SHARED_MEMORY) in line}
