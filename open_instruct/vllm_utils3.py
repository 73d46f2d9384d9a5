"""The engine actor: one vLLM engine that takes prompts from one Ray queue and puts finished groups on another.

    param_prompt_Q ──get──► puller thread ──inbox──► engine thread: process_queue_continuously()
                            waits while the             control calls ─ admit ─ step ─ hand over finished groups
                            engine has no room                 ▲                              │
    learners, driver ── control calls (weights, stop) ─────────┘       inference_results_Q ◄──put── pusher thread

An item of `param_prompt_Q` is a `list[PromptRequest]`, one of `inference_results_Q` a `list[GenerationResult]` (lists, because a
queue call costs more than what it carries). The run's workflow makes requests to the engine of a prompt (workflow_runner).

One thread owns the engine and steps it. Everybody else posts a command that it runs between two steps (a lock around `step()`
would starve them). The puller asks for a prompt only while the tokens outstanding here are under the engine's limit, so several
engines on the same queues share the work by themselves.
"""

import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Full, Queue

from open_instruct.chat_codec import ChatCodec
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import (
    GenerationResult,
    Moment,
    PromptRequest,
    Sample,
    SamplingConfig,
    ShutdownSentinel,
    TokenStatistics,
)
from open_instruct.engines.engine_sleep import EngineSleep
from open_instruct.engines.vllm_engine import (
    EngineCoreLost,
    EngineOptions,
    VLLMEngine,
    completions_of,
    make_engine,
    sampling_params,
)
from open_instruct.engines.weight_receiver import WeightReceiver, new_abort_file
from open_instruct.engines.worker_memory import cleaned_up_when_this_process_ends
from open_instruct.workflows import builtin as builtin_workflows  # noqa: F401 - a `WorkflowSpec` names them
from open_instruct.workflows.runner import Answer, EngineFacts, RolloutRunner

POLL_S = 0.5
"""Longest wait of a helper thread before it looks whether it should stop."""
IDLE_S = 0.05
"""Longest wait of the engine thread when it has nothing to generate."""


@dataclass
class _Held:
    """A request inside this actor."""

    request_id: str
    prompt: np.ndarray  # (Q,) int32
    sampling: SamplingConfig
    reply: "Future[Answer]"
    admitted: Moment | None = None

    @property
    def num_tokens(self) -> int:
        """Most tokens that the request comes to."""
        return self.sampling.n * (len(self.prompt) + self.sampling.max_tokens)


