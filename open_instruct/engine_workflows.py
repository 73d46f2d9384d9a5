"""Rollouts of several turns inside an engine actor: an event loop of its own, beside the thread that steps the engine.

    LLMRayActor ── prompt with a plan ──► RolloutRunner: roll_out ── a turn, as a request of its own ──► engine thread
                ◄── GenerationResult ────                         ◄── its tokens ──────────────────────

Between two turns a rollout holds nothing of the engine: each turn queues like any other request, and new weights may come
between.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from open_instruct.data_types import GenerationResult, Moment, PromptRequest, TokenStatistics
from open_instruct.rc_prompts import ChatCodec
from open_instruct.rc_rollouts import VERSION_SPANS, RCRollout, keep_versions, roll_out
from open_instruct.rc_state import RCSettings
from open_instruct.rc_types import REASONING, SUMMARIZATION, EngineError, Generation, PromptTooLong, TurnRequest
from open_instruct.workflows import RCWorkflow

CLOSE_S = 5.0
"""Deadline of the event loop's end."""


@dataclass(frozen=True)
class EngineFacts:
    """What rollouts need to know of the engine that they run in."""

    engine_id: int
    max_model_len: int
    codec: ChatCodec
    settings: RCSettings
    """Sampling, seed and number of cycles are those of each prompt."""


class RolloutRunner:
    """Takes prompts that have a plan, gives back results.

    Args:
        submit: hands a turn to the engine; the future is that of its result. Called from the event loop's thread.
        finish: is given each result, as is one that failed. Called from the event loop's thread.
        fail: is given an error that is nobody's fault but the program's.
    """

    def __init__(
        self,
        facts: EngineFacts,
        submit: Callable[[PromptRequest], "Future[GenerationResult]"],
        finish: Callable[[GenerationResult], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._facts = facts
        self._submit = submit
        self._finish = finish
        self._fail = fail
        self._turn_numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def start(self, request: PromptRequest) -> None:
        """Roll the prompt's plan out. Returns at once."""
        asyncio.run_coroutine_threadsafe(self._run(request), self._loop)

    def close(self) -> None:
        """Break off what is under way; nothing is given back any more."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.0, self._loop.stop)
        self._thread.join(CLOSE_S)

    async def _run(self, request: PromptRequest) -> None:
        try:
            self._finish(await self._result(request))
        except Exception as error:  # the engine's thread ends with it, and says so
            self._fail(error)

    async def _result(self, request: PromptRequest) -> GenerationResult:
        began = Moment()
        try:
            return self._to_result(request, await self._roll_out(request), began)
        except (EngineError, PromptTooLong) as error:
            cause = f"{type(error).__name__}: {error}"
            return GenerationResult.given_up(request, self._facts.engine_id, cause, began)

    async def _roll_out(self, request: PromptRequest) -> RCRollout:
        assert request.plan is not None
        config = request.generation_config
        settings = replace(
            self._facts.settings,
            max_reasoning_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=config.seed or 0,
        )

        async def generate(turn: TurnRequest) -> Generation:
            return await self._generate(turn, request)

        workflow = RCWorkflow(
            generate=generate,
            codec=self._facts.codec,
            policies={REASONING: keep_versions, SUMMARIZATION: keep_versions},
            score=_nobody_scores,
            max_model_len=self._facts.max_model_len,
        )
        return await roll_out(workflow, request.plan, settings, config.n, key=request.prompt_id)

    async def _generate(self, turn: TurnRequest, rollout: PromptRequest) -> Generation:
        config = replace(
            rollout.generation_config,
            n=1,
            max_tokens=turn.max_tokens,
            temperature=turn.temperature,
            top_p=turn.top_p,
            seed=turn.seed,
        )
        request = replace(
            rollout,
            prompt=np.asarray(turn.prompt_ids, np.int32),
            generation_config=config,
            prompt_id=f"{rollout.prompt_id}/turn-{next(self._turn_numbers)}",
            plan=None,
        )
        result = await asyncio.wrap_future(self._submit(request))
        if result.error:
            raise EngineError(result.error)
        token_ids = result.responses[0].tolist()
        return Generation(
            text=self._facts.codec.decode(token_ids),
            token_ids=token_ids,
            logprobs=result.logprobs[0].tolist(),
            finish_reason=result.finish_reasons[0],
            version_spans=result.version_spans[0],
        )

    def _to_result(self, request: PromptRequest, rollout: RCRollout, began: Moment) -> GenerationResult:
        texts = [sample.text for sample in rollout.samples]
        return GenerationResult(
            responses=[text.response_ids for text in texts],
            logprobs=[text.logprobs for text in texts],
            finish_reasons=["stop" if text.finished else "length" for text in texts],
            version_spans=[text.metadata[VERSION_SPANS] for text in texts],
            index=request.index,
            prompt_id=request.prompt_id,
            training_step=request.training_step,
            engine_id=self._facts.engine_id,
            token_statistics=TokenStatistics(
                len(request.prompt), rollout.num_tokens, generation_time=began.elapsed_s(), start_time=began.unix
            ),
            marker=request.marker,
            turns=tuple(sample.turn for sample in rollout.samples),
            states=tuple(rollout.states),
        )


async def _nobody_scores(*_: object) -> float:
    raise AssertionError("verifiers score, after the rollout")


async def _cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
