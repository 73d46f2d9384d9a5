"""Checks that a run can write to its output directory, and that no other run uses the directory.

The lock is a POSIX record lock on the file `.in_use`. The kernel releases the lock when the process ends, however it ends. On a
network file system the lock holds on all nodes. A forked child does not inherit the lock. The file says which process holds it.
"""

import errno
import fcntl
import getpass
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOCK_FILE = ".in_use"
NEEDED_BYTES = 16 * 2**20
"""Bytes that must be free at the start. A checkpoint needs far more, but its size is not known at that time."""
STORAGE_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.ESTALE)
)


class UnusableDirectory(Exception):
    """A run cannot use this directory; the text says why and what to do."""


@contextmanager
def held(directories: Sequence[Path], option: str) -> Iterator[None]:
    """Make these directories and keep other runs out of them until the block or the process ends.

    `option` is the name of the option in messages.

    Raises:
        UnusableDirectory: a directory cannot be created or written, or another run uses it.
    """
    with ExitStack() as locks:
        for directory in dict.fromkeys(path.absolute() for path in directories):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                _check_room(directory)
                lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except (OSError, ValueError) as error:  # ValueError: a NUL in the path
                raise UnusableDirectory(f"{option} {directory}: {describe(error)}. Give another directory.") from error
            locks.callback(os.close, lock)
            _take(lock, directory, option)
        yield


def _check_room(directory: Path) -> None:
    """Raises `OSError` if `NEEDED_BYTES` cannot be written."""
    probe = directory / f".room.{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, NEEDED_BYTES)
    finally:
        with suppress(OSError):
            probe.unlink()


def _take(lock: int, directory: Path, option: str) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s cannot be locked (%s): see to it that no other run uses it", directory, describe(error))
            return
        raise UnusableDirectory(
            f"{option} {directory}: another run is in it ({_owner(lock)}). Wait for its end, stop it, or give another directory."
        ) from error
    about = {"host": socket.gethostname(), "process": os.getpid(), "user": _user(), "since": time.strftime("%F %T")}
    with suppress(OSError):  # the disk may be full by now; the lock works without this text
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(about).encode() + b"\n", 0)


def _owner(lock: int) -> str:
    try:
        about: dict[str, Any] = json.loads(os.pread(lock, 4096, 0))
        return f"process {about['process']} of {about['user']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{LOCK_FILE} does not say which"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container a user may have no name
        return f"user {os.getuid()}"


@contextmanager
def names_a_full_disk(directory: Path) -> Iterator[None]:
    """Turn an error in the block into an `OSError` for a full disk, because torch raises its own errors when a disk is full.

    Raises:
        OSError: ENOSPC, if fewer than `NEEDED_BYTES` are free in `directory` after an error in the block.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        num_free = shutil.disk_usage(directory).free if directory.exists() else NEEDED_BYTES
        if is_of_storage(error) or num_free >= NEEDED_BYTES:
            raise
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {num_free / 2**20:.0f} MiB are free", str(directory)
        ) from error


def describe(error: BaseException) -> str:
    """The text of a file system error, with its path."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    where = f" ({error.filename})" if error.filename is not None else ""
    return f"{os.strerror(error.errno)}{where}"


def is_of_storage(error: BaseException) -> bool:
    """Whether the disk is full, gone, or not writable. A traceback would not help to explain such an error."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS
