"""What an engine leaves behind is cleaned up however the engine ends: its processes, and their files in shared memory.

An engine core in a process of its own outlives an actor that was killed from outside, and holds its GPU memory, so that a
replacement finds no room. vLLM 0.32 ends its CPU workers without removing their files, and an engine that is killed removes
nothing at all. So a small process stands by: it waits until the engine's end of a pipe closes, which the kernel sees to.
"""

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem.mp-"
"""What the names of Python's own begin with."""
_STAND_BY = """
import os, signal, sys
processes = []
for pid in sys.argv[1].split():
    try:
        processes.append(os.pidfd_open(int(pid)))  # the number may belong to somebody else by then
    except ProcessLookupError:
        pass
print("standing by", flush=True)
sys.stdin.buffer.read()
for process in processes:
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
for path in sys.argv[2:]:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


def child_processes() -> set[int]:
    """Process ids of everything below this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def files_of_workers() -> set[Path]:
    """Files that child processes of this one have mapped, found by their inodes: whoever makes a semaphore has mapped a file that
    was renamed since. Semaphores of this process are meant too."""
    mine = psutil.Process()
    of_workers = {inode for worker in mine.children(recursive=True) for inode in _mapped(worker.pid)}
    own = _mapped(mine.pid)
    return {
        Path(file.path)
        for file in os.scandir(SHARED_MEMORY)
        if file.inode() in of_workers or (file.inode() in own and file.name.startswith(SEMAPHORE))
    }


def _mapped(pid: int) -> set[int]:
    """Inodes of files in shared memory; none of a process that has just ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in maps if str(SHARED_MEMORY) in line}


def clean_up_when_this_process_ends(processes: Collection[int], files: set[Path]) -> subprocess.Popen | None:
    """The process that stands by to kill `processes`, and to remove `files` and those that the processes have in shared memory.

    It outlives signals to this one's process group. None where there are no processes: then there is nothing to clean up.
    """
    if not processes:
        return None
    files = files | files_of_workers()
    stands_by = subprocess.Popen(
        [sys.executable, "-S", "-c", _STAND_BY, " ".join(map(str, processes)), *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert stands_by.stdout is not None
    stands_by.stdout.readline()  # from here on it knows the processes themselves, not their numbers
    return stands_by
