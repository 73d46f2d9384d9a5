"""What the driver writes into the record: starts and ends of the run, and events. One line of JSON each, appended as a whole."""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from open_instruct.record.places import RecordPlaces
from open_instruct.system.secret_masking import masked

logger = logging.getLogger(__name__)

START = "start"
END = "end"
LONGEST_WARNING = 2000
"""Characters of a warning that the record holds."""


class Journal:
    """Appends to `starts.jsonl` and `events.jsonl`. A failure ends the journal with one warning, and never the run.

    Every line has `kind`, `unix` (seconds, for people) and `monotonic` (seconds of a clock that is never set, to measure with; it
    is comparable within one start of the run).
    """

    def __init__(self, directory: Path, *, is_on: bool = True) -> None:
        self._places = RecordPlaces(directory)
        self._is_on = is_on
        self._start = 0
        self._has_ended = False

    def start(self, **fields: Any) -> None:
        """The run starts, or goes on after a checkpoint."""
        with contextlib.suppress(OSError):
            self._start = self._places.num_starts() + 1
        about = {"number": self._start, "host": socket.gethostname(), "process": os.getpid()}
        self._append(self._places.starts, START, {**about, **fields})

    def end(self, reason: str, exit_code: int) -> None:
        """The run ends; only the first call counts. A run that was killed has no such line."""
        if self._has_ended:
            return
        self._has_ended = True
        self._append(self._places.starts, END, {"number": self._start, "reason": reason, "exit_code": exit_code})

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened at this moment."""
        self._append(self._places.events, kind, {"start": self._start, **fields})

    @contextlib.contextmanager
    def span(self, kind: str, **fields: Any) -> Iterator[None]:
        """Something happens in this block. The line is written at its end, with `began` (Unix time) and `seconds`."""
        began, clock = time.time(), time.monotonic()
        try:
            yield
        except BaseException as error:
            fields["error"] = type(error).__name__
            raise
        finally:
            self.event(kind, began=began, seconds=time.monotonic() - clock, **fields)

    def _append(self, path: Path, kind: str, fields: Mapping[str, Any]) -> None:
        if not self._is_on:
            return
        row = {"kind": kind, "unix": time.time(), "monotonic": time.monotonic(), **fields}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_for_lines(path) as file:
                file.write(line_of(row))
        except (OSError, ValueError) as error:
            self._is_on = False
            logger.warning("events are not recorded any more, and the run goes on: %s", error)


def line_of(row: Mapping[str, object], *, has_free_text: bool = True) -> bytes:
    """A line of JSON, without anything that looks like a secret. Looking for secrets takes 0.3 ms, and is left out where nothing
    of the row comes from outside."""
    return json.dumps(masked(row) if has_free_text else row, default=str).encode(errors="replace") + b"\n"


def open_for_lines(path: Path) -> IO[bytes]:
    """A file to append lines to, unbuffered. A line that a full disk has torn is ended first, so that it swallows no other."""
    file = open(path, "a+b", buffering=0)  # noqa: SIM115, the caller closes it
    if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
        file.write(b"\n")
    return file


class WarningEvents(logging.Handler):
    """Writes the warnings of the driver's log as events. A context manager that listens while it is open."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__:  # its own warning would come back to it
            with contextlib.suppress(Exception):
                text = record.getMessage()[:LONGEST_WARNING]
                self._journal.event("warning", level=record.levelname, text=text)

    def __enter__(self) -> "WarningEvents":
        logging.getLogger("open_instruct").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("open_instruct").removeHandler(self)
