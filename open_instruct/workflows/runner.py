"""Rollouts inside an engine actor. They run in an event loop of their own, in parallel with the thread that steps the engine.

    LLMRayActor ── prompt ──► RolloutRunner: Workflow.run(request, ctx) ── ctx.generate, as a request of its own ──► engine thread
                ◄── result ──                                          ◄── its responses ──────────────────────────

Between two of its requests a rollout occupies nothing in the engine. Each request therefore queues like any other, and the engine
may receive new weights between two requests of one rollout.
"""

import asyncio
import contextvars
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import (
    Completion,
    GenerationResult,
    Moment,
    PromptRequest,
    Sample,
    SamplingConfig,
    TokenStatistics,
)
from open_instruct.workflows.base import (
    CallFailed,
    CallParser,
    Context,
    Effect,
    GenerationFailed,
    RolloutFailed,
    Tool,
    Trajectory,
    Workflow,
    first_of,
)
from open_instruct.workflows.effects import EffectOutsideContext, allowed, task_factory, watched

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for the event loop to end."""
MOST_ERRORS_IN_A_ROW = 8
"""The engine ends after this many rollouts in a row have failed with an error in the workflow's own code: at the eighth."""
WATCHED_FIRST, WATCHED_EVERY = 8, 64
"""Which rollouts are watched for effects outside their context: the first 8 of an engine, then every 64th. Watching all rollouts
would cost time, and a workflow that reads a clock does so in most of its rollouts."""
TOOL_THREADS = 64
"""Most plain-function tools that run at once. Coroutine functions need no thread."""


@dataclass(frozen=True)
class Answer:
    """The engine's answer to one request."""

    completions: list[Completion]
    statistics: TokenStatistics
    error: str = ""
    """Why there are no completions; empty if there are."""


Submit = Callable[[str, np.ndarray, SamplingConfig], "Future[Answer]"]
"""Hands a request to the engine: `(request id, token ids, sampling)`. Cancelling the future cancels the request."""


@dataclass(frozen=True)
class EngineFacts:
    """What rollouts need to know about the engine that they run in."""

    engine_id: int
    max_model_len: int
    read_codec: Callable[[], ChatCodec]
    """Returns the same object on every call."""
    vllm_parser: Callable[[str, Sequence[Mapping[str, Any]]], CallParser] | None = None
    """As `Context.vllm_parser`; None where there is no vLLM."""
    max_prompt_tokens: int | None = None
    """As `Context.max_prompt_tokens`; None where only the model sets a limit."""


GENERATE = "generate"
"""Kind of the effects that ask the engine."""


