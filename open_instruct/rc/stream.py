"""The `files` backend: every turn is a line of JSON, and the turns of a trajectory are adjacent and in order.

A trajectory is written in one piece when it is complete. So a reader that follows the file sees whole lines, and after a kill at
most the last trajectory is torn. `read_stream` skips a torn trajectory's line, `resume_stream` cuts the trajectory off.

Trajectories are in the order in which they were completed, which differs from run to run. The lines of one trajectory do not
differ: every byte depends only on the seed and on the servers' answers, and not on concurrency, retries or interruptions.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from open_instruct.workflows.rc.types import TrainingText, json_bytes

NUM_TURNS = "num_turns"
"""Key of a line, in addition to those of `TrainingText`: the number of turns of its trajectory."""


class EntryTooLarge(ValueError):
    """The line of a turn is longer than the stream allows."""


class StreamWriter:
    """Appends trajectories to a file. Only one process may write to the file."""

    def __init__(self, path: str | Path, *, max_entry_bytes: int) -> None:
        self.path = Path(path)
        self._max_entry_bytes = max_entry_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def write(self, trajectory: Sequence[TrainingText]) -> None:
        """Write all turns of one trajectory, or none of them.

        Raises:
            EntryTooLarge: the line of a turn is longer than `max_entry_bytes`.
        """
        lines = [json_bytes(turn.to_json() | {NUM_TURNS: len(trajectory)}) for turn in trajectory]
        longest = max(map(len, lines), default=0)
        if longest > self._max_entry_bytes:
            raise EntryTooLarge(
                f"a turn has {longest} bytes, and actor.shared_memory_entry_size allows {self._max_entry_bytes}"
            )
        rest = memoryview(b"".join(lines))
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:  # such as a full disk
            os.ftruncate(self._file.fileno(), end)
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_stream(path: str | Path) -> Iterator[TrainingText]:
    """The turns in a stream. A process may still be writing the stream, so a torn line is skipped."""
    for line in _lines(Path(path)):
        if line.turn is not None:
            yield line.turn


def read_trajectories(path: str | Path) -> Iterator[list[TrainingText]]:
    """The complete trajectories in a stream, turns in order."""
    for trajectory, _ in _complete(Path(path)):
        yield trajectory


class NotAStream(ValueError):
    """The file holds something other than whole trajectories and the torn beginning of one: another version or another program
    wrote it."""


def resume_stream(path: str | Path) -> Iterator[list[TrainingText]]:
    """The complete trajectories of an earlier run. At the end, a torn trajectory behind the last of them is cut off the file.

    Raises:
        NotAStream: the file holds something that a kill cannot leave. In this case nothing is cut.
    """
    path = Path(path)
    if not path.exists():
        return
    _check(path)
    end_of_last = 0
    for trajectory, end_of_last in _complete(path):  # noqa: B007 - the last value is used
        yield trajectory
    os.truncate(path, end_of_last)


def _check(path: Path) -> None:
    """Check that only the last trajectory is torn. A kill can cut it short, and a loss of power may leave zeros in its place.

    Raises:
        NotAStream: something else is wrong with the file.
    """
    trajectory, num_turns = ("", 0), 0
    for number, line in enumerate(_lines(path), start=1):
        if line.is_torn:
            return
        if line.turn is None:
            raise NotAStream(f"{path}: line {number} is no turn: the file is damaged, or another version wrote it")
        trajectory_of_line = line.turn.trajectory_id, line.num_turns
        if num_turns and trajectory_of_line != trajectory:
            raise NotAStream(
                f"{path}: line {number} begins another trajectory before the trajectory above it is complete: the file is "
                "damaged, or another version wrote it"
            )
        trajectory, num_turns = trajectory_of_line, num_turns + 1
        if num_turns == line.num_turns:
            num_turns = 0


@dataclass(frozen=True)
class _Line:
    turn: TrainingText | None
    num_turns: int
    end: int
    """Offset of the next line in the file."""
    is_torn: bool = False
    """Whether the line is only the beginning of a turn."""


_BEGINNING = b'{"text": "'
"""First bytes of the line of every turn."""


def _lines(path: Path) -> Iterator[_Line]:
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            yield _parse(line, end)


def _parse(line: bytes, end: int) -> _Line:
    if not line.endswith(b"\n"):
        beginning = line.rstrip(b"\0")[: len(_BEGINNING)]
        return _Line(None, 0, end, is_torn=_BEGINNING.startswith(beginning))
    try:
        values = json.loads(line)
        num_turns = values[NUM_TURNS]
        is_count = isinstance(num_turns, int) and num_turns > 0
        return _Line(TrainingText.from_json(values) if is_count else None, num_turns, end)
    except (ValueError, KeyError, TypeError, RecursionError):
        return _Line(None, 0, end)


def _complete(path: Path) -> Iterator[tuple[list[TrainingText], int]]:
    """Complete trajectories, each with the offset of its end in the file."""
    turns: list[TrainingText] = []
    for line in _lines(path):
        if line.turn is None:
            turns = []
            continue
        if turns and turns[0].trajectory_id != line.turn.trajectory_id:
            turns = []
        turns.append(line.turn)
        if len(turns) == line.num_turns:
            yield turns, line.end
            turns = []
