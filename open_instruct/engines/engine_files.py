"""What vLLM puts into the directory of temporary files, sockets above all, lies in a directory of the engine, which goes with it.

An engine that is killed cannot remove its directory. The next engine on the node does, and knows by a lock who is dead.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

RPC_DIRECTORY = "VLLM_RPC_BASE_PATH"
"""The variable that says where vLLM puts its sockets, which it never removes."""
PREFIX = "open_instruct-engine-"
LONGEST_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Longest path of a directory in which vLLM can make a socket: 107 bytes are what the kernel takes."""
_LOCK = "lock"
_of_this_process: "list[EngineFiles]" = []


class EngineFiles:
    """The directory of one engine, as long as this process lives; `path` is None where it would be too long for a socket."""

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
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)  # children do not hold it
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(directory / _LOCK)  # an engine that starts at this moment finds no lock, or a held one
        _of_this_process.append(self)

    @property
    def env(self) -> dict[str, str]:
        """Variables with which vLLM puts its sockets there."""
        return {} if self.path is None else {RPC_DIRECTORY: str(self.path)}

    @contextlib.contextmanager
    def take_temporary_files(self) -> Iterator[None]:
        """To put around the start of an engine in this process: its temporary files go into the directory too."""
        if self.path is None:
            yield
            return
        os.environ |= self.env
        # What torch has compiled stays where other engines find it.
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
    while _of_this_process:
        _of_this_process.pop().remove()


def remove_those_of_the_dead() -> None:
    """Remove the directories of engines whose process has ended, and with it the lock that it held."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:  # just being made, removed by somebody else, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # its engine lives
        finally:
            os.close(lock)
