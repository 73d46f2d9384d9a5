"""The two threads between an engine actor and its queues.

param_prompt_Q ──► pull_prompts, while there is room ──► begin_rollouts       finished groups ──► push_results ──► results queue
"""

import queue
from collections.abc import Callable

from ray.util.queue import Empty, Full, Queue

from open_instruct.data_types import GenerationResult, PromptRequest, ShutdownSentinel
from open_instruct.engines.request_tracker import RequestTracker
from open_instruct.system.work_threads import POLL_S, WorkThreads


class QueueThreads:
    """Pulls prompts and pushes results, while `threads` run.

    The puller asks for a prompt only while the engine's outstanding tokens are under its limit. So several engines that use the
    same queues balance the work among themselves.

    `begin_rollouts` returns at once. `gather_s` is the longest time that a finished group waits for groups under way, so that
    they are pushed together. Each push takes time from the engine: the engine thread shares the interpreter with the pusher, and
    on CPU the engine shares its cores with all processes that handle the result.
    """

    def __init__(
        self,
        threads: WorkThreads,
        work: RequestTracker,
        prompt_queue: Queue,
        results_queue: Queue,
        begin_rollouts: Callable[[list[PromptRequest]], None],
        *,
        gather_s: float,
    ) -> None:
        self._threads = threads
        self._work = work
        self._prompt_queue = prompt_queue
        self._results_queue = results_queue
        self._begin_rollouts = begin_rollouts
        self._gather_s = gather_s
        self._finished: queue.SimpleQueue[GenerationResult] = queue.SimpleQueue()

    def pull_prompts(self) -> None:
        """The body of the puller thread. When it gets a `ShutdownSentinel`, it ends all threads."""
        threads = self._threads
        while not threads.stopping.is_set():
            with threads.lock:
                if not threads.lock.wait_for(self._work.has_room, timeout=POLL_S):
                    continue
            try:
                bundle = self._prompt_queue.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(bundle, ShutdownSentinel):
                threads.stop()
                return
            self._begin_rollouts(self._work.take_in(bundle))

    def hand_over(self, result: GenerationResult) -> None:
        """Queue the result of a finished rollout to be pushed."""
        self._work.finish_rollout(result)
        self._finished.put(result)

    def push_results(self) -> None:
        """The body of the pusher thread. When the threads are to end, finished groups are still pushed if the queue has room, so
        that the checkpoint contains them."""
        while not (self._threads.stopping.is_set() and self._finished.empty()):
            try:
                results = [self._finished.get(timeout=POLL_S)]
            except queue.Empty:
                continue
            with self._threads.lock:
                self._threads.lock.wait_for(self._is_last, timeout=self._gather_s)
            while not self._finished.empty():
                results.append(self._finished.get())
            self._put(results)

    def _is_last(self) -> bool:
        """Whether no other group can come soon: none is under way, or the threads are to end."""
        return not self._work.has_rollouts or self._threads.stopping.is_set()

    def _put(self, results: list[GenerationResult]) -> None:
        while True:
            try:
                self._results_queue.put(results, timeout=POLL_S)
                self._work.delivered(results)
                return
            except Full:
                if self._threads.stopping.is_set():
                    return
