"""wandb, which watches a run and may never stop it. It is imported when first needed."""

import contextlib
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from open_instruct.report.isolation import Isolation
from open_instruct.report.metrics_file import STEP_KEY, to_json_value
from open_instruct.system.background import Background
from open_instruct.system.masking import masked

logger = logging.getLogger(__name__)

WANDB_INIT_TIMEOUT_S = 20.0
WANDB_FINISH_TIMEOUT_S = 30.0
WANDB_ANSWER_TIMEOUT_S = 5.0
WANDB_GRACE_S = 5.0
"""Beyond its own limit, for wandb to notice it."""
WANDB_MAX_ROWS_WAITING = 1000
"""Rows of metrics that wandb has not taken yet; further ones are left out there."""


class Tracker(Protocol):
    """Where metrics go beside `metrics.jsonl`."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


class NullTracker:
    """Tracks nothing."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


@dataclass(frozen=True)
class TrackerOptions:
    """How a run is found in wandb."""

    project: str
    name: str
    run_id: str
    """The same after a resumption, so that it goes on in the same curve. Letters, digits, `-` and `_`."""
    output_dir: str
    """Its `wandb/` holds wandb's files, and an offline run for `wandb sync`."""
    entity: str | None = None
    group: str | None = None


class WandbTracker:
    """The keys of `metrics.jsonl` in wandb. Made by `make_tracker`."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        import wandb

        self._isolation = Isolation("wandb")
        self._background = Background("wandb", WANDB_MAX_ROWS_WAITING)
        self._num_left_out = 0
        self._wandb = wandb
        if self._can_go_online():
            try:
                self._run = self._init(options, config, mode="online")
            except Exception as error:
                logger.warning("wandb is out of reach, tracking offline: %s: %s", type(error).__name__, error)
                # What is left of the failed attempt holds the run's id.
                wandb.teardown()
                self._run = self._init(options, config, mode="offline")
        else:
            self._run = self._init(options, config, mode="offline")
        # A resumed run writes steps again that wandb has seen; its own step counter would refuse them.
        self._run.define_metric("*", step_metric=STEP_KEY)

    def _can_go_online(self) -> bool:
        if os.environ.get("WANDB_MODE", "online") != "online":
            return False
        # Without `prompt=False` wandb asks for the key on a terminal.
        if not self._wandb.login(prompt=False, verify=False, timeout=int(WANDB_INIT_TIMEOUT_S)):
            logger.warning("wandb has no key (WANDB_API_KEY): tracking offline")
            return False
        url = self._wandb.setup().settings.base_url
        # wandb itself takes 40 s to find out.
        if not answers(url, timeout_s=WANDB_ANSWER_TIMEOUT_S):
            logger.warning("%s does not answer: tracking offline", url)
            return False
        return True

    def _init(self, options: TrackerOptions, config: Mapping[str, Any], *, mode: Literal["online", "offline"]) -> Any:
        Path(options.output_dir).mkdir(parents=True, exist_ok=True)
        settings = self._wandb.Settings(
            init_timeout=WANDB_INIT_TIMEOUT_S,
            finish_timeout=WANDB_FINISH_TIMEOUT_S,
            console="off",  # the live line is not for a log
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
        """Hand a row over; wandb may hang (its helper, a file system), and no step waits for it."""
        row = {STEP_KEY: step, **metrics}
        if not self._background.submit(lambda: self._log(row)):
            if self._num_left_out == 0:
                logger.warning("wandb hangs: the run goes on, and leaves rows out there (metrics.jsonl has them all)")
            self._num_left_out += 1

    def _log(self, row: Mapping[str, Any]) -> None:
        with self._isolation:
            self._run.log({key: self._to_wandb(value) for key, value in row.items()})

    def _to_wandb(self, value: Any) -> Any:
        value = to_json_value(value)
        return self._wandb.Histogram(value) if isinstance(value, list) and value else value

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left, for at most `WANDB_FINISH_TIMEOUT_S`, and end wandb's helper process, if need be by force."""
        if not self._background.end(lambda: self._finish(exit_code), WANDB_FINISH_TIMEOUT_S + WANDB_GRACE_S):
            logger.warning(
                "wandb hangs: what it has not sent yet is left behind. metrics.jsonl has all rows (left out there: %d)",
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
    """Whether an HTTP server is there, through the proxy if one is set; what it answers does not matter."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # Certificates are for wandb to judge, which may know others.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


def make_tracker(with_tracking: bool, options: TrackerOptions, config: Mapping[str, Any]) -> Tracker:
    """wandb if asked for; offline when there is no network or key; nothing when wandb cannot be started at all.

    Asks no question; without a network it takes some seconds, with one that fails half-way less than a minute.
    """
    if with_tracking:
        with Isolation("wandb"):
            return WandbTracker(options, masked(config))
    return NullTracker()
