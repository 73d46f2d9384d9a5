"""One round of the engine thread: control calls, new requests, one engine step, finished requests."""

import threading
import time
from dataclasses import replace
from typing import Any

from open_instruct.engines.control_calls import ControlCalls
from open_instruct.engines.engine_sleep import EngineSleep
from open_instruct.engines.engine_state import EngineState
from open_instruct.engines.kv_ages import KvAges
from open_instruct.engines.request_tracker import RequestTracker, TrackedRequest
from open_instruct.engines.vllm_engine import VLLMEngine, is_refusal, sampling_params
from open_instruct.system.shared_cores import SharedCores
from open_instruct.workflows.runner import Answer

IDLE_S = 0.05
"""Longest wait of the engine thread when it has nothing to generate."""
FIRST_REQUESTS_S = 0.01
"""Longest time that an idle engine, after a rollout has made its first request, waits for the first requests of other rollouts
that have begun. The first step then takes all of these requests."""


class GenerationLoop:
    """Steps the engine as long as there is something to generate. Its methods run in the thread that owns the engine.

    `generation_timeout`: seconds that a request may take before it is broken off; seconds of weight updates do not count. None is
    no limit.
    """

    def __init__(
        self,
        engine: VLLMEngine,
        sleep: EngineSleep,
        state: EngineState,
        work: RequestTracker,
        calls: ControlCalls,
        lock: threading.Condition,
        cores: SharedCores,
        *,
        kv_ages: KvAges,
        generation_timeout: float | None,
    ) -> None:
        self._engine = engine
        self._sleep = sleep
        self._state = state
        self._work = work
        self._calls = calls
        self._lock = lock
        self._cores = cores
        self._kv_ages = kv_ages
        self._generation_timeout = generation_timeout
        self._last_step_at = self._held_back_at = time.monotonic()
        self.num_generated_tokens = 0
        """Tokens of finished requests."""
        self.busy_s = 0.0
        """Seconds inside engine steps."""

    def tick(self) -> None:
        if not self._state.shall_generate:
            self._held_back_at = time.monotonic()
        if not self._serve_calls():
            return
        if self._state.may_admit:
            self._admit()
        self._abort_given_up()
        self._break_off_late_requests()
        if not self._engine.has_unfinished_requests():
            if self._work.has_rollouts:  # a rollout is between two requests, for instance while it waits for a tool
                self._sleep.note_activity()
            elif self._state.may_fall_asleep:
                self._sleep.sleep_if_due()
            self._wait_for_work()
            return
        self._sleep.note_activity()
        self._cores.compute()
        started = time.perf_counter()
        for output in self._engine.step():
            if output.finished:
                self._finish(output)
        self.busy_s += time.perf_counter() - started
        self._last_step_at = time.monotonic()

    def _serve_calls(self) -> bool:
        """Run control calls, then wait if the engine may not make a step. Returns whether it may."""
        began = time.monotonic()
        self._calls.serve()
        if not (may_step := self._state.may_step):
            self._wait_for_work()
        self._work.stood_still_s += time.monotonic() - began
        return may_step

    def _wait_for_work(self) -> None:
        self._cores.rest()
        with self._lock:
            self._lock.notify_all()  # an update may wait for the engine to be empty
            if not self._calls and not (self._state.may_admit and self._work.waits_for_admission):
                self._lock.wait(IDLE_S)

    def _admit(self) -> None:
        if self._work.waits_for_admission:
            self._sleep.resume()
            if not self._engine.has_unfinished_requests():
                with self._lock:
                    self._lock.wait_for(lambda: self._calls or not self._work.will_submit, FIRST_REQUESTS_S)
        while (request := self._work.admit()) is not None:
            prompt: dict[str, Any] = {"prompt_token_ids": request.prompt.tolist()}
            salt = self._cache_salt(request)
            if salt:
                prompt["cache_salt"] = salt
            try:
                self._engine.add_request(request.request_id, prompt, sampling_params(request.sampling))
                self._kv_ages.note_admitted(request.prompt, version=request.version, salt=salt)
            except Exception as error:  # users write workflows, and one wrong request must not end the engine
                if not is_refusal(error):
                    raise
                self._hand_over(request, request.failed(f"refused by vLLM: {error}"))

    def _cache_salt(self, request: TrackedRequest) -> str:
        return self._kv_ages.salt(request.version, needs_fresh=request.sampling.needs_fresh_cache)

    def _finish(self, output: Any) -> None:
        request = self._work.get(output.request_id)
        if request is not None:  # None: the request was broken off or given up
            answer = request.answer(output)
            completions = self._kv_ages.aged(
                request.prompt,
                output.num_cached_tokens,
                answer.completions,
                version=request.version,
                salt=self._cache_salt(request),
            )
            self._hand_over(request, replace(answer, completions=completions))

    def _hand_over(self, request: TrackedRequest, answer: Answer) -> None:
        self.num_generated_tokens += answer.statistics.num_response_tokens
        self._work.hand_over(request, answer)

    def _abort_given_up(self) -> None:
        """Abort requests that were given up. They would occupy sequences and cache up to their last token."""
        if given_up := self._work.take_given_up():
            self._engine.abort_request(given_up)

    def _break_off_late_requests(self) -> None:
        """Abort requests that have taken longer than `generation_timeout`, and answer them with an error. The others go on."""
        limit_s = self._generation_timeout
        if limit_s is None:
            return
        for request in self._work.later_than(limit_s):
            self._engine.abort_request([request.request_id])
            self._hand_over(request, request.failed(f"generation_timeout: over {limit_s:g} s"))

    @property
    def idle_s(self) -> float:
        """Seconds since the last engine step while there is something to generate and nothing forbids a step; 0 otherwise.

        Time in which a step was forbidden does not count: when an engine wakes up with a request that has waited through its
        sleep, `idle_s` begins at 0.
        """
        if not (self._work.has_requests and self._state.shall_generate):
            return 0.0
        return time.monotonic() - max(self._last_step_at, self._work.began_at, self._held_back_at)
