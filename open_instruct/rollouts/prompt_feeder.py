"""Issues prompts: a thread puts the prompts that may be generated now into the prompt queue.

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
from open_instruct.rollouts.rollout_record import RolloutRecord
from open_instruct.rollouts.running_evaluation import Evaluations
from open_instruct.rollouts.staleness import PromptFlow
from open_instruct.system.work_threads import POLL_S, WorkThreads

TAKING_INVENTORY = "taking inventory"
"""Reason of a pause in which no prompt is issued, not even an evaluation prompt."""


def bundles_per_step(args: GRPOConfig) -> int:
    """The number of items of the prompt queue that hold an engine's share of a step; an item holds at least one group.

    The number is 2, so that an engine that is ahead of the others can take more than its share. If engines and learners take
    turns, it is 1, so that the engine's first step has all its prompts. The engine is idle until they arrive in any case.
    """
    return 1 if args.takes_turns else 2


class PromptFeeder:
    """Puts prompts into `prompt_queue`: evaluation prompts first, then prompts that were taken back from the queue, then prompts
    that `flow` admits.

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
        record: RolloutRecord,
    ) -> None:
        self._threads = threads
        self._flow = flow
        self._requests = requests
        self._evaluations = evaluations
        self._prompt_queue = prompt_queue
        self._change = change
        self._record = record
        self._interval_s = args.batch_generation_interval
        self._bundle_samples = args.num_samples_per_step // (bundles_per_step(args) * args.vllm_num_engines)
        self._taken_back: deque[PromptRequest] = deque()
        """Prompts that `take_back` removed from the prompt queue and that are not issued again yet."""
        self._is_putting = threading.Event()
        """Set while a bundle is on its way into the prompt queue."""
        self.pauses: set[str] = set()
        """Reasons why no training prompt is issued now; empty while prompts are issued."""
        self.pause_count = 0
        self.resume_count = 0

    def feed_prompts(self) -> None:
        """The thread. It waits until a prompt may be issued and the queue has room; a notification of the lock wakes it."""
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
            finally:  # `_change` may be user code, which may raise
                self._is_putting.clear()
            if self._interval_s:
                threads.stopping.wait(self._interval_s)

    def _next_bundle(self) -> list[PromptRequest]:
        """The prompts that may be issued now, for up to `_bundle_samples` responses. One call of the queue carries several
        prompts, because a call costs as much as sampling a few tokens."""
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
        if prompt is None:
            return None
        self._record.issued(prompt)
        return self._requests.for_training(prompt, self._flow.version)

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
        num_prompts = self._drain()
        while self._is_putting.is_set():
            time.sleep(POLL_S / 50)
            num_prompts += self._drain()
        return num_prompts + self._drain()

    def _drain(self) -> int:
        num_prompts = 0
        while True:
            try:
                bundle = self._prompt_queue.get_nowait()
            except Empty:
                return num_prompts
            with self._threads.lock:
                self._taken_back.extend(bundle)
            num_prompts += len(bundle)

    @property
    def taken_back(self) -> list[str]:
        """Ids of the prompts that were taken back and not issued since."""
        return [request.prompt_id for request in self._taken_back]
