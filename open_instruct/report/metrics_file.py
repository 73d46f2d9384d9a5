"""`metrics.jsonl`: one row per step. The file is part of a run's state, and a resumed run continues it.

The row of a step is written when the step is over. The evaluation of a step ends later; then its metrics are added to the row.
"""

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from open_instruct.storage.atomic_file import _replaced

logger = logging.getLogger(__name__)

STEP_KEY = "training_step"
COMPLETIONS = "sample_completions"
"""Key of an evaluation's answers, which are reported in addition to its metrics; open-instruct's name of the table in wandb."""
TAIL_BYTES = 1 << 16
"""Bytes at the end of a file in which the last row is looked for first."""
_ROW_START = re.compile(rb'\{"training_step": (\d+)[,}]')
"""Beginning of a row as `MetricsWriter` writes it."""


def to_json_value(value: Any) -> Any:
    """`value` as a JSON value: numpy and torch scalars and arrays become Python values, and numbers that are not finite become
    None."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json_value(value.tolist())
    return str(value)


class MetricsWriter:
    """Writes one line, a JSON object, per training step. When `write` or `add` returns, the operating system has the line.

    Every line is strict JSON: a metric that is not finite is written as null, with one warning per metric.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._warned: set[str] = set()
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        # Unbuffered, so that a line is one write, and a kill between two writes tears no line.
        return open(self.path, "ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of training step `step`: `training_step` and `metrics`."""
        self._append(_line_of({STEP_KEY: step, **self._json_values(step, metrics)}))

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of `step` if that is the last row of the file. Otherwise append a row.

        If the process is killed in this call, the row is as it was before, or has all of the metrics. A reader may see a torn
        line behind the row, for a moment.
        """
        offset, line = self._last_line()
        row = _parse_row(line)
        if row is None or row[STEP_KEY] != step:
            self.write(step, metrics)
            return
        values = self._json_values(step, metrics)
        update = _line_of({key: value for key, value in row.items() if key not in values} | values, len(line))
        start = next((at for at, (old, new) in enumerate(zip(line, update, strict=False)) if old != new), len(line))
        with open(self.path, "r+b", buffering=0) as file:
            # First what is behind the old end, because the old row is whole until the few bytes before its end change.
            try:
                _write_at(file, offset + len(line), update[len(line) :])
                _write_at(file, offset + start, update[start : len(line)])
            except OSError:
                _write_at(file, offset + start, line[start:])
                os.ftruncate(file.fileno(), offset + len(line))
                raise

    def last_row(self) -> dict[str, Any] | None:
        """The last row of the file, if there is one."""
        return _parse_row(self._last_line()[1])

    def _last_line(self) -> tuple[int, bytes]:
        """Where the last line begins, and the line."""
        with open(self.path, "rb") as file:
            end, size = file.seek(0, os.SEEK_END), TAIL_BYTES
            while True:
                begins = file.seek(max(0, end - size))
                tail = file.read(end - begins)
                before = tail.rfind(b"\n", 0, max(0, len(tail) - 1))
                if before >= 0 or begins == 0:
                    return begins + before + 1, tail[before + 1 :]
                size *= 4

    def _json_values(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        values = to_json_value(metrics)
        not_finite = {key for key, value in values.items() if value is None and metrics.get(key) is not None}
        for key in sorted(not_finite - self._warned):
            self._warned.add(key)
            logger.warning("metric %s is not finite at step %d; written as null", key, step)
        return values

    def _append(self, line: bytes) -> None:
        """Append the whole line or nothing. A full disk may take only a part of the line, and a torn row would remain."""
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), end)
            raise

    def sync(self) -> None:
        """Put all rows on the disk."""
        os.fsync(self._file.fileno())

    def truncate_after(self, step: int) -> int:
        """Cut the rows after training step `step`, and a last line that a kill has torn; returns the number of lines cut.

        A run that resumes from the checkpoint of `step` calls this, because it will write the later steps again. The file is read
        line by line, because the file of a long run may be larger than the memory.
        """
        num_cut = num_kept_behind = first_cut = at = 0
        with open(self.path, "rb") as file:
            for line in file:
                if _is_of(line, step):
                    num_kept_behind += num_cut > 0
                else:
                    first_cut = first_cut if num_cut else at
                    num_cut += 1
                at += len(line)
        if num_kept_behind:
            self._rewrite(step)
        elif num_cut:  # the lines to cut are at the end of the file, as in every file that a run has written
            self._file.truncate(first_cut)
            os.fsync(self._file.fileno())
        return num_cut

    def _rewrite(self, step: int) -> None:
        """Keep the rows up to `step`, wherever they are in the file."""
        self._file.close()
        with open(self.path, "rb") as file, _replaced(self.path) as beside:
            beside.writelines(line for line in file if _is_of(line, step))
        self._file = self._open()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line_of(row: Mapping[str, Any], least_bytes: int = 0) -> bytes:
    """A row as a line of JSON, with spaces at its end if it would be shorter than `least_bytes`."""
    return json.dumps(row, allow_nan=False).encode().ljust(least_bytes - 1) + b"\n"


def _write_at(file: IO[bytes], offset: int, part: bytes) -> None:
    """Write the whole part, which a full disk may divide."""
    rest = memoryview(part)
    file.seek(offset)
    while rest:
        rest = rest[file.write(rest) :]


def _is_of(line: bytes, step: int) -> bool:
    """Whether a line is the row of this step or of an earlier step."""
    if line.endswith(b"}\n") and (start := _ROW_START.match(line)):  # parsing 0.7 GB would take 15 seconds
        return int(start[1]) <= step
    row = _parse_row(line)
    return row is not None and row[STEP_KEY] <= step


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and STEP_KEY in row else None


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as lines of JSON. The file is written as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replaced(path) as file:
        file.writelines(
            json.dumps(to_json_value(row), ensure_ascii=False).encode(errors="replace") + b"\n" for row in rows
        )


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]], *, begins_anew: bool) -> None:
    """Append rows as lines of JSON, or begin the file with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(to_json_value(row), ensure_ascii=False) + "\n" for row in rows)
    with open(path, "wb" if begins_anew else "ab", buffering=0) as file:
        file.write(text.encode(errors="replace"))


def newest_rows(path: str | Path, number: int) -> list[dict[str, Any]]:
    """The last so many rows of a `metrics.jsonl`, oldest first. Earlier lines are not parsed, because that takes long."""
    with open(path, "rb") as file:
        rows = map(_parse_row, deque(file, maxlen=number))
        return [row for row in rows if row is not None]


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`. A run may still be writing the file, so a torn line is skipped."""
    with open(path, "rb") as file:
        for line in file:
            if (row := _parse_row(line)) is not None:
                yield row
