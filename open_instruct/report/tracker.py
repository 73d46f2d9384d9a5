"""Trackers: destinations of metrics in addition to `metrics.jsonl`. They must never stop a run, nor hold it up.

`trackers/` has a module for each library, which is imported when a run names it. `BackgroundTracker` is what all of them share:
a thread of their own, one warning if they fail, one if they hang.
"""

import hashlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from open_instruct.report.isolation import Isolation
from open_instruct.report.metrics_file import to_json_value
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.background_calls import BackgroundCalls

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 30.0
"""Seconds that a tracker has at the end of a run to send what waits."""
GRACE_S = 5.0
"""Additional seconds for a library to notice that its own limit is over."""
MAX_ROWS_WAITING = 1000
"""Most rows of metrics that wait for a tracker. Further rows are not sent to it."""


class Tracker(Protocol):
    """A destination of metrics in addition to `metrics.jsonl`. No call waits, except `finish`."""

    def started(self, after_step: int) -> None:
        """The step loop begins after this step (-1: with nothing done). Rows of later steps, which an earlier process has sent,
        are cut, or are overwritten when their step comes again."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Send the metrics of a step, or further metrics of it."""

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send a table. All its rows have the same columns."""

    def alert(self, title: str, text: str, step: int) -> None:
        """Tell people that something is wrong with the run, where the library can."""

    def finish(self, exit_code: int = 0) -> None:
        """Send what waits, for at most `FINISH_TIMEOUT_S`, and end."""


class Trackers:
    """Several trackers, or none, as one."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = tuple(trackers)

    def started(self, after_step: int) -> None:
        for tracker in self.trackers:
            tracker.started(after_step)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for tracker in self.trackers:
            tracker.log_table(name, rows, step)

    def alert(self, title: str, text: str, step: int) -> None:
        for tracker in self.trackers:
            tracker.alert(title, text, step)

    def finish(self, exit_code: int = 0) -> None:
        """All at the same time, so that several that hang take no longer than one."""
        threads = [threading.Thread(target=tracker.finish, args=(exit_code,)) for tracker in self.trackers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


EARLIER = "earlier_"
"""Beginning of the name of a folder that holds the files of an earlier run at the same path."""
RUN_NUMBER_FILE = "wandb_run_number.txt"
"""File in the directory of a run: how many runs were in this directory before. It stays when the earlier runs' files are moved or
removed."""


@dataclass(frozen=True)
class TrackerOptions:
    """Names under which a run is found in a tracker, and where its files are."""

    project: str
    name: str
    run_id: str
    """Letters, digits, `-` and `_`. A resumed run has the same id, so that a tracker continues its curves."""
    output_dir: str
    """Its subdirectory `wandb/` holds wandb's files, and an offline run for `wandb sync`; others have theirs beside it."""
    entity: str | None = None
    group: str | None = None


def run_id_at(place: str | Path) -> str:
    """The id of the run whose results are at a path: the same after a resumption, and for no other path. A run that begins anew
    after the files of an earlier run were moved aside (`begin_another_run_at`) has an id of its own, because wandb takes no step
    twice."""
    number = _run_number(Path(place))
    text = str(Path(place).resolve()) + (f" {number}" if number else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def begin_another_run_at(place: Path) -> None:
    """Give the path another id, because the run that begins there is not the run that was there before.

    Raises:
        OSError: the number of the run cannot be written.
    """
    write_atomically(place / RUN_NUMBER_FILE, f"{_run_number(place) + 1}\n".encode())


def _run_number(place: Path) -> int:
    try:
        return int((place / RUN_NUMBER_FILE).read_text())
    except (OSError, ValueError):  # there is no file, or something else in it: then the folders of earlier runs count
        return len(list(place.glob(f"{EARLIER}*")))


class BackgroundTracker(ABC):
    """A library in a thread of its own. What it raises is logged once, and so is that it hangs; the run goes on.

    A subclass says in `_log` and the others what to do there. It gets values as `to_json_value` makes them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._isolation = Isolation(name)
        self._background = BackgroundCalls(name, MAX_ROWS_WAITING)
        self._num_left_out = 0

    def started(self, after_step: int) -> None:
        self._submit(lambda: self._start(after_step))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        row = dict(metrics)  # the caller may go on to change its own
        self._submit(lambda: self._log(to_json_value(row), step))

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._submit(lambda: self._log_table(name, rows, step))

    def alert(self, title: str, text: str, step: int) -> None:
        self._submit(lambda: self._alert(title, text, step))

    def finish(self, exit_code: int = 0) -> None:
        if not self._background.end(
            lambda: self._isolated(lambda: self._finish(exit_code)), FINISH_TIMEOUT_S + GRACE_S
        ):
            logger.warning(
                "%s hangs: the rows that it has not sent yet are lost there, and %d more that were not handed to it. "
                "metrics.jsonl has all rows.",
                self.name,
                self._num_left_out,
            )
            self._give_up()

    def _submit(self, call: Callable[[], None]) -> None:
        if not self._background.submit(lambda: self._isolated(call)):
            if self._num_left_out == 0:
                logger.warning(
                    "%s hangs: the run goes on, and %s lacks some rows (metrics.jsonl has all of them)",
                    self.name,
                    self.name,
                )
            self._num_left_out += 1

    def _isolated(self, call: Callable[[], None]) -> None:
        with self._isolation:
            call()

    # --- what a library does, in its thread ---------------------------------------------------------------------------

    def _start(self, after_step: int) -> None:  # noqa: B027, a library may have nothing to do
        """Begin after this step, and cut the rows of later steps."""

    @abstractmethod
    def _log(self, row: Mapping[str, Any], step: int) -> None: ...

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027
        """By default tables are left out."""

    def _alert(self, title: str, text: str, step: int) -> None:  # noqa: B027
        """By default alerts are told nobody: the row of the step has them."""

    def _finish(self, exit_code: int) -> None:  # noqa: B027
        """The run is over."""

    def _give_up(self) -> None:  # noqa: B027
        """The library hangs, and the process is about to end."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row that are one number each. Truth values count as 0 and 1."""
    return {name: float(value) for name, value in row.items() if isinstance(value, bool | int | float)}
