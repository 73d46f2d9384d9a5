"""Counts the groups that engines or verifiers gave up, with the causes, and logs them now and then. Pure."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from open_instruct.data_types import GenerationResult
from open_instruct.system.counted import counted

logger = logging.getLogger(__name__)

TIMEOUT = "generation_timeout"
"""Part of the cause of a group that took longer than `--generation_timeout`."""
NOT_SCORED = "not scored"
"""Start of the cause of a group in which a verifier did not score every response."""
LOG_INTERVAL_S = 60.0


class NothingAnswered(RuntimeError):
    """So many prompts in a row were dropped that the next prompts would be dropped, too. The text says why."""


class GenerationFailures:
    """Counts since the start of this process. Not thread-safe: the controller's lock guards it.

    Args:
        most_in_a_row: training prompts that may be dropped one after another, each after its last attempt. One more ends the run,
            which would otherwise use up its prompts.
    """

    def __init__(self, most_in_a_row: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most_in_a_row = most_in_a_row
        self._num_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        """Number of groups by kind of cause, since the last line in the log."""
        self._told_at = -LOG_INTERVAL_S

    def record(self, result: GenerationResult, *, is_tried_again: bool | None) -> None:
        """A group was given up. Once in `LOG_INTERVAL_S` the log names one such group and counts the others.

        `is_tried_again` is None if the group is not needed any more, because another copy of it came.

        Raises `NothingAnswered`, for which unscored groups do not count; see `unscored_share.py`.
        """
        self._counts["unscored_groups" if result.error.startswith(NOT_SCORED) else "generation_errors"] += 1
        if not result.is_eval and TIMEOUT in result.error:
            self._counts["generation_timeouts"] += 1
            self._counts["dropped_timeouts"] += is_tried_again is False
        self._untold[TIMEOUT if TIMEOUT in result.error else result.error.partition(":")[0]] += 1
        if self._clock() >= self._told_at + LOG_INTERVAL_S:
            self._tell(result, is_tried_again=is_tried_again)
        if is_tried_again is False and not result.is_eval and not result.error.startswith(NOT_SCORED):
            self._num_in_a_row += 1
            if self._num_in_a_row > self._most_in_a_row:
                raise NothingAnswered(
                    f"the last {self._num_in_a_row} prompts were dropped one after another, because engines gave them up at "
                    f"every attempt (--max_generation_attempts). The last is {result.prompt_id}: {result.error}"
                )

    def answered(self) -> None:
        """A training group arrived with responses."""
        self._num_in_a_row = 0

    def _tell(self, result: GenerationResult, *, is_tried_again: bool | None) -> None:
        number = self._untold.total()
        logger.warning(
            "%s given up (%s). The last is %s on engine %d: %s. It is %s.",
            f"{counted(number, 'group')} {'was' if number == 1 else 'were'}",
            ", ".join(f"{kind}: {count}" for kind, count in self._untold.most_common(5)),
            result.prompt_id,
            result.engine_id,
            result.error,
            _what_becomes_of_it(result, is_tried_again=is_tried_again),
        )
        self._untold.clear()
        self._told_at = self._clock()

    def counts(self) -> dict[str, int]:
        """`generation_errors`: groups of training and evaluation that came back without responses. `generation_timeouts`:
        training groups that took longer than `--generation_timeout`. `dropped_timeouts`: training prompts that were dropped
        because their last attempt timed out; answers to such prompts are long, so training misses long answers.
        `unscored_groups`: training groups with too few scored responses, and evaluation groups with an unscored response.
        """
        names = ("generation_errors", "generation_timeouts", "dropped_timeouts", "unscored_groups")
        return {name: self._counts[name] for name in names}


def _what_becomes_of_it(result: GenerationResult, *, is_tried_again: bool | None) -> str:
    if is_tried_again is None:
        return "not waited for any more"
    if not is_tried_again:
        if result.error.startswith(NOT_SCORED) and result.is_eval:
            return "left out"
        return "given up" if result.is_eval else "dropped"
    return "sampled again" if result.is_eval else "sampled again with another seed"
