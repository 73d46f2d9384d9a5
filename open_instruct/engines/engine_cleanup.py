"""Cleans up what an engine leaves behind, however the engine ends: its processes, and their files in shared memory.

An engine core in a process of its own outlives its actor when the actor is killed from outside. The core keeps its GPU memory, so
a replacement finds no room. vLLM 0.32 ends its CPU workers without removing their files, and an engine that is killed removes
nothing at all. So a small process stands by to clean up (`cleanup_process.py`).
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from open_instruct.system.cleanup_process import ENGINE_MARK, CleanupProcess

SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = "sem.mp-"
"""Prefix of the file names of Python's own semaphores."""
cleanup_processes: list[CleanupProcess] = []
"""One stand-by process for each engine here that has its own processes. Their pipes stay open as long as this process lives."""


@contextmanager
def cleaned_up_when_this_process_ends(abort_file: Path) -> Iterator[None]:
    """Put this around the start of an engine. Processes that the block starts are killed when this process ends, even if it ends
    inside the block.

    `abort_file` is then removed too, and so are the files that those processes had in shared memory at the end of the block.
    """
    pids_before = child_processes()
    os.environ[ENGINE_MARK] = uuid.uuid4().hex
    cleanup = CleanupProcess(f"{ENGINE_MARK}={os.environ[ENGINE_MARK]}", [abort_file])
    pids: set[int] = set()
    try:
        yield
        pids = child_processes() - pids_before
    finally:
        del os.environ[ENGINE_MARK]
        if not pids:  # nothing to clean up, or vLLM itself ends the processes that it had started
            cleanup.dismiss()
    if pids:
        cleanup.tell(pids, files_of_workers())
        cleanup_processes.append(cleanup)


def child_processes() -> set[int]:
    """Process ids of all descendants of this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def files_of_workers() -> set[Path]:
    """Files in shared memory that child processes of this process have mapped, and the semaphores of this process.

    Files are found by their inodes, because a process that makes a semaphore maps a file that is renamed afterwards.
    """
    process = psutil.Process()
    worker_inodes = {inode for worker in process.children(recursive=True) for inode in mapped(worker.pid)}
    own_inodes = mapped(process.pid)
    return {
        Path(file.path)
        for file in os.scandir(SHARED_MEMORY)
        if file.inode() in worker_inodes or (file.inode() in own_inodes and file.name.startswith(SEMAPHORE))
    }


def mapped(pid: int) -> set[int]:
    """Inodes of the files in shared memory that a process has mapped; none if the process has just ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in maps if str(SHARED_MEMORY) in line}
