"""Directories that are either complete or absent, even after a power loss: checkpoints of a run's state, and saved models.

    learners, controller ─► .step_000200.partial/…      each writer puts its own files on the disk (`sync_to_disk`)
    driver               ─► run_state.json, last          names and sizes (in bytes) of all the files
                            sync everything, rename, sync the parent directory

A directory that replaces another takes the other's name in one system call (`renameat2`). On a file system without that call, two
renames are needed. If a kill comes between the two, the next reader or writer repairs the names (`put_back`).

A checkpoint is whole if `run_state.json` can be read and every file that it lists exists with the listed size. A checkpoint that
is not whole (torn by the crash of a machine, or copied in part) is skipped, and a run resumes from the newest whole checkpoint.
"""

import ctypes
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.storage.output_directory import describe

logger = logging.getLogger(__name__)

STATE_FILE = "run_state.json"
SEEN_S = 30.0
"""How long a file from another node may take to be visible here. Network file systems cache directories."""
POLL_S = 0.2
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_PREFIX = "step_"
_NAME = re.compile(rf"{_PREFIX}([0-9]{{6}}|[1-9][0-9]{{6,}})")
_FILES = "files"
"""Key of the state file: size in bytes of each file of the checkpoint, by path within the checkpoint."""
_FORMAT = "format"
"""Key of the state file: the version of the checkpoint's format."""
FORMAT = 2
"""Raise this number when this program can no longer read older checkpoints, or older programs can no longer read new ones."""
LEARNER_DIRECTORY = "deepspeed"
"""DeepSpeed's directory within a checkpoint."""
_OF_LEARNERS = re.compile(rf"{LEARNER_DIRECTORY}/|(?:random_state|reference)_\d+\.pt$|latest$|zero_to_\w+\.py$")
_OF_ONE_RANK = re.compile(r"(?:zero_pp_rank_|random_state_|reference_)(\d+)")
"""Files that each learner writes for itself, by DeepSpeed's names and ours; rank 0 writes the others."""


class StorageNotShared(Exception):
    """The driver does not see a file that a learner has written, so no run could resume from such a checkpoint."""


class NoWholeCheckpoint(Exception):
    """There are checkpoints, but this program cannot resume from any of them; the text says why."""


def sync_to_disk(paths: Iterable[Path]) -> None:
    """Write this machine's cached data of these files and directories to the disk (fsync), whichever process wrote the files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network file systems cannot fsync a directory
            if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
                raise
        finally:
            os.close(descriptor)


def sync_files_of_rank(directory: Path, rank: int) -> dict[str, int]:
    """Sync the files that learner `rank` has written into a checkpoint; returns their sizes in bytes, by path within `directory`.

    Every learner does this on its own node, because the driver's machine cannot write out the caches of another machine.
    """
    sizes = {name: num_bytes for name, num_bytes in files_in(directory).items() if _rank_of_writer(name) == rank}
    sync_to_disk(directory / name for name in sizes)
    sync_to_disk({(directory / name).parent for name in sizes})
    return sizes


def _rank_of_writer(name: str) -> int | None:
    """The learner that writes this file of a checkpoint; None for a file that no learner writes."""
    if not _OF_LEARNERS.match(name):
        return None
    match = _OF_ONE_RANK.search(name)
    return int(match[1]) if match else 0


def files_in(directory: Path) -> dict[str, int]:
    """Sizes in bytes of all files under a directory, by path within it. Other processes may be writing there."""
    sizes = {}
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):  # renamed in between
            if path.is_file():
                sizes[str(path.relative_to(directory))] = path.stat().st_size
    return sizes


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yields a directory to write into, which replaces `directory` when the block ends without an error.

    Its whole content is on the disk before it gets its name, so after a power loss or a kill either the old directory or the new
    directory exists. On a file system that cannot exchange two names, the old directory may need `put_back` first.
    """
    beside, aside = directory.with_name(f".{directory.name}.partial"), _aside(directory)
    put_back(directory)
    for path in (beside, aside):
        shutil.rmtree(path, ignore_errors=True)  # left by a kill
    try:
        beside.mkdir(parents=True)
        yield beside
        sync_to_disk([*beside.rglob("*"), beside])
        _take_name(directory, beside)
    except BaseException:
        put_back(directory)
        shutil.rmtree(beside, ignore_errors=True)  # on a full disk it would take space that other files need
        raise
    sync_to_disk([directory.parent])
    for path in (beside, aside):
        shutil.rmtree(path, ignore_errors=True)


def put_back(directory: Path) -> None:
    """Give a directory its name again if its writer was killed between the two renames that replace it."""
    if directory.exists() or not _aside(directory).exists():
        return
    try:
        _aside(directory).rename(directory)
    except OSError as error:  # another process has just put it back, or replaced it
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _take_name(directory: Path, beside: Path) -> None:
    """Give `beside` the name `directory`. A directory that had this name is then called `beside` or `_aside(directory)`."""
    if not directory.exists():
        beside.rename(directory)
    elif not _exchange(directory, beside):
        directory.rename(_aside(directory))
        beside.rename(directory)


def _exchange(directory: Path, other: Path) -> bool:
    """Exchange the names of two directories at once. False if the C library, the kernel or the file system (NFS) cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(directory), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint from which a run can resume."""

    path: Path
    state: dict[str, Any]
    """The state that `save` was given."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are not whole, each with its path and what is wrong with it."""

    @property
    def training_step(self) -> int:
        """The training step in the directory's name."""
        return int(self.path.name.removeprefix(_PREFIX))


