"""Issues prompts: a thread that puts into the prompt queue what may be generated now.

evaluation under way ─┐
taken back ───────────┼─► one bundle ─► param_prompt_Q ─► engines
admitted by PromptFlow┘
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from ray.util.queue import Empty, Full, Queue

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import PromptRequest
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.running_evaluation import Evaluations
from open_instruct.rollouts.staleness import PromptFlow
from open_instruct.system.work_threads import POLL_S, WorkThreads

TAKING_INVENTORY = "taking inventory"
"""Reason of a pause in which no prompt is issued, not even one of an evaluation."""


def bundles_per_step(args: GRPOConfig) -> int:
    """The number of items of the prompt queue that hold an engine's share of a step; an item holds at least one group.

    Two, so that an engine that is ahead of the others can take more than its share. Where engines and learners take turns it is
    one, so that the first step of the engine has all prompts: until they come, the engine has nothing to do.
    """
    return 1 if args.takes_turns else 2


class PromptFeeder:
    """Puts prompts into `prompt_queue`: those of an evaluation first, then those that were taken back from the queue, then what
    `flow` admits.

    `change` may change a bundle before it goes into the queue.
    """

    def __init__(
        self,
        args: GRPOConfig,
        threads: WorkThreads,
        flow: PromptFlow,
        requests: PromptRequests,
        evaluations: Evaluations,
        prompt_queue: Queue,
        change: Callable[[list[PromptRequest]], list[PromptRequest]],
    ) -> None:
        self._threads = threads
        self._flow = flow
        self._requests = requests
        self._evaluations = evaluations
        self._prompt_queue = prompt_queue
        self._change = change
        self._interval_s = args.batch_generation_interval
        self._bundle_samples = args.num_samples_per_step // (bundles_per_step(args) * args.vllm_num_engines)
        self._taken_back: deque[PromptRequest] = deque()
        """Prompts that were taken back from the prompt queue while inventory was taken."""
        self._is_putting = threading.Event()
        """Set while a bundle is on its way into the prompt queue."""
        self.pauses: set[str] = set()
        """Why no training prompt is issued now."""
        self.pause_count = 0
        self.resume_count = 0

    def feed_prompts(self) -> None:
        """The thread. It waits until there is a prompt to issue and the queue has room; a notice of the lock wakes it."""
        threads = self._threads
        while not threads.stopping.is_set():
            with threads.lock:
                bundle = self._next_bundle()
                if not bundle:
                    threads.lock.wait(POLL_S)
                    continue
                self._is_putting.set()
            try:
                self._put(self._change(bundle))
            finally:  # `_change` may be a user's, and fail
                self._is_putting.clear()
            if self._interval_s:
                threads.stopping.wait(self._interval_s)

    def _next_bundle(self) -> list[PromptRequest]:
        """The prompts that may be issued now, for up to `_bundle_samples` responses. Several travel in one call of the queue,
        because a call costs as much as sampling a few tokens."""
        bundle: list[PromptRequest] = []
        num_samples = 0
        while (not bundle or num_samples < self._bundle_samples) and (request := self._next_request()) is not None:
            bundle.append(request)
            num_samples += request.generation_config.n
        return bundle

    def _next_request(self) -> PromptRequest | None:
        """The next prompt, or None while no prompt may be issued."""
        if TAKING_INVENTORY in self.pauses:
            return None
        evaluation = self._evaluations.current
        if evaluation is not None and (row := evaluation.next_row()) is not None:
            return self._requests.for_evaluation(evaluation, row)
        if self._taken_back:
            return self._taken_back.popleft()
        if self.pauses:
            return None
        prompt = self._flow.next_prompt()
        return None if prompt is None else self._requests.for_training(prompt, self._flow.version)

    def _put(self, bundle: list[PromptRequest]) -> None:
        while not self._threads.stopping.is_set():
            try:
                self._prompt_queue.put(bundle, timeout=POLL_S)
                return
            except Full:
                continue

    # --- pauses -------------------------------------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Issue no training prompts until `resume` is called for the same reason; the engines finish what they have."""
        with self._threads.lock:
            self.pause_count += not self.pauses
            self.pauses.add(reason)

    def resume(self, reason: str) -> None:
        with self._threads.lock:
            self.pauses.discard(reason)
            self.resume_count += not self.pauses
            self._threads.lock.notify_all()

    # --- taking inventory after the death of an engine ----------------------------------------------------------------

    def take_back(self) -> int:
        """Stop issuing and empty the prompt queue, so that the engines have every open prompt. Returns how many prompts were
        taken back; they are issued after `resume(TAKING_INVENTORY)`."""
        self.pause(TAKING_INVENTORY)
        taken = self._drain()
        while self._is_putting.is_set():
            time.sleep(POLL_S / 50)
            taken += self._drain()
        return taken + self._drain()

    def _drain(self) -> int:
        taken = 0
        while True:
            try:
                bundle = self._prompt_queue.get_nowait()
            except Empty:
                return taken
            with self._threads.lock:
                self._taken_back.extend(bundle)
            taken += len(bundle)

    @property
    def taken_back(self) -> list[str]:
        """Ids of the prompts that were taken back and not issued since."""
        return [request.prompt_id for request in self._taken_back]
