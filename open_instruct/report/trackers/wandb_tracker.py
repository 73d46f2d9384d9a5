"""wandb: offline where there is no network or no key. Its process may hang, so it is ended by force if needed."""

import contextlib
import logging
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import psutil

from open_instruct.report.histogram import is_histogram
from open_instruct.report.metrics_file import STEP_KEY, to_json_value
from open_instruct.report.tracker import FINISH_TIMEOUT_S, BackgroundTracker, TrackerOptions

logger = logging.getLogger(__name__)

WANDB_INIT_TIMEOUT_S = 20.0
WANDB_ANSWER_TIMEOUT_S = 5.0


class WandbTracker(BackgroundTracker):
    """wandb takes no step twice: a resumed run repeats steps under the axis `training_step`, and wandb shows the later row.

    It starts in the caller's thread: without a network that takes some seconds; with a network that fails half-way it takes less
    than a minute.
    """

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        import wandb

        super().__init__("wandb")
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
            finish_timeout=FINISH_TIMEOUT_S,
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

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log({STEP_KEY: step} | {key: self._to_wandb(value) for key, value in row.items()})

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data: list[Any] = [
            [str(value) if isinstance(value, list | dict) else value for value in row.values()] for row in rows
        ]
        self._run.log({STEP_KEY: step, name: self._wandb.Table(columns=list(rows[0]), data=data)})

    def _alert(self, title: str, text: str, step: int) -> None:
        self._run.alert(title=title, text=f"step {step}: {text}", level="WARN")

    def _to_wandb(self, value: Any) -> Any:
        if is_histogram(value):
            return self._wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
        return self._wandb.Histogram(value) if isinstance(value, list) and value else value

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
        with self._isolation:
            self._wandb.teardown(exit_code=exit_code)

    def _give_up(self) -> None:
        """End wandb's helper process, for which this process would wait at its end."""
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