class LLMRayActor:
    """One vLLM engine. Make it a Ray actor with `create_vllm_engines`; it needs `max_concurrency` of at least 4.

    Public calls answer within `timeout_s` or raise `TimeoutError` that says which call waited for the engine thread.
    """

    def __init__(
        self,
        engine_id: int,
        options: EngineOptions,
        param_prompt_Q: Queue,
        inference_results_Q: Queue,
        *,
        version: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self.engine_id = engine_id
        self.param_prompt_Q = param_prompt_Q
        self.inference_results_Q = inference_results_Q
        self._timeout_s = timeout_s
        self._held: dict[str, _Held] = {}
        """Requests to the engine: those of rollouts, and direct calls."""
        self._rollouts: dict[str, PromptRequest | None] = {}
        """Prompts that are being rolled out, as long as a rollout has not asked the engine for anything."""
        self._inbox: deque[_Held] = deque()
        self._outbox: queue.SimpleQueue[GenerationResult] = queue.SimpleQueue()
        self._commands: deque[tuple[Callable[[], object], Future]] = deque()
        self._lock = threading.Condition()
        self._stopping = threading.Event()
        self._running = False
        self._inflight_updates = options.inflight_updates
        self._closed_until = 0.0
        """Monotonic time until which no group is admitted, because an update waits for the groups that are being generated."""
        self._generation_timeout = options.generation_timeout
        self._outgoing: set[str] = set()
        """Finished groups that were not put into the results queue yet."""
        self._helper_error: BaseException | None = None
        self._num_generated_tokens = 0
        self._busy_s = 0.0
        self._last_step_at = time.monotonic()
        abort_file = new_abort_file()
        with cleaned_up_when_this_process_ends(abort_file):
            self._engine = VLLMEngine(make_engine(options, version), timeout_s=timeout_s)
        self._sleep = EngineSleep(self._engine, options.sleep)
        self._receiver = WeightReceiver(
            self._engine, self._sleep, transport=options.weight_transport, version=version, abort_file=abort_file
        )
        self._runner = self._make_runner(options)
        self._max_num_seqs = options.max_num_seqs
        self._max_tokens = self._engine.kv_cache_tokens

    @property
    def version(self) -> int:
        """Version of the weights that this engine serves."""
        return self._receiver.version

    # --- generation ---------------------------------------------------------------------------------------------------

    def process_queue_continuously(self) -> None:
        """Serve `param_prompt_Q` until `stop`. Consumes prompts, produces `GenerationResult`s; blocks only while idle.

        Raises what went wrong in the engine or in a helper thread: the future of this call is the engine's sign of life.
        """
        helpers = [
            threading.Thread(target=self._guard, args=(work,), name=work.__name__, daemon=True)
            for work in (self._pull_prompts, self._push_results)
        ]
        self._running = True
        for helper in helpers:
            helper.start()
        try:
            while not self._stopping.is_set():
                self._raise_helper_error()
                self._tick()
        finally:
            self._running = False
            self._stopping.set()
            self._fail_pending_commands()
            self._runner.close()
            for helper in helpers:
                helper.join(timeout=2 * POLL_S + 1.0)

    def generate_with_single_engine(
        self, prompts: Sequence[np.ndarray], generation_config: SamplingConfig, *, timeout_s: float | None = None
    ) -> list[GenerationResult]:
        """Responses to `prompts` (each (Q,) int32) straight from this engine, past the queues; in the order of `prompts`."""
        ids = [f"direct-{time.monotonic_ns()}-{number}" for number in range(len(prompts))]
        replies = [self._submit(*request, generation_config) for request in zip(ids, prompts, strict=True)]
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        while not self._running and not all(reply.done() for reply in replies):
            if time.monotonic() > deadline:
                raise TimeoutError(f"engine {self.engine_id}: {len(prompts)} prompts not done in time")
            self._tick()
        answers = [reply.result(timeout=max(0.0, deadline - time.monotonic())) for reply in replies]
        return [
            GenerationResult(
                samples=[
                    Sample(prompt, one.token_ids, one.logprobs, one.finish_reason, one.version_spans)
                    for one in answer.completions
                ],
                index=number,
                prompt_id=ids[number],
                issue_version=self.version,
                engine_id=self.engine_id,
                token_statistics=answer.statistics,
                error=answer.error,
            )
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def _tick(self) -> None:
        """One round of the engine thread: control calls, new prompts, one engine step, finished groups."""
        self._run_commands()
        if self._receiver.is_paused:
            self._wait_for_work()
            return
        if time.monotonic() >= self._closed_until and self._sleep.may_admit:
            self._admit()
        self._break_off_late_groups()
        if not self._engine.has_unfinished_requests():
            self._sleep.sleep_if_due()
            self._wait_for_work()
            return
        self._sleep.has_work()
        started = time.perf_counter()
        for output in self._engine.step():
            if output.finished:
                self._finish(output)
        self._busy_s += time.perf_counter() - started
        self._last_step_at = time.monotonic()

    def _wait_for_work(self) -> None:
        with self._lock:
            self._lock.notify_all()  # an update may wait for the engine to be empty
            if not self._commands and (
                self._receiver.is_paused or self._closed_until or not self._sleep.may_admit or not self._inbox
            ):
                self._lock.wait(IDLE_S)

    def _admit(self) -> None:
        if self._inbox:
            self._sleep.resume()
        while self._inbox:
            held = self._inbox.popleft()
            held.admitted = Moment()
            self._engine.add_request(
                held.request_id, {"prompt_token_ids": held.prompt.tolist()}, sampling_params(held.sampling)
            )

    def _finish(self, output: Any) -> None:
        if output.request_id in self._held:  # else it was broken off
            held = self._held[output.request_id]
            self._hand_over(held, _to_answer(output, held))

    def _hand_over(self, held: _Held, answer: Answer) -> None:
        with self._lock:
            del self._held[held.request_id]
            self._lock.notify_all()
        self._num_generated_tokens += answer.statistics.num_response_tokens
        if held.reply.set_running_or_notify_cancel():  # else the rollout that asked was broken off
            held.reply.set_result(answer)

    def _break_off_late_groups(self) -> None:
        """Send groups back with an error that have taken longer than `generation_timeout`. Other groups go on."""
        if self._generation_timeout is None:
            return
        with self._lock:  # other threads take prompts in meanwhile
            begun = [(held, held.admitted) for held in self._held.values() if held.admitted is not None]
        for held, admitted in begun:
            if admitted.elapsed_s() <= self._generation_timeout:
                continue
            self._engine.abort_request([held.request_id])
            statistics = TokenStatistics(len(held.prompt), 0, admitted.elapsed_s(), admitted.unix)
            self._hand_over(held, Answer([], statistics, f"generation_timeout: over {self._generation_timeout:g} s"))

    def _accept(self, held: _Held) -> None:
        with self._lock:
            if not self._held:
                self._last_step_at = time.monotonic()
            self._held[held.request_id] = held
            self._inbox.append(held)
            self._lock.notify_all()

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _make_runner(self, options: EngineOptions) -> RolloutRunner:
        @functools.cache
        def read_codec() -> ChatCodec:
            name = options.tokenizer or options.model
            return ChatCodec(read_tokenizer(name, options.tokenizer_revision or options.revision))

        facts = EngineFacts(self.engine_id, options.max_model_len, read_codec)
        return RolloutRunner(options.workflow.make(), facts, self._submit, self._hand_over_rollout, self._fail)

    def _begin_rollout(self, request: PromptRequest) -> None:
        with self._lock:
            self._rollouts[request.prompt_id] = request
        self._runner.start(request)

    def _submit(self, request_id: str, prompt: np.ndarray, sampling: SamplingConfig) -> "Future[Answer]":
        reply: Future[Answer] = Future()
        prompt_id = request_id.partition("/")[0]
        with self._lock:
            if prompt_id in self._rollouts:
                self._rollouts[prompt_id] = None
        self._accept(_Held(request_id, prompt, sampling, reply))
        return reply

    def _hand_over_rollout(self, result: GenerationResult) -> None:
        with self._lock:
            self._rollouts.pop(result.prompt_id, None)
            self._outgoing.add(result.prompt_id)
            self._lock.notify_all()
        self._outbox.put(result)

    def _fail(self, error: BaseException) -> None:
        self._helper_error = error

    # --- room ---------------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether one more group may be admitted: always if there is none, else while sequences and tokens are under the limits.

        Results that nobody takes close the door too. A rollout counts for the requests that it has here at the moment, but for
        one sequence at least: between two requests it is about to come back. Before its first request it counts for all samples.
        """
        if len(self._outgoing) > self._max_num_seqs:
            return False
        if not self._held and not self._rollouts:
            return True
        begun = [request.generation_config for request in self._rollouts.values() if request is not None]
        held = [held.sampling for held in self._held.values()]
        num_seqs = max(sum(config.n for config in [*held, *begun]), len(self._rollouts))
        num_tokens = sum(held.num_tokens for held in self._held.values())
        num_tokens += sum(config.n * config.max_tokens for config in begun)
        return num_seqs < self._max_num_seqs and num_tokens < self._max_tokens

    # --- helper threads -----------------------------------------------------------------------------------------------

    def _pull_prompts(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                if not self._lock.wait_for(self._has_room, timeout=POLL_S):
                    continue
            try:
                bundle = self.param_prompt_Q.get(timeout=POLL_S)
            except Empty:
                continue
            if isinstance(bundle, ShutdownSentinel):
                self.stop()
                return
            for request in bundle:
                self._begin_rollout(request)

    def _push_results(self) -> None:
        while not self._stopping.is_set():
            try:
                results = [self._outbox.get(timeout=POLL_S)]
            except queue.Empty:
                continue
            while not self._outbox.empty():  # what came meanwhile goes along: a queue call costs more than its items
                results.append(self._outbox.get())
            self._put_results(results)

    def _put_results(self, results: list[GenerationResult]) -> None:
        while not self._stopping.is_set():
            try:
                self.inference_results_Q.put(results, timeout=POLL_S)
                with self._lock:
                    self._outgoing.difference_update(result.prompt_id for result in results)
                    self._lock.notify_all()
                return
            except Full:
                continue

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._fail(error)

    def _raise_helper_error(self) -> None:
        if self._helper_error is not None:
            raise RuntimeError(f"engine {self.engine_id}: a helper thread died") from self._helper_error

    # --- control calls ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `process_queue_continuously` after the engine step it is in."""
        self._stopping.set()
        with self._lock:
            self._lock.notify_all()

    def shutdown(self) -> None:
        """After `stop`: end the engine and its processes, if it has any."""
        self._engine.shutdown()

    def ready(self) -> int:
        """The id of the engine, as soon as the engine is loaded."""
        return self.engine_id

    def pid(self) -> int:
        return os.getpid()

    def take_inventory(self) -> dict[str, Any]:
        """What this engine holds and how it is doing. Answered at once, whatever the engine thread is doing.

        `held`: ids of prompts inside, finished ones on their way out included; `num_outstanding_tokens` that they may still come
        to; `version`; `num_generated_tokens` of finished groups and `busy_s` inside engine steps since the start; `idle_s` since
        the last engine step, while there is something to generate and no update, which has a limit of its own; `state`;
        `needs_weights`: prompts wait, and the weights were dropped in sleep.
        """
        with self._lock:
            held = [*self._rollouts, *self._outgoing]
            num_tokens = sum(one.num_tokens for one in self._held.values())
            is_busy = bool(self._held) and self._sleep.may_admit and not self._receiver.is_under_way
        return {
            "engine_id": self.engine_id,
            "held": held,
            "num_outstanding_tokens": num_tokens,
            "state": self._state_name,
            "needs_weights": self._sleep.needs_weights and bool(self._held or held),
            "num_sleeps": self._sleep.num_sleeps,
            "asleep_s": self._sleep.asleep_s,
            "memory_released_bytes": self._sleep.memory_released_bytes,
            "version": self.version,
            "num_generated_tokens": self._num_generated_tokens,
            "busy_s": self._busy_s,
            "idle_s": time.monotonic() - self._last_step_at if is_busy else 0.0,
        }

    @property
    def _state_name(self) -> str:
        if self._stopping.is_set():
            return "stopped"
        if self._receiver.is_under_way or self._receiver.is_paused:
            return "updating"
        if self._closed_until:
            return "draining"
        return "asleep" if self._sleep.is_asleep else "serving"

    def release_memory_occupation(self, *, keep_weights: bool = False) -> int:
        """Finish what is being generated, then fall asleep until `resume_memory_occupation`; the bytes that this gave back.

        Without `keep_weights` an engine whose sleep has level 2 generates only after new weights have come.
        """
        self._drain()
        try:
            return self._on_engine_thread(lambda: self._sleep.release(told=True, keep_weights=keep_weights))
        finally:
            self._closed_until = 0.0

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take back `weights`, `kv_cache` or both."""
        self._on_engine_thread(lambda: self._sleep.resume(tags))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._on_engine_thread(lambda: self._receiver.connect(init_info))

    def weight_fingerprints(self) -> dict[str, float]:
        """A checksum of the values of each parameter, by `name` or `name of worker 1`."""
        of_workers = self._on_engine_thread(lambda: self._engine.collective_rpc("weight_fingerprints"))
        return {
            f"{name} of worker {rank}" if rank else name: value
            for rank, of_worker in enumerate(of_workers)
            for name, value in of_worker.items()
        }

    def start_weight_update(self, update_id: int | None = None) -> None:
        """Begin an update. An earlier update that was not finished is given up.

        With in-flight updates responses go on with the new weights afterwards. Without, the engine first finishes what it has
        begun. Updates are numbered upwards; None is the next, and in the calls below the one under way.
        """
        if not self._inflight_updates:
            self._drain()
        self._on_engine_thread(lambda: self._receiver.begin(update_id))

    def _drain(self) -> None:
        """Wait until no group is being generated. New prompts wait too, until the engine is opened again."""
        self._on_engine_thread(self._close)
        with self._lock:
            if not self._lock.wait_for(lambda: not self._engine.has_unfinished_requests(), self._timeout_s):
                self._closed_until = 0.0
                raise TimeoutError(f"engine {self.engine_id}: responses went on for {self._timeout_s:g} s")

    def _close(self) -> None:
        self._closed_until = time.monotonic() + self._timeout_s

    def update_weights(self, update_info: dict[str, Any], update_id: int | None = None) -> None:
        """Receive one bucket. `{"bucket": ObjectRef}` is fetched here, off the engine thread."""
        if "bucket" in update_info:
            update_info = ray.get(update_info["bucket"], timeout=self._timeout_s)

        self._on_engine_thread(lambda: self._receiver.receive(update_info, update_id))

    def finish_weight_update(self, version: int, update_id: int | None = None) -> dict[str, float]:
        """Swap the weights between two engine steps. Returns the `version` that is served now, and `pause_s`, the seconds that it
        took."""

        def finish() -> dict[str, float]:
            answer = self._receiver.finish(version, update_id)
            self._closed_until = 0.0
            return answer

        return self._on_engine_thread(finish)

    def abort_weight_update(self) -> None:
        """The rest of the update under way will not come: stop the workers from waiting for it. Answered at once."""
        self._receiver.abort()

    def _on_engine_thread(self, command: Callable[[], Any]) -> Any:
        """Run `command` between two engine steps and return what it returns."""
        if not self._running:
            return command()
        done: Future = Future()
        with self._lock:
            self._commands.append((command, done))
            self._lock.notify_all()
        try:
            return done.result(timeout=self._timeout_s)
        except TimeoutError as error:
            waited = (
                f"engine {self.engine_id}: the engine thread did not take up a control call for {self._timeout_s:g} s"
            )
            raise TimeoutError(waited) from error

    def _run_commands(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            try:
                done.set_result(command())
            except EngineCoreLost as error:
                done.set_exception(error)
                raise
            except Exception as error:  # the caller's error, not the engine's
                done.set_exception(error)

    def _fail_pending_commands(self) -> None:
        while self._commands:
            _, done = self._commands.popleft()
            done.set_exception(RuntimeError(f"engine {self.engine_id} has stopped"))


def _to_answer(output: Any, held: _Held) -> Answer:
    admitted, completions = held.admitted or Moment(), completions_of(output)
    statistics = TokenStatistics(
        num_prompt_tokens=len(held.prompt),
        num_response_tokens=sum(len(completion.token_ids) for completion in completions),
        generation_time=admitted.elapsed_s(),
        start_time=admitted.unix,
    )
    return Answer(completions, statistics)
