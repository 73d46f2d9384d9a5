"""Tells the user what is new on the rollout side, while the driver waits and when the run ends."""

import logging
import math
import time
from contextlib import suppress

from open_instruct.rollouts.batch_progress import BatchProgress
from open_instruct.run.evaluation_schedule import CONTROL_S, take_complete_evaluation
from open_instruct.run.wiring import Run

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two questions to the controller."""
LAST_S = 5.0
"""Deadline of the last question, when the run ends."""


class NewsTeller:
    """Logs the controller's warnings, writes the prompts that steps have left out, and takes an evaluation that is complete."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked_at = -math.inf

    def tell_now_and_then(self) -> None:
        """Tell what is new, at most once in `EVERY_S`. Called while the driver waits."""
        if time.monotonic() >= self._asked_at + EVERY_S:
            self.tell()

    def tell(self, timeout_s: float = CONTROL_S) -> BatchProgress:
        """Tell what is new. Returns how far the next batch is."""
        run = self._run
        news = run.components.wait(
            run.components.rollouts.controller.news.remote(), what="news of the controller", timeout_s=timeout_s
        )
        self._asked_at = time.monotonic()
        for warning in news.warnings:
            logger.warning("the rollout controller: %s", warning)
        for step, rows in news.left_out.items():
            run.log.prompts(step, rows)
        if news.evaluation_is_complete:
            take_complete_evaluation(run)
        return news.progress


def tell_last_news(run: Run) -> None:
    """The run ends: tell what came after the last question, if the controller still answers."""
    with suppress(Exception):  # it must not hide why the run ends
        NewsTeller(run).tell(LAST_S)
