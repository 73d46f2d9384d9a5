"""The asynchronous scheduler of reasoning-cache rollouts: works on many trajectories at once, from one bounded queue to another.

    problem_queue ──get──► schedule_rollouts: up to max_in_flight trajectories ──put──► result_queue
      (full: the loop        each takes its turns through `workflow`; between two        (full: trajectories wait,
       waits to put)         turns it holds no slot, so other turns run in between        no new ones are begun)

If a turn has used up its retries, its trajectory goes back to the end of the line and keeps the turns that it already has; after
`max_requeues` it is dropped. If a retry cannot cure a failure, the trajectory is dropped at once. A dropped trajectory is a
result too, so no trajectory disappears.
"""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from open_instruct.workflows.base import first_of
from open_instruct.workflows.rc.state import InferenceProblemState
from open_instruct.workflows.rc.turns import RCTurns
from open_instruct.workflows.rc.types import (
    EnginesDown,
    NotScored,
    PromptTooLong,
    RetriesExhausted,
    RolloutResult,
    TurnRejected,
)

POLL_S = 0.2
"""Longest wait in a queue call before `is_stopping` is called again."""
MAX_REQUEUES = 10

RETRIES_EXHAUSTED = "retries_exhausted"
REJECTED = "rejected"
PROMPT_TOO_LONG = "prompt_too_long"
POLICY_ERROR = "policy_error"
NOT_SCORED = "not_scored"


class BoundedQueue(Protocol):
    """The methods of `queue.Queue` and `multiprocessing.Queue` that are used here."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None: ...


@dataclass(frozen=True)
class SchedulerOptions:
    max_in_flight: int
    """Trajectories at once. More than the servers have slots, so that a turn is always waiting for a free slot."""
    max_requeues: int = MAX_REQUEUES


async def schedule_rollouts(
    problem_queue: BoundedQueue,
    result_queue: BoundedQueue,
    workflow: RCTurns,
    options: SchedulerOptions,
    *,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Serve `problem_queue` until it returns a None; consumes `InferenceProblemState`s, produces `RolloutResult`s.

    Returns when the results of all trajectories are in `result_queue`, or when `is_stopping` is true. In the second case
    unfinished trajectories are given up, and no part of them is in the queue.

    Raises:
        EnginesDown: all servers are gone.
    """
    scheduler = _Scheduler(problem_queue, result_queue, workflow, options, is_stopping)
    try:
        await scheduler.run()
    finally:
        scheduler.close()


class _Scheduler:
    def __init__(
        self,
        problem_queue: BoundedQueue,
        result_queue: BoundedQueue,
        workflow: RCTurns,
        options: SchedulerOptions,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._problem_queue = problem_queue
        self._result_queue = result_queue
        self._workflow = workflow
        self._options = options
        self._is_stopping = is_stopping
        self._room = asyncio.Semaphore(options.max_in_flight)
        self._putting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="rc-queue")

    async def run(self) -> None:
        work = asyncio.ensure_future(self._serve())
        while not work.done() and not self._is_stopping():
            await asyncio.wait([work], timeout=POLL_S)
        work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if not self._is_stopping():
                raise
        except BaseExceptionGroup as group:
            raise first_of(group) from group

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as trajectories:
            while True:
                await self._room.acquire()
                state = await self._next_state()
                if state is None:
                    return
                trajectories.create_task(self._trajectory(state))

    async def _next_state(self) -> InferenceProblemState | None:
        while True:
            try:
                return await self._in_thread(self._problem_queue.get, True, POLL_S)
            except queue.Empty:
                continue

    async def _trajectory(self, state: InferenceProblemState) -> None:
        """All turns of one trajectory. It counts as in flight until its result is in the queue."""
        while True:
            result = await self._attempt(state)
            if result is not None:
                await self._put(result)
                self._room.release()
                return
            state.num_requeues += 1
            self._room.release()
            await self._room.acquire()  # behind the trajectories that are already waiting

    async def _attempt(self, state: InferenceProblemState) -> RolloutResult | None:
        """The result, or None if the trajectory has to be put back."""
        try:
            rollouts = await self._workflow.run(state)
        except RetriesExhausted as error:
            state.num_retries += error.num_retries
            if state.num_requeues < self._options.max_requeues:
                return None
            return _dropped(state, RETRIES_EXHAUSTED, error)
        except EnginesDown:
            raise
        except TurnRejected as error:
            return _dropped(state, REJECTED, error)
        except PromptTooLong as error:
            return _dropped(state, PROMPT_TOO_LONG, error)
        except NotScored as error:
            return _dropped(state, NOT_SCORED, error)
        except (
            Exception
        ) as error:  # users write policies and verifiers: their errors are isolated, counted and reported
            return _dropped(state, POLICY_ERROR, error)
        return RolloutResult(
            state.trajectory_id, rollouts, num_retries=state.num_retries, num_requeues=state.num_requeues
        )

    async def _put(self, result: RolloutResult) -> None:
        async with self._putting:
            while True:
                try:
                    return await self._in_thread(self._result_queue.put, result, True, POLL_S)
                except queue.Full:
                    continue

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _dropped(state: InferenceProblemState, reason: str, error: Exception) -> RolloutResult:
    return RolloutResult(
        state.trajectory_id,
        rollouts=[],
        dropped=reason,
        cause=f"{type(error).__name__}: {error}"[:500],
        num_retries=state.num_retries,
        num_requeues=state.num_requeues,
    )
