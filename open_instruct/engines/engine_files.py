"""Each engine has its own directory for vLLM's temporary files (mostly sockets). The directory is removed when the engine ends.

An engine that is killed cannot remove its directory. The next engine on the node does; a lock shows which engines are dead.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

RPC_DIRECTORY = "VLLM_RPC_BASE_PATH"
"""The variable that says where vLLM puts its sockets. vLLM never removes them."""
PREFIX = "open_instruct-engine-"
LONGEST_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Longest path of a directory in which vLLM can make a socket: the kernel takes at most 107 bytes for the socket's path."""
_LOCK = "lock"
_files: "list[EngineFiles]" = []


class EngineFiles:
    """The directory of one engine, for as long as this process lives; `path` is None if it would be too long for a socket."""

    def __init__(self) -> None:
        remove_those_of_the_dead()
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.path: Path | None = directory
        self._lock: int | None = None
        if len(os.fsencode(directory)) > LONGEST_PATH:
            directory.rmdir()
            self.path = None
            return
        new = directory / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)  # children do not hold the lock
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(directory / _LOCK)  # an engine that starts at this moment finds no lock, or a held one
        _files.append(self)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that make vLLM put its sockets into the directory."""
        return {} if self.path is None else {RPC_DIRECTORY: str(self.path)}

    @contextlib.contextmanager
    def take_temporary_files(self) -> Iterator[None]:
        """Put this around the start of an engine in this process, so that its temporary files go into the directory too."""
        if self.path is None:
            yield
            return
        os.environ |= self.env
        # Code that torch has compiled stays where other engines find it.
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
        )
        before, tempfile.tempdir = tempfile.tempdir, str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = before

    def remove(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_own_files() -> None:
    """Remove the directories that this process has made."""
    while _files:
        _files.pop().remove()


def remove_those_of_the_dead() -> None:
    """Remove the directories of engines whose process has ended. Such a process no longer holds its lock."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:  # the directory is just being made, was removed by another process, or belongs to another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its engine lives
        finally:
            os.close(lock)
