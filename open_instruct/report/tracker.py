"""Sends metrics to wandb, which must never stop a run. wandb is imported when it is first needed."""

import contextlib
import hashlib
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from open_instruct.report.histogram import is_histogram
from open_instruct.report.isolation import Isolation
from open_instruct.report.metrics_file import STEP_KEY, to_json_value
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.background_calls import BackgroundCalls
from open_instruct.system.secret_masking import masked

logger = logging.getLogger(__name__)

WANDB_INIT_TIMEOUT_S = 20.0
WANDB_FINISH_TIMEOUT_S = 30.0
WANDB_ANSWER_TIMEOUT_S = 5.0
WANDB_GRACE_S = 5.0
"""Additional seconds for wandb to notice that its own limit is over."""
WANDB_MAX_ROWS_WAITING = 1000
"""Most rows of metrics that wait for wandb. Further rows are not sent to wandb."""


class Tracker(Protocol):
    """A destination of metrics in addition to `metrics.jsonl`."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


class NullTracker:
    """Tracks nothing."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        pass

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


EARLIER = "earlier_"
"""Beginning of the name of a folder that holds the files of an earlier run at the same path."""
RUN_NUMBER_FILE = "wandb_run_number.txt"
"""File in the directory of a run: how many runs were in this directory before. It stays when the earlier runs' files are moved or
removed."""


@dataclass(frozen=True)
class TrackerOptions:
    """Names under which a run is found in wandb, and where its files are."""

    project: str
    name: str
    run_id: str
    """Letters, digits, `-` and `_`. A resumed run has the same id, so that wandb continues its curves."""
    output_dir: str
    """Its subdirectory `wandb/` holds wandb's files, and an offline run for `wandb sync`."""
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


class WandbTracker:
    """Sends the rows of `metrics.jsonl` to wandb, under the same keys. `make_tracker` makes it."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        import wandb

        self._isolation = Isolation("wandb")
        self._background = BackgroundCalls("wandb", WANDB_MAX_ROWS_WAITING)
        self._num_left_out = 0
        self._wandb = wandb
        if self._can_go_online():
            try:
                self._run = self._init(options, config, mode="online")
            except Exception as error:
                logger.warning("wandb is out of reach, tracking offline: %s: %s", type(error).__name__, error)
                # Without this call the remains of the failed attempt would still hold the run's id.
                wandb.teardown()
                self._run = self._init(options, config, mode="offline")
        else:
            self._run = self._init(options, config, mode="offline")
        # A resumed run repeats steps that wandb has already received, and wandb's own step counter would refuse them.
        self._run.define_metric("*", step_metric=STEP_KEY)

    def _can_go_online(self) -> bool:
        if os.environ.get("WANDB_MODE", "online") != "online":
            return False
        # Without `prompt=False` wandb asks for the key on a terminal.
        if not self._wandb.login(prompt=False, verify=False, timeout=int(WANDB_INIT_TIMEOUT_S)):
            logger.warning("wandb has no key (WANDB_API_KEY): tracking offline")
            return False
        url = self._wandb.setup().settings.base_url
        # wandb itself takes 40 s to find out that the server does not answer.
        if not answers(url, timeout_s=WANDB_ANSWER_TIMEOUT_S):
            logger.warning("%s does not answer: tracking offline", url)
            return False
        return True

    def _init(self, options: TrackerOptions, config: Mapping[str, Any], *, mode: Literal["online", "offline"]) -> Any:
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            init_timeout=WANDB_INIT_TIMEOUT_S,
            finish_timeout=WANDB_FINISH_TIMEOUT_S,
            console="off",  # wandb must not record the live line
        )
        return self._wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=options.name,
            id=options.run_id,
            dir=options.output_dir,
            config=to_json_value(config),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Queue a row for wandb without waiting, because wandb may hang (its helper process, a file system)."""
        self._submit(lambda: self._log({STEP_KEY: step, **metrics}))

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Queue a table for wandb without waiting. All its rows have the same columns."""
        self._submit(lambda: self._log_table(name, rows, step))

    def _submit(self, call: Callable[[], None]) -> None:
        if not self._background.submit(call):
            if self._num_left_out == 0:
                logger.warning(
                    "wandb hangs: the run goes on, and wandb lacks some rows (metrics.jsonl has all of them)"
                )
            self._num_left_out += 1

    def _log(self, row: Mapping[str, Any]) -> None:
        with self._isolation:
            self._run.log({key: self._to_wandb(value) for key, value in row.items()})

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        with self._isolation:
            data: list[Any] = [
                [str(value) if isinstance(value, list | dict) else value for value in row.values()] for row in rows
            ]
            self._run.log({STEP_KEY: step, name: self._wandb.Table(columns=list(rows[0]), data=data)})

    def _to_wandb(self, value: Any) -> Any:
        value = to_json_value(value)
        if is_histogram(value):
            return self._wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
        return self._wandb.Histogram(value) if isinstance(value, list) and value else value

    def finish(self, exit_code: int = 0) -> None:
        """Send the remaining rows, for at most `WANDB_FINISH_TIMEOUT_S`, and end wandb's helper process, by force if needed."""
        if not self._background.end(lambda: self._finish(exit_code), WANDB_FINISH_TIMEOUT_S + WANDB_GRACE_S):
            logger.warning(
                "wandb hangs: the rows that it has not sent yet are lost there, and %d more that were not handed to it. "
                "metrics.jsonl has all rows.",
                self._num_left_out,
            )
            _kill_helpers()  # at the end of this process wandb would wait for them

    def _finish(self, exit_code: int) -> None:
        with self._isolation:
            self._run.finish(exit_code=exit_code)
        with self._isolation:
            self._wandb.teardown(exit_code=exit_code)


def _kill_helpers() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "wandb" in child.name():
                child.kill()


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether an HTTP server answers, through the proxy if one is set. Any answer counts, even an error."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # A certificate error counts as an answer, because wandb checks certificates itself and may trust others.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, HTTPException):  # HTTPException: the answer is not HTTP
        return False


def make_tracker(with_tracking: bool, options: TrackerOptions, config: Mapping[str, Any]) -> Tracker:
    """A tracker for wandb if `with_tracking`, else a tracker that does nothing. wandb works offline without a network or a key.
    If wandb cannot be started at all, nothing is tracked.

    wandb never asks the user for input. Without a network this call takes some seconds; with a network that fails half-way it
    takes less than a minute.
    """
    if with_tracking:
        with Isolation("wandb"):
            return WandbTracker(options, masked(config))
    return NullTracker()
