"""Tells the user what is new on the rollout side, while the driver waits and when the run ends."""

import logging
import math
import time
from typing import Any

from open_instruct.rollouts.batch_progress import BatchProgress
from open_instruct.run.evaluation_schedule import ControlWait, control_wait, take_complete_evaluation
from open_instruct.run.wiring import Run

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two questions to the controller."""
LAST_S = 5.0
"""How long the run waits for the last news altogether when it ends. After a signal its checkpoint is written only then."""


class NewsTeller:
    """Logs the controller's warnings, writes the prompts that steps have left out, and takes an evaluation that is complete."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked_at = -math.inf

    def tell_now_and_then(self) -> None:
        """Tell what is new, at most once in `EVERY_S`. Called while the driver waits."""
        if time.monotonic() >= self._asked_at + EVERY_S:
            self.tell()

    def tell(self, wait: ControlWait | None = None) -> BatchProgress:
        """Tell what is new. Returns how far the next batch is. `wait` is `control_wait` by default."""
        run = self._run
        wait = wait or control_wait(run)
        news = wait(run.components.rollouts.controller.news.remote(), subject="news of the controller")
        self._asked_at = time.monotonic()
        for warning in news.warnings:
            logger.warning("%s", warning)
        for sample in news.samples:
            logger.info("%s", sample)
        for step, rows in news.left_out.items():
            run.log.prompts(step, rows)
        run.log.waiting(news.progress.shortest)
        if news.evaluation_is_complete:
            take_complete_evaluation(run, wait)
        return news.progress


def tell_last_news(run: Run) -> None:
    """The run ends: tell what came after the last question, if the controller still answers. Another part may be dead, which may
    be why the run ends."""
    ends_at = time.monotonic() + LAST_S

    def wait(ref: Any, *, subject: str) -> Any:
        time_left = max(ends_at - time.monotonic(), 0.0)
        return run.components.wait(ref, subject=subject, timeout_s=time_left, checks_health=False)

    try:
        NewsTeller(run).tell(wait)
    except Exception as error:  # it must not hide why the run ends
        logger.info("the last news of the rollout side is not told: %s: %s", type(error).__name__, error)
