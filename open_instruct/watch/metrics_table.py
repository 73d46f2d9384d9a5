"""The numbers of `metrics.jsonl`, by metric and step. Reads what was added since the last call."""

import json
import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from open_instruct.report.metrics_file import STEP_KEY

HEAD_BYTES = 4096
"""Bytes of the last row by which a row is recognised that an evaluation has added to."""


@dataclass(frozen=True)
class MetricsTable:
    """Columns of numbers as they were at one moment, one value a row; NaN where a row has no such number. Histograms and texts
    are left out. Nobody changes it, so several threads may read it."""

    steps: list[int] = field(default_factory=list)
    columns: Mapping[str, array] = field(default_factory=dict)
    texts: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    """Alerts by step."""
    exists: bool = False
    """Whether the file was there."""

    def column(self, name: str) -> array:
        """One value for each of `steps`. Raises `KeyError` if no row has such a number."""
        return self.columns[name]

    def names(self) -> Sequence[str]:
        """Metrics that are numbers, in the order in which they appeared."""
        return list(self.columns)

    def value(self, name: str, step: int) -> float | None:
        """The metric at a step; None if it is not known."""
        column = self.columns.get(name)
        if column is None or step not in self.steps:
            return None
        value = column[self.steps.index(step)]
        return None if math.isnan(value) else value


class MetricsFile:
    """Follows a `metrics.jsonl`. Several threads may read it: each gets a table of its own moment.

    A running process adds rows, an evaluation changes the last row, and a resumed run cuts rows and writes them again: then the
    file is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._last_row_at = 0
        self._head = b""
        self._steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self._texts: dict[int, dict[str, Any]] = {}
        self._table = MetricsTable()

    def table(self) -> MetricsTable:
        """What is in the file now. Where the file is no longer there, what was in it before."""
        with self._lock:
            try:
                status = self._path.stat()
            except OSError:
                return replace(self._table, exists=False)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                is_same_file = self._stamp is not None and stamp[0] == self._stamp[0]
                self._read(is_same_file)
                self._stamp = stamp
                columns = {name: column[:] for name, column in self._columns.items()}
                self._table = MetricsTable(self._steps[:], columns, dict(self._texts), exists=True)
            return self._table

    def _read(self, is_same_file: bool) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._last_row_at)
            if not is_same_file or not self._goes_on(file.read(len(self._head))):
                self._steps, self._columns, self._texts, self._last_row_at = [], {}, {}, 0
            else:
                self._drop_last()
            file.seek(self._last_row_at)
            at = self._last_row_at
            for line in file:
                if line.endswith(b"\n") and (row := _row_of(line)) is not None:
                    self._add(row)
                    self._last_row_at, self._head = at, line[:HEAD_BYTES]
                at += len(line)

    def _goes_on(self, head: bytes) -> bool:
        """Whether the last row that was read is where it was. The evaluation of a step is added to its end."""
        before_end = self._head.removesuffix(b"}\n").rstrip()
        return bool(self._head) and head.startswith(before_end)

    def _drop_last(self) -> None:
        self._steps.pop()
        for column in self._columns.values():
            column.pop()

    def _add(self, row: dict[str, Any]) -> None:
        step = row[STEP_KEY]
        num_before = len(self._steps)
        self._steps.append(step)
        for name, value in row.items():
            if isinstance(value, int | float):
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan] * num_before)
                self._columns[name].append(value)
        for column in self._columns.values():
            if len(column) == num_before:
                column.append(math.nan)
        if alerts := row.get("alerts"):
            self._texts[step] = alerts


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get(STEP_KEY), int) else None
