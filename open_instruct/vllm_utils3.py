"""The engine actor: one vLLM engine that takes prompts from one Ray queue and puts finished groups on another.

    param_prompt_Q ──get──► puller thread ──► rollouts ──► engine thread: process_queue_continuously()
                            waits while the                  control calls ─ admit ─ step ─ finished requests
                            engine has no room                  ▲                              │
    learners, driver ── control calls (weights, stop) ──────────┘       inference_results_Q ◄──put── pusher thread

Each item of `param_prompt_Q` is a `list[PromptRequest]`, and each item of `inference_results_Q` is a `list[GenerationResult]`.
They are lists because a queue call costs more than its content. The run's workflow turns a prompt into requests to the engine
(workflows/runner.py).
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.util.queue import Queue

from open_instruct.chat_codec import ChatCodec
from open_instruct.cluster.ray_utils import file_of_job
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import GenerationResult, Sample, SamplingConfig
from open_instruct.engines.control_calls import ControlCalls
from open_instruct.engines.engine_cleanup import cleaned_up_when_this_process_ends
from open_instruct.engines.engine_sleep import EngineSleep
from open_instruct.engines.engine_state import EngineState
from open_instruct.engines.generation_loop import GenerationLoop
from open_instruct.engines.queue_threads import QueueThreads
from open_instruct.engines.request_tracker import DIRECT, RequestTracker
from open_instruct.engines.vllm_engine import EngineOptions, VLLMEngine, make_engine
from open_instruct.engines.vllm_tool_parsers import VllmParsers
from open_instruct.engines.weight_receiver import WeightReceiver, new_abort_file
from open_instruct.system.shared_cores import FILE_NAME, SharedCores
from open_instruct.system.short_lived_thread import run_in_short_lived_thread
from open_instruct.system.work_threads import POLL_S, WorkThreads
from open_instruct.workflows import builtin as builtin_workflows  # noqa: F401 - a `WorkflowSpec` names them
from open_instruct.workflows.runner import EngineFacts, RolloutRunner


class LLMRayActor:
    """One vLLM engine. Make it a Ray actor with `create_vllm_engines`; it needs `max_concurrency` of at least 4.

    Control calls wait at most `timeout_s` for the engine thread, then raise `TimeoutError`.
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
        self._timeout_s = timeout_s
        self._inflight_updates = options.inflight_updates
        abort_file = new_abort_file()
        with cleaned_up_when_this_process_ends(abort_file):
            engine = run_in_short_lived_thread(lambda: make_engine(options, version))
            self._engine = VLLMEngine(engine, timeout_s=timeout_s)
        self._sleep = EngineSleep(self._engine, options.sleep)
        self._receiver = WeightReceiver(
            self._engine,
            self._sleep,
            transport=options.weight_transport,
            version=version,
            abort_file=abort_file,
            recomputes_cache=options.kv_cache_use == "recomputed",
        )
        self._threads = threads = WorkThreads(f"engine {engine_id}")
        self._state = EngineState(self._sleep, self._receiver, threads.stopping)
        self._work = RequestTracker(
            threads.lock, max_num_seqs=options.max_num_seqs, max_tokens=self._engine.kv_cache_tokens, version=version
        )
        self._calls = ControlCalls(engine_id, threads.lock, timeout_s=timeout_s)
        self._loop = GenerationLoop(
            self._engine,
            self._sleep,
            self._state,
            self._work,
            self._calls,
            threads.lock,
            SharedCores(file_of_job(FILE_NAME), options.cores) if options.cores else SharedCores(),
            kv_ages=self._engine.kv_ages(options.kv_cache_use),
            generation_timeout=options.generation_timeout,
        )
        self._queues = QueueThreads(
            threads,
            self._work,
            param_prompt_Q,
            inference_results_Q,
            lambda requests: self._runner.start(*requests),
            gather_s=options.gather_s,
        )
        codec = _codec_reader(options)
        self._runner = RolloutRunner(
            options.workflow.make(),
            EngineFacts(engine_id, options.max_model_len, codec, VllmParsers(codec), options.max_prompt_tokens),
            self._work.submit,
            self._queues.hand_over,
            threads.fail,
        )

    @property
    def version(self) -> int:
        """Version of the weights that this engine serves."""
        return self._receiver.version

    # --- generation ---------------------------------------------------------------------------------------------------

    def process_queue_continuously(self) -> None:
        """Serve `param_prompt_Q` until `stop`. Consumes prompts, produces `GenerationResult`s; blocks only while idle.

        Raises the error that ended the engine or a helper thread, so the future of this call shows whether the engine lives.
        """
        threads = self._threads
        self._calls.is_served = True
        threads.start(self._queues.pull_prompts, self._queues.push_results)
        try:
            while not threads.stopping.is_set():
                threads.raise_error()
                self._loop.tick()
        finally:
            threads.stop()
            self._calls.close()
            self._runner.close()
            threads.join(timeout_s=2 * POLL_S + 1.0)

    def generate_with_single_engine(
        self, prompts: Sequence[np.ndarray], generation_config: SamplingConfig, *, timeout_s: float | None = None
    ) -> list[GenerationResult]:
        """Responses to `prompts` (each (Q,) int32) directly from this engine, without the queues; in the order of `prompts`."""
        ids = [f"{DIRECT}{time.monotonic_ns()}-{number}" for number in range(len(prompts))]
        replies = [self._work.submit(*request, generation_config) for request in zip(ids, prompts, strict=True)]
        deadline = time.monotonic() + (timeout_s or self._timeout_s)

        def generate() -> None:
            while not self._calls.is_served and not all(reply.done() for reply in replies):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"engine {self.engine_id}: {len(prompts)} prompts not done in time")
                self._loop.tick()

        try:
            run_in_short_lived_thread(generate)
            answers = [reply.result(timeout=max(0.0, deadline - time.monotonic())) for reply in replies]
        finally:
            for reply in replies:
                reply.cancel()  # gives up a request that is not done in time
        return [
            GenerationResult(
                samples=[
                    Sample(
                        prompt,
                        completion.token_ids,
                        completion.logprobs,
                        completion.finish_reason,
                        completion.version_spans,
                    )
                    for completion in answer.completions
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

    # --- control calls ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `process_queue_continuously` after the current engine step."""
        self._threads.stop()

    def shutdown(self) -> None:
        """After `stop`: end the engine and its processes, if it has any."""
        self._engine.shutdown()

    def ready(self) -> int:
        """The id of the engine, as soon as the engine is loaded."""
        return self.engine_id

    def pid(self) -> int:
        return os.getpid()

    def take_inventory(self) -> dict[str, Any]:
        """What this engine holds, and its state. Answered at once, whatever the engine thread is doing.

        `held`: ids of the prompts inside, including finished prompts on their way out. `num_outstanding_tokens`: the most tokens
        that the requests to the engine can reach. `num_generated_tokens` and `busy_s`: tokens of finished requests and seconds
        inside engine steps, since the start. `idle_s`: seconds since the last engine step while there is something to generate
        and no update, because updates have their own limit. `needs_weights`: prompts wait, but sleep dropped the weights.
        """
        work, sleep, loop = self._work, self._sleep, self._loop
        with self._threads.lock:
            prompt_ids = work.prompt_ids
            return {
                "engine_id": self.engine_id,
                "held": prompt_ids,
                "num_outstanding_tokens": work.num_outstanding_tokens,
                "state": self._state.name,
                "needs_weights": sleep.needs_weights
                and (work.has_requests or len(prompt_ids) > work.num_waiting_for_version),
                "num_sleeps": sleep.num_sleeps,
                "asleep_s": sleep.asleep_s,
                "memory_released_bytes": sleep.memory_released_bytes,
                "version": self.version,
                "num_generated_tokens": loop.num_generated_tokens,
                "busy_s": loop.busy_s,
                "idle_s": loop.idle_s,
            }

    def release_memory_occupation(self, *, keep_weights: bool = False) -> int:
        """Finish what is being generated, then sleep until `resume_memory_occupation`. Returns the number of bytes released.

        Without `keep_weights`, sleep at level 2 drops the weights, and the engine generates only after new weights have arrived.
        """
        self._drain()
        try:
            return self._calls.run(lambda: self._sleep.release(on_request=True, level=1 if keep_weights else None))
        finally:
            self._state.open()

    def leave_devices(self) -> int:
        """The run ends: stop serving, break off what is being generated, and sleep for good. Returns the number of bytes
        released. A run that resumes from here generates what was not finished."""
        self.stop()
        with self._threads.lock:
            if not self._threads.lock.wait_for(lambda: not self._calls.is_served, self._timeout_s):
                raise TimeoutError(f"engine {self.engine_id}: its last step went on for {self._timeout_s:g} s")
        return self._calls.run(lambda: self._sleep.release(on_request=True, level=2))  # no copy of weights

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take back `weights`, `kv_cache` or both."""
        self._calls.run(lambda: self._sleep.resume(tags))

    def weight_fingerprints(self) -> dict[str, float]:
        """A checksum of the values of each parameter, by `name` or `name of worker 1`."""
        replies = self._calls.run(lambda: self._engine.collective_rpc("weight_fingerprints"))
        return {
            f"{name} of worker {rank}" if rank else name: value
            for rank, fingerprints in enumerate(replies)
            for name, value in fingerprints.items()
        }

    # --- weight updates -----------------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the learners' transfer group."""
        self._calls.run(lambda: self._receiver.connect(init_info))

    def start_weight_update(self, update_id: int | None = None) -> None:
        """Begin an update. An earlier update that was not finished is given up.

        With in-flight updates, responses under way go on with the new weights afterwards. Otherwise the engine finishes them
        first. Update numbers increase. `update_id` None means the next number here, and in the calls below the update under way.
        """
        if not self._inflight_updates:
            self._drain(hold_s=2 * self._timeout_s)  # as long as an update may take (`WeightUpdateClient`)
        self._calls.run(lambda: self._receiver.begin(update_id))

    def _drain(self, *, hold_s: float | None = None) -> None:
        """Wait until no group is being generated, at most `timeout_s`. New prompts are held back until the engine is opened
        again, at most for `hold_s` (by default `timeout_s`)."""
        self._calls.run(lambda: self._state.drain(hold_s or self._timeout_s))
        lock = self._threads.lock
        with lock:
            if not lock.wait_for(lambda: not self._engine.has_unfinished_requests(), self._timeout_s):
                self._state.open()
                raise TimeoutError(f"engine {self.engine_id}: responses went on for {self._timeout_s:g} s")

    def update_weights(self, update_info: dict[str, Any], update_id: int | None = None) -> None:
        """Receive one bucket. `{"bucket": ObjectRef}` is fetched here, off the engine thread."""
        if "bucket" in update_info:
            update_info = ray.get(update_info["bucket"], timeout=self._timeout_s)

        self._calls.run(lambda: self._receiver.receive(update_info, update_id))

    def finish_weight_update(self, version: int, update_id: int | None = None) -> dict[str, float]:
        """Swap the weights between two engine steps. Returns the `version` that is served now, and `pause_s`, the seconds that
        the swap took."""

        def finish() -> dict[str, float]:
            answer = self._receiver.finish(version, update_id)
            self._runner.start(*self._work.set_version(version))
            self._state.open()
            return answer

        return self._calls.run(finish)

    def abort_weight_update(self) -> None:
        """Make the workers stop waiting for the rest of the update under way, because it will never be sent. Answered at once."""
        self._receiver.abort()


def _codec_reader(options: EngineOptions) -> Callable[[], ChatCodec]:
    """A function that reads the tokenizer on its first call only, because most workflows need none."""

    @functools.cache
    def read_codec() -> ChatCodec:
        name = options.tokenizer or options.model
        revision = options.tokenizer_revision or options.revision
        return ChatCodec(read_tokenizer(name, revision, options.tokenizer_setup))

    return read_codec
