"""Asks the teacher about scored groups, before a step takes them (`--teacher_model_name_or_path`).

scored group ─► submit ─► the engine with the fewest groups ─► teaching_thread ─► the group, with `teacher` set in its samples
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray

from open_instruct.cluster.failures import root_cause
from open_instruct.data_types import TeacherLogprobs
from open_instruct.scored_groups import ScoredGroup
from open_instruct.system.counted import counted
from open_instruct.system.work_threads import POLL_S, WorkThreads

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest wait for an answer before the thread checks for further calls to wait for."""


class TeacherFailed(RuntimeError):
    """An engine of the teacher died for good, or hangs."""


@dataclass
class _Engine:
    """One engine of the teacher, with the calls that it has not answered."""

    actor: "ActorHandle"
    groups: dict[Any, ScoredGroup] = field(default_factory=dict)
    """Groups that the engine has not answered about, by the reference of the call."""
    moved_at: float = 0.0
    """When the engine last answered, or last got a call while it was idle."""
    process_id: int | None = None


class TeacherScoring:
    """Calls `callback` with each submitted group, once its samples have the teacher's log-probs.

    An engine that has groups to answer about and answers nothing for `timeout_s` seconds ends the run. So does an engine that
    died more often than Ray restarts it.
    """

    def __init__(
        self,
        teachers: "Sequence[ActorHandle]",
        threads: WorkThreads,
        callback: Callable[[ScoredGroup], None],
        *,
        timeout_s: float,
    ) -> None:
        self._engines = [_Engine(teacher) for teacher in teachers]
        self._threads = threads
        self._callback = callback
        self._timeout_s = timeout_s

    def submit(self, group: ScoredGroup) -> None:
        """Send a group to the engine with the fewest groups. May be called in any thread."""
        sequences = [(sample.prompt_ids, sample.response_ids) for sample in group.samples]
        with self._threads.lock:
            engine = min(self._engines, key=lambda engine: len(engine.groups))
            if not engine.groups:
                engine.moved_at = time.monotonic()
            engine.groups[engine.actor.score.remote(sequences)] = group
            self._threads.lock.notify_all()

    def teaching_thread(self) -> None:
        """The thread. It takes answers until the run ends."""
        while not self._threads.stopping.is_set():
            with self._threads.lock:
                waiting = {ref: number for number, engine in enumerate(self._engines) for ref in engine.groups}
                if not waiting:
                    self._threads.lock.wait(POLL_S)
                    continue
            refs, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=WAIT_S, fetch_local=True)
            for ref in refs:
                self._take(waiting[ref], ref)
            self._raise_if_late()

    def _take(self, number: int, ref: Any) -> None:
        engine = self._engines[number]
        try:
            process_id, logprobs = ray.get(ref, timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            raise TeacherFailed(f"engine {number} of the teacher failed: {root_cause(error)}") from error
        if engine.process_id not in (None, process_id):
            logger.warning("engine %d of the teacher died and was started again", number)
        with self._threads.lock:
            engine.process_id, engine.moved_at = process_id, time.monotonic()
            group = engine.groups.pop(ref)
        self._callback(_taught(group, logprobs))

    def _raise_if_late(self) -> None:
        now = time.monotonic()
        for number, engine in enumerate(self._engines):
            if engine.groups and now - engine.moved_at > self._timeout_s:
                raise TeacherFailed(
                    f"engine {number} of the teacher has {counted(len(engine.groups), 'group')} and answered none for "
                    f"{now - engine.moved_at:.0f} s. Where it only takes longer, raise --teacher_timeout_s."
                )

    @property
    def num_asked(self) -> int:
        """Number of groups that the teacher has not answered about yet."""
        return sum(len(engine.groups) for engine in self._engines)


def _taught(group: ScoredGroup, logprobs: Sequence[TeacherLogprobs]) -> ScoredGroup:
    samples = [replace(sample, teacher=teacher) for sample, teacher in zip(group.samples, logprobs, strict=True)]
    return replace(group, result=replace(group.result, samples=samples))
