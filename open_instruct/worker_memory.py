"""Files in shared memory that the worker processes of a tensor-parallel engine use, removed however the engine ends.

vLLM 0.32 ends its CPU workers without removing theirs, and an engine that is killed removes nothing at all. So a small process
stands by: it waits until the engine's end of a pipe closes, which the kernel sees to, and removes the files then.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem.mp-"
"""What the names of Python's own begin with."""
_STAND_BY = """
import os, sys
sys.stdin.buffer.read()
for path in sys.argv[1:]:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


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


def remove_when_this_process_ends(files: set[Path]) -> subprocess.Popen:
    """The process that stands by. It outlives signals to this one's process group."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _STAND_BY, *map(str, files)], stdin=subprocess.PIPE, start_new_session=True
    )