class ToolTime:
    """Seconds in which a rollout waited only for tools: at least one call was running, and no request to the engine; and when
    each effect was under way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.effects: list[tuple[str, str, float, float]] = []
        """Kind, name, seconds from now to its begin, and seconds, in the order of their ends."""
        self._began = time.monotonic()
        self._under_way = {"call": 0, "request": 0}
        self._changed_at = 0.0

    @contextmanager
    def during(self, kind: Literal["call", "request"], effect: Effect, subject: str) -> Iterator[None]:
        """`subject`: `generate`, or the tool that is called."""
        began = self._count(kind, 1)
        try:
            yield
        finally:
            seconds = self._count(kind, -1) - began
            self.effects.append((subject, str(effect), round(began - self._began, 3), round(seconds, 3)))

    def _count(self, kind: str, by: int) -> float:
        """Returns the time."""
        with allowed():
            now = time.monotonic()
        if self._under_way["call"] and not self._under_way["request"]:
            self.seconds += now - self._changed_at
        self._changed_at = now
        self._under_way[kind] += by
        return now


class EngineContext(Context):
    """The context of one rollout inside an engine actor.

    Args:
        number: number of the rollout among all rollouts of this engine. A prompt that is issued again keeps its id, and its
            effects keep their names and numbers. Only this number tells its requests from those of the earlier rollout.
    """

    def __init__(
        self, request: PromptRequest, facts: EngineFacts, submit: Submit, tools: "ToolBox", *, number: int = 0
    ) -> None:
        super().__init__(
            seed=request.generation_config.seed or 0,
            max_model_len=facts.max_model_len,
            max_prompt_tokens=facts.max_prompt_tokens,
        )
        self._prompt_id = request.prompt_id
        self._is_eval = request.is_eval
        self._number = number
        self._submit = submit
        self._asked: set[Future[Answer]] = set()
        """Open requests."""
        self._is_over = False
        self._tools = tools
        self._facts = facts
        self.answers: list[TokenStatistics] = []
        self.tool_time = ToolTime()

    @property
    def codec(self) -> ChatCodec:
        return self._facts.read_codec()

    def vllm_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> CallParser:
        if self._facts.vllm_parser is None:
            raise RolloutFailed("this engine has no parsers of vLLM")
        with allowed():
            parse = self._facts.vllm_parser(name, schemas)

        def calls(text: str) -> list[tuple[str, str]]:
            with allowed():  # parsers draw an id for each call
                return parse(text)

        return calls

    def _generate(
        self, effect: Effect, prompt_ids: np.ndarray, sampling: SamplingConfig
    ) -> Awaitable[list[Completion]]:
        if len(prompt_ids) + sampling.max_tokens > self.max_model_len:
            raise RolloutFailed(
                f"{effect}: a prompt of {len(prompt_ids)} tokens and {sampling.max_tokens} more do not fit into the "
                f"{self.max_model_len} that the model takes"
            )
        if self._is_over:
            raise RolloutFailed(f"{effect}: the rollout has ended")
        request_id = f"{self._prompt_id}/{effect}/{self._number}"
        if self._is_eval:
            sampling = replace(sampling, needs_fresh_cache=True)
        return self._wait_for(effect, self._submit(request_id, prompt_ids, sampling))

    async def _wait_for(self, effect: Effect, future: "Future[Answer]") -> list[Completion]:
        self._asked.add(future)
        try:
            with self.tool_time.during("request", effect, GENERATE):
                answer = await asyncio.wrap_future(future)  # cancelling this task cancels the request
        finally:
            self._asked.discard(future)
        self.answers.append(answer.statistics)
        if answer.error:
            raise GenerationFailed(answer.error)
        return answer.completions

    def end(self) -> None:
        """The rollout has ended. Cancel the requests of tasks that it left behind, and refuse further requests from them."""
        self._is_over = True
        for future in self._asked:
            future.cancel()

    def _call(self, effect: Effect, tool: str, arguments: Any, timeout_s: float) -> Awaitable[Any]:
        # Tools may read clocks and draw numbers, so they run in a `contextvars` context of their own, which is not watched.
        return asyncio.get_running_loop().create_task(
            self._timed_call(effect, tool, arguments, timeout_s), context=contextvars.Context()
        )

    async def _timed_call(self, effect: Effect, tool: str, arguments: Any, timeout_s: float) -> Any:
        try:
            with self.tool_time.during("call", effect, tool):
                return await asyncio.wait_for(self._tools.call(tool, arguments), timeout_s)
        except TimeoutError as error:
            raise CallFailed(f"{effect}: {tool} did not answer in {timeout_s:g} s") from error
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # a tool may raise anything, such as the `SystemExit` of an argument parser
            raise CallFailed(f"{effect}: {tool} failed: {type(error).__name__}: {error}") from error

    def _now(self, effect: Effect) -> float:
        del effect
        return time.time()


class ToolBox:
    """The tools of a workflow. Coroutine functions run in the event loop, plain functions in threads."""

    def __init__(self, tools: "dict[str, Tool]") -> None:
        self._tools = tools
        self._threads = ThreadPoolExecutor(TOOL_THREADS, thread_name_prefix="tool")

    async def call(self, name: str, arguments: Any) -> Any:
        tool = self._tools[name]
        if inspect.iscoroutinefunction(tool):
            return await tool(arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, tool, arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class RolloutRunner:
    """Takes prompts and gives back results.

    Args:
        submit: hands a request to the engine. Called from the event loop's thread.
        finish: receives every result, including the results of failed rollouts. Called from the event loop's thread.
        fail: receives an error that has to end the engine.
    """

    def __init__(
        self,
        workflow: Workflow,
        facts: EngineFacts,
        submit: Submit,
        finish: Callable[[GenerationResult], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._workflow = workflow
        self._facts = facts
        self._submit = submit
        self._finish = finish
        self._fail = fail
        self._tools = ToolBox(dict(workflow.engine_tools()))
        self._num_rollouts = 0
        self._num_errors_in_a_row = 0
        self._under_way: set[asyncio.Task[None]] = set()
        """References to the running tasks, because an event loop holds only weak references."""
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(task_factory)
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """The thread of the event loop. asyncio raises the `SystemExit` of a task out of the loop and also gives it to the
        coroutine that awaits the task. One rollout must not end the others, so the loop goes on."""
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt) as error:
                logger.debug("a task of a rollout raised %s", type(error).__name__)

    def start(self, *requests: PromptRequest) -> None:
        """Start rollouts and return at once. Several prompts are handed to the event loop in one call, because each call wakes
        the loop's thread."""
        self._loop.call_soon_threadsafe(self._start, requests)

    def _start(self, requests: Sequence[PromptRequest]) -> None:
        for request in requests:
            task = self._loop.create_task(self._run(request))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def close(self) -> None:
        """Cancel the running rollouts. No result is delivered after this call. May be called twice."""
        if not self._thread.is_alive():
            return
        self._is_closing = True
        with suppress(Exception):  # a rollout may refuse to end; then the thread ends with the process
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._tools.close()
        self._workflow.close()

    async def _run(self, request: PromptRequest) -> None:
        try:
            self._finish(await self._result(request))
        except BaseException as error:  # `fail` ends the engine's thread with this error
            if self._is_ended_by(error):
                raise
            self._fail(error)

    async def _result(self, request: PromptRequest) -> GenerationResult:
        began, number = Moment(), self._num_rollouts
        self._num_rollouts += 1
        ctx = EngineContext(request, self._facts, self._submit, self._tools, number=number)
        is_watched = number < WATCHED_FIRST or number % WATCHED_EVERY == 0
        try:
            rollout = self._workflow.run(request, ctx)
            if not inspect.isawaitable(rollout):
                raise TypeError("run is no coroutine function: write `async def run(self, request, ctx)`")
            trajectory = await (watched(rollout) if is_watched else rollout)
            if not isinstance(trajectory, Trajectory):
                raise TypeError(f"run gave {type(trajectory).__name__}: it must give a Trajectory")
            check_samples(trajectory.samples)
        except BaseException as error:  # also `SystemExit`, and a `CancelledError` that is not of `close`
            if self._is_ended_by(error):
                raise
            return GenerationResult.given_up(request, self._facts.engine_id, self._cause(first_of(error)), began)
        finally:
            ctx.end()
        self._num_errors_in_a_row = 0
        return self._to_result(request, trajectory, ctx, began)

    def _is_ended_by(self, error: BaseException) -> bool:
        """Whether the error is a cancellation by `close`."""
        return self._is_closing and isinstance(error, asyncio.CancelledError)

    def _cause(self, error: BaseException) -> str:
        """Why a rollout is given up. An error in the workflow's code costs only one rollout, because users write workflows. An
        effect outside the context, or the last of `MOST_ERRORS_IN_A_ROW` errors in a row, is raised, which ends the engine."""
        if isinstance(error, RolloutFailed):
            return str(error)
        self._num_errors_in_a_row += 1
        if isinstance(error, EffectOutsideContext):
            raise error
        name, where = type(self._workflow).__name__, _place_in(type(self._workflow), error)
        if self._num_errors_in_a_row >= MOST_ERRORS_IN_A_ROW:
            error.add_note(
                f"in the workflow {name}{where}; {self._num_errors_in_a_row} rollouts failed one after another"
            )
            raise error
        logger.warning("%s: %s: %s%s", name, type(error).__name__, error, where)
        return f"{type(error).__name__}: {error}"

    def _to_result(
        self, request: PromptRequest, trajectory: Trajectory, ctx: EngineContext, began: Moment
    ) -> GenerationResult:
        # A single request is timed from its admission by the engine. With several requests, the time between them counts too.
        alone = ctx.answers[0] if len(ctx.answers) == 1 and not ctx.tool_time.seconds else None
        return GenerationResult(
            samples=trajectory.samples,
            index=request.index,
            prompt_id=request.prompt_id,
            issue_version=request.issue_version,
            engine_id=self._facts.engine_id,
            token_statistics=TokenStatistics(
                num_prompt_tokens=len(request.prompt),
                num_response_tokens=sum(answer.num_response_tokens for answer in ctx.answers),
                generation_time=alone.generation_time if alone else began.elapsed_s(),
                start_time=alone.start_time if alone else began.unix,
                tool_time=ctx.tool_time.seconds,
                effects=() if alone else ctx.tool_time.effects,
            ),
            marker=request.marker,
            notes=trajectory.notes,
        )


