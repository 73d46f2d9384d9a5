"""Directories that are there whole or not at all: checkpoints of a run's state, and saved models."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATE_FILE = "run_state.json"
_PREFIX = "step_"


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """Write into the directory that this yields; it takes the place of `directory` when the block ends without an error."""
    beside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    aside = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if directory.exists():
        directory.rename(aside)
    beside.rename(directory)
    shutil.rmtree(aside, ignore_errors=True)


class CheckpointStore:
    """Checkpoints by training step under one directory, the newest `keep_last` of them (-1: all)."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def steps(self) -> list[int]:
        """Training steps with a complete checkpoint, in order."""
        names = (path.parent.name.removeprefix(_PREFIX) for path in self._directory.glob(f"{_PREFIX}*/{STATE_FILE}"))
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, training_step: int) -> Path:
        return self._directory / f"{_PREFIX}{training_step:06d}"

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Directory and state of the newest checkpoint."""
        if not (steps := self.steps()):
            return None
        path = self.path(steps[-1])
        return path, json.loads((path / STATE_FILE).read_text())

    def save(self, training_step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Let `write` fill the checkpoint's directory, add `state` (JSON values), then drop the oldest beyond `keep_last`."""
        path = self.path(training_step)
        with written_whole(path) as beside:
            write(beside)
            (beside / STATE_FILE).write_text(json.dumps(state))
        if self._keep_last > 0:
            for old in self.steps()[: -self._keep_last]:
                (self.path(old) / STATE_FILE).unlink()  # from here on it is no checkpoint, should the rest be cut short
                shutil.rmtree(self.path(old))
        return path


def different_options(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where the options of a checkpoint's run differ from those of now, for a message."""
    return [f"--{name} was {saved.get(name)!r}, now {now[name]!r}" for name in now if saved.get(name) != now[name]]
