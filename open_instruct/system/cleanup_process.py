"""A small process that cleans up after the process that started it has ended, for whatever reason.

A process that is killed cannot clean up after itself. So it starts a cleanup process, which waits until the kernel closes the
other end of a pipe; that happens when its starter ends. Signals to the starter's process group do not reach the cleanup process.
The cleanup process is not a child of its starter either, because Ray ends the children of an actor that it kills.

    driver ── pipe ──► cleanup ── kills Ray's agents, which stay for a minute, and all other processes of the run on this node
    engine ── pipe ──► cleanup ── kills the engine's processes, which hold GPU memory, and removes their files in shared memory
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from open_instruct.system.processes import is_in_exec, words_of

START_S = 30.0
LOOKS = 200
"""How often the cleanup process looks for processes at most. A process that is being started is known later."""
ENGINE_MARK = "OPEN_INSTRUCT_STARTED_BY"
"""Variable in the environment of all processes that are started while an engine is created. A process with this name in its
command line is a cleanup process of an engine."""


class CleanupProcess:
    """Once this process has ended, kills all processes with `mark` (`NAME=value`) in their environment, and removes `files`."""

    def __init__(self, mark: str, files: Iterable[Path] = ()) -> None:
        command = [*words_of(clean_up), mark, *map(str, files)]
        pipe = subprocess.PIPE
        self._started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        self.pid = int(self._answer())
        self._started.wait(timeout=START_S)  # the started process has forked the cleanup process, and ends

    def tell(self, processes: Iterable[int], files: Iterable[Path] = ()) -> None:
        """Have these processes killed and these files removed too."""
        assert self._started.stdin is not None
        words = {"processes": sorted(processes), "files": [str(path) for path in files]}
        self._started.stdin.write(json.dumps(words) + "\n")
        self._started.stdin.flush()
        self._answer()

    def dismiss(self) -> None:
        """End the cleanup process, because there is nothing to clean up any more."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _answer(self) -> str:
        assert self._started.stdout is not None
        return self._started.stdout.readline()


def clean_up() -> None:
    """Run as a cleanup process."""
    mark, files = sys.argv[1].encode(), sys.argv[2:]
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    if line := sys.stdin.readline():  # else the starter ended before it could say what it had started
        message = json.loads(line)
        files += message["files"]
        processes = [process for process in map(_open_process, message["processes"]) if process is not None]
        print("they are known", flush=True)
        sys.stdin.read()
        _kill(processes)
    for _ in range(LOOKS):
        processes, has_unknown = _marked(mark)
        if not processes and not has_unknown:
            break
        _kill(processes)
        time.sleep(0.05)
    for path in files:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _open_process(pid: int) -> int | None:
    """A file descriptor of the process (pidfd), which unlike its number never comes to mean another process."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def _marked(mark: bytes) -> tuple[list[int], bool]:
    """Descriptors of the processes with this mark, and whether there is a process that cannot be known yet."""
    processes, has_unknown = [], False
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        process = _open_process(pid)
        if process is None:
            continue
        command = _content(pid, "cmdline")
        has_unknown = has_unknown or (not command and is_in_exec(Path(f"/proc/{pid}")))
        cleans_up = ENGINE_MARK.encode() in command
        if mark in _content(pid, "environ").split(b"\0") and not cleans_up and pid != os.getpid():
            processes.append(process)
        else:
            os.close(process)
    return processes, has_unknown


def _content(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
