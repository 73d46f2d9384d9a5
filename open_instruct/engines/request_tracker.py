"""Tracks what is inside an engine actor: rollouts, their requests to the engine, and finished groups on their way out."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, Moment, PromptRequest, SamplingConfig, TokenStatistics
from open_instruct.engines.vllm_engine import completions_of
from open_instruct.workflows.runner import Answer

DIRECT = "direct-"
"""Prefix of the ids of requests from a direct call, not from a rollout. The caller of a direct call has its own deadline."""
LENGTHS_KEPT = 256
"""Number of finished requests whose mean response length is the length expected of other responses."""


@dataclass(eq=False)
class TrackedRequest:
    """A request to the engine."""

    request_id: str
    prompt: np.ndarray  # (Q,) int32
    sampling: SamplingConfig
    reply: "Future[Answer]"
    admitted: Moment | None = None
    version: int = 0
    """Version of the weights that the engine served at the request's admission."""
    stood_still_before_s: float = 0.0
    """`RequestTracker.stood_still_s` at its admission."""

    def num_tokens(self, response_length: float) -> float:
        """Tokens of the request, its prompt included, if each response has this length (at most the length that it may have)."""
        return self.sampling.n * (len(self.prompt) + min(response_length, self.sampling.max_tokens))

    def answer(self, output: Any) -> Answer:
        """The answer to the request, made from vLLM's output once the request is finished."""
        admitted, completions = self.admitted or Moment(), completions_of(output)
        num_response_tokens = sum(len(completion.token_ids) for completion in completions)
        statistics = TokenStatistics(len(self.prompt), num_response_tokens, admitted.elapsed_s(), admitted.unix)
        return Answer(completions, statistics)

    def failed(self, cause: str) -> Answer:
        """The answer to a request that gets no responses."""
        admitted = self.admitted or Moment()
        statistics = TokenStatistics(len(self.prompt), 0, admitted.elapsed_s(), admitted.unix)
        return Answer([], statistics, cause)


