"""Files in shared memory that the worker processes of a tensor-parallel engine use, removed however the engine ends.

vLLM 0.32 ends its CPU workers without removing theirs, and an engine that is killed removes nothing at all. So a small process
stands by: it waits until the engine's end of a pipe closes, which the kernel sees to, and removes the files then.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm"
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
    """What child processes of this one have mapped."""
    files: set[Path] = set()
    for worker in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            files.update(Path(area.path) for area in worker.memory_maps())
    return {path for path in files if path.is_relative_to(SHARED_MEMORY)}


def remove_when_this_process_ends(files: set[Path]) -> subprocess.Popen:
    """The process that stands by. It outlives signals to this one's process group."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _STAND_BY, *map(str, files)], stdin=subprocess.PIPE, start_new_session=True
    )
