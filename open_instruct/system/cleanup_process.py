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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

START_S = 30.0
ENGINE_MARK = "OPEN_INSTRUCT_STARTED_BY"
"""Variable in the environment of all processes that are started while an engine is created. A process with this name in its
command line is a cleanup process of an engine."""
_CLEANUP = f"""
import json, os, signal, sys, time

def open_process(pid):
    try:
        return os.pidfd_open(pid)  # unlike the number, it never comes to mean another process
    except ProcessLookupError:
        return None

def content(pid, name):
    try:
        with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
            return file.read()
    except OSError:
        return b""

def is_in_exec(pid):
    try:
        return bool(os.readlink(f"/proc/{{pid}}/exe"))
    except OSError:
        return False

def look():
    found, in_exec = [], False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        process = open_process(int(pid))
        if process is None:
            continue
        command = content(pid, "cmdline")
        in_exec = in_exec or not command and is_in_exec(pid)  # whose it is cannot be known yet
        cleans_up = b"{ENGINE_MARK}" in command
        if mark in content(pid, "environ").split(bytes(1)) and not cleans_up and int(pid) != os.getpid():
            found.append(process)
        else:
            os.close(process)
    return found, in_exec

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
processes = []
if line := sys.stdin.readline():  # else the starter ended before it could say what it had started
    known = json.loads(line)
    files += known["files"]
    processes = [process for process in map(open_process, known["processes"]) if process is not None]
    print("they are known", flush=True)
    sys.stdin.read()
kill(processes)
for _ in range(200):
    found, in_exec = look()
    if not found and not in_exec:
        break
    kill(found)
    time.sleep(0.05)
for path in files:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
"""


class CleanupProcess:
    """Once this process has ended, kills all processes with `mark` (`NAME=value`) in their environment, and removes `files`."""

    def __init__(self, mark: str, files: Iterable[Path] = ()) -> None:
        command = [sys.executable, "-S", "-c", _CLEANUP, mark, *map(str, files)]
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