class RequestTracker:
    """The account of one engine actor's work. `lock` guards the account and is notified when something leaves.

    Args:
        max_num_seqs, max_tokens: sequences and tokens that the engine has room for. Once one of the two is reached, no further
            prompt is taken in. The estimate expects responses as long as recent responses were. With their maximum length
            instead, few prompts would fit, although few responses reach it. If responses become longer than expected, vLLM
            makes some of them wait.
        version: version of the weights that the engine serves.
    """

    def __init__(self, lock: threading.Condition, *, max_num_seqs: int, max_tokens: float, version: int = 0) -> None:
        self._lock = lock
        self._version = version
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens
        self._requests: dict[str, TrackedRequest] = {}
        """Requests of rollouts and of direct calls, by request id."""
        self._to_admit: deque[TrackedRequest] = deque()
        self._given_up: list[str] = []
        """Ids of requests that the engine still has although no caller waits for their answers."""
        self._rollouts: dict[str, PromptRequest | None] = {}
        """Rollouts under way, by prompt id. The value is the prompt until its rollout makes the first request, then None."""
        self._outgoing: set[str] = set()
        """Prompt ids of finished groups that are not in the results queue yet."""
        self._lengths: deque[float] = deque(maxlen=LENGTHS_KEPT)
        """Mean response length in tokens of each of the last finished requests."""
        self.stood_still_s = 0.0
        """Seconds in which the engine ran control calls or was held by a weight update. They do not count towards the time limit
        of a request."""
        self.began_at = time.monotonic()
        """When the engine actor last went from having no request to having one."""

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def take_in(self, prompts: Sequence[PromptRequest]) -> list[PromptRequest]:
        """Take prompts into the account. Returns those whose rollouts may begin now. `set_version` returns the others later."""
        with self._lock:
            self._rollouts |= {prompt.prompt_id: prompt for prompt in prompts}
            return [prompt for prompt in prompts if prompt.issue_version <= self._version]

    def set_version(self, version: int) -> list[PromptRequest]:
        """The engine serves `version` from now on. Returns the prompts that have waited for it. Their rollouts may now begin."""
        with self._lock:
            prompts, self._version = self._waiting_for_version(), version
            return [prompt for prompt in prompts if prompt.issue_version <= version]

    def _waiting_for_version(self) -> list[PromptRequest]:
        """Prompts that arrived before the weights that they were issued for. Their rollouts have not begun."""
        return [prompt for prompt in self._without_request() if prompt.issue_version > self._version]

    def _without_request(self) -> list[PromptRequest]:
        """Prompts whose rollouts have made no request yet."""
        return [prompt for prompt in self._rollouts.values() if prompt is not None]

    def finish_rollout(self, result: GenerationResult) -> None:
        with self._lock:
            self._rollouts.pop(result.prompt_id, None)
            self._outgoing.add(result.prompt_id)
            self._lock.notify_all()

    def delivered(self, results: list[GenerationResult]) -> None:
        """The results are in the results queue."""
        with self._lock:
            self._outgoing.difference_update(result.prompt_id for result in results)
            self._lock.notify_all()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
        """Take in a request to the engine. `prompt` is (Q,) int32. The part of `request_id` before a slash names the prompt.

        An id may not be used again while the engine may still have an earlier request with this id, because the answer would
        go to the wrong request. To give the request up, cancel the future.
        """
        request = TrackedRequest(request_id, prompt, sampling, Future())
        request.reply.add_done_callback(lambda reply: self._give_up(request) if reply.cancelled() else None)
        prompt_id = request_id.partition("/")[0]
        with self._lock:
            assert request_id not in self._requests, request_id
            if prompt_id in self._rollouts:
                self._rollouts[prompt_id] = None
            if not self._requests:
                self.began_at = time.monotonic()
            self._requests[request_id] = request
            self._to_admit.append(request)
            self._lock.notify_all()
        return request.reply

    def _give_up(self, request: TrackedRequest) -> None:
        """The caller no longer waits for the answer. The request occupies no room here from now on. If the engine has the
        request, the engine will abort it."""
        with self._lock:
            if self._requests.pop(request.request_id, None) is None:
                return  # the request was answered or broken off
            if request.admitted is None:
                self._to_admit.remove(request)
            else:
                self._given_up.append(request.request_id)
            self._lock.notify_all()

    def take_given_up(self) -> list[str]:
        """Ids of the requests that the engine has to abort."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
            return given_up

    @property
    def waits_for_admission(self) -> bool:
        return bool(self._to_admit)

    def admit(self) -> TrackedRequest | None:
        """The next request for the engine; its time limit runs from now on. None if no request waits, which can happen at any
        time because a waiting request may be given up."""
        with self._lock:
            if not self._to_admit:
                return None
            request = self._to_admit.popleft()
            request.admitted, request.stood_still_before_s = Moment(), self.stood_still_s
            request.version = self._version
            return request

    def get(self, request_id: str) -> TrackedRequest | None:
        """None if the request was broken off or given up."""
        return self._requests.get(request_id)

    def hand_over(self, request: TrackedRequest, answer: Answer) -> None:
        """The request is done. Its rollout gets the answer, unless the rollout was broken off."""
        with self._lock:
            self._requests.pop(request.request_id, None)  # it may have been given up meanwhile
            if not answer.error:
                self._lengths.append(answer.statistics.num_response_tokens / request.sampling.n)
            self._lock.notify_all()
        if request.reply.set_running_or_notify_cancel():
            request.reply.set_result(answer)

    def later_than(self, limit_s: float) -> list[TrackedRequest]:
        """Requests of rollouts that the engine has had for longer than `limit_s`, without the time in which it stood still."""
        with self._lock:
            requests = [request for request in self._requests.values() if not request.request_id.startswith(DIRECT)]
            return [request for request in requests if self._worked_s(request) > limit_s]

    def _worked_s(self, request: TrackedRequest) -> float:
        if request.admitted is None:
            return 0.0
        return request.admitted.elapsed_s() - (self.stood_still_s - request.stood_still_before_s)

    # --- room ---------------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether one more group may be taken in: always if there is none, else while sequences and tokens are under the limits.

        Too many finished groups that still wait for the results queue prevent it too. A rollout counts with the sequences of its
        current requests, but with at least one sequence, because between two requests it is about to make the next. Before its
        first request a rollout counts with all its samples.
        """
        if len(self._outgoing) > self._max_num_seqs:
            return False
        if not self._requests and not self._rollouts:
            return True
        configs = [prompt.generation_config for prompt in self._without_request()]
        samplings = [request.sampling for request in self._requests.values()]
        num_seqs = max(sum(config.n for config in [*samplings, *configs]), len(self._rollouts))
        length = sum(self._lengths) / len(self._lengths) if self._lengths else math.inf
        num_tokens = sum(request.num_tokens(length) for request in self._requests.values())
        num_tokens += sum(config.n * min(length, config.max_tokens) for config in configs)
        return num_seqs < self._max_num_seqs and num_tokens < self._max_tokens

    @property
    def will_submit(self) -> bool:
        """Whether a rollout has begun that has made no request yet."""
        return any(prompt.issue_version <= self._version for prompt in self._without_request())

    @property
    def num_waiting_for_version(self) -> int:
        """Prompts that wait for the weights that they were issued for."""
        return len(self._waiting_for_version())

    @property
    def num_outstanding_tokens(self) -> int:
        """The largest number of tokens that all requests together can reach."""
        return sum(int(request.num_tokens(math.inf)) for request in self._requests.values())

    @property
    def has_rollouts(self) -> bool:
        """Whether a rollout is under way that has not been handed over."""
        return bool(self._rollouts)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def prompt_ids(self) -> list[str]:
        """Prompts inside this actor, including finished prompts whose results are on their way out."""
        return [*self._rollouts, *self._outgoing]
