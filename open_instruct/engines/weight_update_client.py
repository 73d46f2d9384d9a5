"""How the learners call the engines during a weight update: start, update…, finish, with a time limit for each engine.

An engine takes an update whole or not at all, and each engine confirms the version it serves. Where engines receive in one
collective, an engine that fails in the middle breaks the update for all engines, because NCCL waits for its members without a
limit. So the collective is aborted on both sides, every engine in it counts as failed, and the next update makes a new group.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from open_instruct.cluster.failures import root_cause

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

FETCH_S = 10.0
"""Deadline for fetching an answer that is already available."""
HELD_UP = "held up by another engine of the collective"
"""The cause of failure of an engine that has no new weights because another engine failed."""
ANSWER_S = 30.0
"""How long an engine may take to answer `ready`, before a group is made with it."""


@dataclass(frozen=True)
class UpdateReport:
    """The outcome of one update. The keys are the engines' positions."""

    confirmed: dict[int, int] = field(default_factory=dict)
    """The version that each engine says it serves now."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why an engine did not get the new weights."""
    pauses_s: dict[int, float] = field(default_factory=dict)
    """Seconds for which generation was paused."""


class UpdateAbandoned(RuntimeError):
    """All engines receive in one collective and one engine cannot take part, so nothing was sent to any engine."""