ARRAYS = {"prompt_ids": np.integer, "response_ids": np.integer, "logprobs": np.floating, "loss_mask": np.bool_}
"""The arrays of a sample, and the kind of their values."""


def check_samples(samples: Sequence[Any]) -> None:
    """Raises `TypeError` or `ValueError` for the first sample that cannot be trained on; the message says why. Without this check
    the learner would fail later, and report only that two arrays do not fit together."""
    for number, sample in enumerate(samples):
        where = f"sample {number} of the Trajectory"
        if not isinstance(sample, Sample):
            raise TypeError(f"{where} is {type(sample).__name__}: it must be a Sample")
        for name, kind in ARRAYS.items():
            values = getattr(sample, name)
            if name == "loss_mask" and values is None:
                continue
            if not (isinstance(values, np.ndarray) and values.ndim == 1 and np.issubdtype(values.dtype, kind)):
                description = f"array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
                raise TypeError(
                    f"{where}: {name} is {description}: it must be an array of one dimension of {kind.__name__}"
                )
        lengths = {"logprobs": len(sample.logprobs), "version_spans": sum(length for _, length in sample.version_spans)}
        if sample.loss_mask is not None:
            lengths["loss_mask"] = len(sample.loss_mask)
        for name, length in lengths.items():
            if length != len(sample.response_ids):
                raise ValueError(
                    f"{where}: {name} covers {length} tokens, and response_ids has {len(sample.response_ids)}: each token needs "
                    "one, inserted text too"
                )


def _place_in(cls: type[Any], error: BaseException) -> str:
    """File and line where the error was raised. If the traceback passes through the class's own file, the line there."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [
        frame for frame in frames if frame.filename == getattr(sys.modules.get(cls.__module__), "__file__", None)
    ]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own_frames or frames)[-1:])


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S)