class CheckpointStore:
    """Checkpoints by training step under one directory, the newest `keep_last` of them (-1: all)."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self._directory = directory.absolute()  # learners on other nodes may have another current directory
        self._keep_last = keep_last

    def steps(self) -> list[int]:
        """Training steps that have a checkpoint, in order. Some of the checkpoints may be torn."""
        for path in self._set_aside():
            put_back(path)
        matches = (_NAME.fullmatch(path.parent.name) for path in self._directory.glob(f"{_PREFIX}*/{STATE_FILE}"))
        return sorted(int(match[1]) for match in matches if match)

    def path(self, training_step: int) -> Path:
        return self._directory / f"{_PREFIX}{training_step:06d}"

    def remove_partial(self) -> None:
        """Remove checkpoints that a killed run wrote only in part or had replaced. On a full disk they would take the space of
        the next checkpoint."""
        for path in self._directory.glob(f".{_PREFIX}*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._set_aside():
            put_back(path)
            shutil.rmtree(_aside(path), ignore_errors=True)

    def _set_aside(self) -> list[Path]:
        """Paths of checkpoints for which an older directory is set aside."""
        names = (path.name[1 : -len(".old")] for path in self._directory.glob(f".{_PREFIX}*.old"))
        return [self._directory / name for name in names if _NAME.fullmatch(name)]

    def has(self, training_step: int) -> bool:
        """Whether the checkpoint of this step exists and is whole."""
        put_back(self.path(training_step))
        return isinstance(_read_state(self.path(training_step)), dict)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there are no checkpoints.

        Raises:
            NoWholeCheckpoint: there are checkpoints, but all are torn or misnamed, or the newest whole one has another format.
        """
        torn: list[str] = []
        for step in reversed(self.steps()):
            state = _read_state(self.path(step))
            if isinstance(state, dict):
                version = state.pop(_FORMAT, 1)  # the first format had no number
                if type(version) is not int or version != FORMAT:  # True is 1
                    raise NoWholeCheckpoint(
                        f"{self.path(step)} is of format {version!r}, and this program reads {FORMAT}"
                    )
                return Checkpoint(self.path(step), state, tuple(torn))
            torn.append(f"{self.path(step)} ({state})")
        if torn:
            raise NoWholeCheckpoint(f"none of its checkpoints is whole: {'; '.join(torn)}")
        self._raise_if_misnamed()
        return None

    def _raise_if_misnamed(self) -> None:
        """Refuse `step_160` instead of `step_000160`, because a run that ignored it would start from the beginning."""
        for path in sorted(self._directory.glob(f"{_PREFIX}*/{STATE_FILE}")):
            if (number := path.parent.name.removeprefix(_PREFIX)).isdecimal():
                name = self.path(int(number)).name
                raise NoWholeCheckpoint(f"{path.parent} does not have the name of its checkpoint: {name}")

    def save(self, training_step: int, state: dict[str, Any], write: Callable[[Path], Mapping[str, int]]) -> Path:
        """Let `write` fill the checkpoint's directory, add `state` (JSON values), then drop the oldest checkpoints beyond
        `keep_last`.

        `write` returns the size in bytes of each file that other processes have written, by path within the directory.

        Raises:
            StorageNotShared: this process does not see all of those files.
        """
        path = self.path(training_step)
        with atomic_directory(path) as beside:
            _wait_until_seen(beside, write(beside))
            (beside / STATE_FILE).write_text(json.dumps({**state, _FORMAT: FORMAT, _FILES: files_in(beside)}))
        self._drop_oldest()
        return path

    def _drop_oldest(self) -> None:
        """Keep `keep_last` whole checkpoints. Torn checkpoints do not count, because a run cannot resume from them."""
        if self._keep_last <= 0:
            return
        num_kept = 0
        for step in reversed(self.steps()):
            if num_kept < self._keep_last:
                num_kept += self.has(step)
                continue
            shutil.rmtree(_aside(self.path(step)), ignore_errors=True)  # else it would be put back
            try:
                (self.path(step) / STATE_FILE).unlink()  # now it is no checkpoint, even if the removal is interrupted
                shutil.rmtree(self.path(step))
            except OSError as error:  # NFS keeps a file, and so its directory, while a process reads the file
                logger.warning("%s: the old checkpoint cannot be removed whole: %s", self.path(step), describe(error))


def _read_state(path: Path) -> dict[str, Any] | str:
    """The state of a whole checkpoint, or what is wrong with the checkpoint.

    A checkpoint whose state file lists no files counts as whole unless one of its files is empty.
    """
    try:
        content = json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"its {STATE_FILE} cannot be read: {error}"
    if not isinstance(content, dict):
        return f"its {STATE_FILE} holds no state"
    sizes = files_in(path)
    record = content.pop(_FILES, {name: max(num_bytes, 1) for name, num_bytes in sizes.items()})
    if not isinstance(record, dict):
        return f"its {STATE_FILE} does not list its files"
    if names := sorted(name for name in record if name not in sizes):
        return f"{_first_of(names)} missing"
    if names := sorted(name for name, num_bytes in record.items() if sizes[name] != num_bytes):
        name = names[0]
        return f"{name} has {sizes[name]} bytes instead of {record[name]}"
    return content


def _first_of(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files are"


def _wait_until_seen(directory: Path, sizes: Mapping[str, int]) -> None:
    deadline = time.monotonic() + SEEN_S
    while gaps := sorted(sizes.items() - files_in(directory).items()):
        if time.monotonic() > deadline:
            names = [name for name, _ in gaps]
            raise StorageNotShared(
                f"{_first_of(names)} not in {directory} on the driver's node, though a learner has written there. Checkpoints "
                f"need storage that all nodes share. Give such a directory with --output_dir or --checkpoint_state_dir."
            )
        time.sleep(POLL_S)