class WeightUpdateClient:
    """Calls every engine at once, with a time limit for each. It has the methods of vLLM's weight-sync client.

    Call `begin` before an update is sent. An engine that fails in the middle is left out of the rest of the update; the other
    engines get the whole update, unless they receive in one collective. Each update has a number, so that an engine that answers
    late refuses the calls of an older update.

    Args:
        engines: a list, or a mapping from position to engine.
        workers_per_engine: processes of one engine that receive weights.
        timeout_s: how long the calls of one update may take on one engine. Time that other engines take does not count,
            because otherwise one engine that hangs would fail the update on all engines. The whole update may take twice as
            long: with 600 s, at most 1200 s.
        connect_timeout_s: the same for making the transfer group; None is `timeout_s`.
        in_one_group: the engines receive in one collective. All engines then get the weights, or none if an engine fails
            before the collective begins.
    """

    def __init__(
        self,
        engines: "Sequence[ActorHandle] | Mapping[int, ActorHandle]",
        *,
        workers_per_engine: int,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        in_one_group: bool = False,
    ) -> None:
        self._engines = dict(engines) if isinstance(engines, Mapping) else dict(enumerate(engines))
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s or timeout_s
        self._in_one_group = in_one_group
        self.abort_group: Callable[[], None] = lambda: None
        """Aborts the sender's end of the collective. Never called from the thread that sends."""
        self.begin(0)

    def begin(self, version: int, engines: Sequence[int] | None = None) -> None:
        """Prepare an update to `version` for the engines at these positions; for all engines if None or `in_one_group`."""
        self._version = version
        # Grows within a process, and from a process to its successor on the same machine.
        self._update_id = time.monotonic_ns()
        self._set_limit(self._timeout_s)
        self._taking_part = list(self._engines if engines is None or self._in_one_group else engines)
        self._confirmed: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        self._pauses_s: dict[int, float] = {}
        self._is_started = False
        self.has_broken_off = False
        """The collective was aborted in the middle of this update."""
        self._released_waiters: list[int] = []
        """Engines that waited in the aborted collective until they were asked to stop."""

    def _set_limit(self, timeout_s: float) -> None:
        self._limit_s = timeout_s
        self._ends_at = time.monotonic() + 2 * timeout_s
        self._left_s = dict.fromkeys(self._engines, timeout_s)

    def report(self) -> UpdateReport:
        return UpdateReport(self._confirmed, self._failures, self._pauses_s)

    def find_unreachable(self) -> dict[int, str]:
        """Engines that do not answer, with the cause. A transfer group that includes such an engine would wait for it."""
        self.begin(self._version)
        self._set_limit(ANSWER_S)
        self._call("ready", lambda _: ())
        return self._failures

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.begin(self._version)
        self._set_limit(self._connect_timeout_s)
        self._call("init_weight_transfer_engine", lambda number: (self._for_engine(init_info, number),))
        if self._failures:
            raise RuntimeError(f"the weight transfer could not be set up: {self._failures}")

    def _for_engine(self, init_info: dict[str, Any], number: int) -> dict[str, Any]:
        """The `init_info` of one engine. Its ranks in the transfer group follow the ranks of the engines before it.

        Example: with offset 1 and 2 workers per engine, the first engine has ranks 1 and 2, the second ranks 3 and 4.
        """
        if "rank_offset" not in init_info:
            return init_info
        num_before = list(self._engines).index(number)
        return {**init_info, "rank_offset": init_info["rank_offset"] + num_before * self._workers_per_engine}

    def start(self) -> bool:
        """Begin the update on the engines. Returns whether there is any engine to send to."""
        try:
            self.start_weight_update()
        except UpdateAbandoned:
            return False
        return bool(self._taking_part)

    def start_weight_update(self) -> None:
        """Does nothing after `start`. Raises `UpdateAbandoned` if one engine's failure leaves all of them without the update."""
        if self._is_started:
            return
        self._is_started = True
        self._call("start_weight_update", lambda _: (self._update_id,))
        if self._in_one_group and self._failures:
            for number in self._taking_part:
                self._failures[number] = HELD_UP
            raise UpdateAbandoned(str(self._failures))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        answers = self._call(
            "update_weights", lambda _: (update_info, self._update_id), in_collective=self._in_one_group
        )
        if self.has_broken_off:
            self._failures |= dict.fromkeys([*answers, *self._released_waiters], HELD_UP)
            self._taking_part = []

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have every engine swap to the new weights, and check that each confirms the new version."""
        version = self._version if weight_version is None else int(weight_version)
        for number, answer in self._call("finish_weight_update", lambda _: (version, self._update_id)).items():
            if answer["version"] != version:
                self._failures[number] = f"was sent version {version} and confirms {answer['version']}"
                continue
            self._confirmed[number] = version
            self._pauses_s[number] = answer["pause_s"]

    def _call(self, method: str, arguments: Callable[[int], tuple], *, in_collective: bool = False) -> dict[int, Any]:
        """Call `method` on every engine that still takes part. Returns the answers that came in time, by position."""
        started = time.monotonic()
        waiting = {getattr(self._engines[n], method).remote(*arguments(n)): n for n in self._taking_part}
        answers = {}
        while waiting:
            soonest = min(min(self._left_s[n] for n in waiting.values()) + started, self._ends_at)
            ready_refs, _ = ray.wait(list(waiting), num_returns=1, timeout=max(soonest - time.monotonic(), 0.0))
            now = time.monotonic()
            for ref, number in list(waiting.items()):
                if ref in ready_refs:
                    self._take_answer(method, number, ref, answers)
                    self._left_s[number] -= now - started
                elif now - started >= self._left_s[number] or now >= self._ends_at:
                    self._failures[number] = f"did not answer {method} within the {self._limit_s:g} s of the update"
                else:
                    continue
                del waiting[ref]
            if in_collective and self._failures and not self.has_broken_off:
                self._break_off(list(waiting.values()))
        self._taking_part = sorted(answers)
        return answers

    def _break_off(self, waiting: Sequence[int]) -> None:
        """Release the other members of the collective, because they would wait for the member that has failed."""
        self.has_broken_off = True
        self._released_waiters = list(waiting)
        self._ends_at = min(self._ends_at, time.monotonic() + ANSWER_S)
        logger.warning("the collective weight update is aborted: %s", self._failures)
        for number in waiting:
            self._engines[number].abort_weight_update.remote()
        self.abort_group()

    def _take_answer(self, method: str, number: int, ref: Any, answers: dict[int, Any]) -> None:
        try:
            answers[number] = ray.get(ref, timeout=FETCH_S)
        except ray.exceptions.RayError as error:
            self._failures[number] = f"{method}: {root_cause(error)}"
