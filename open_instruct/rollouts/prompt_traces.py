"""The life of each training prompt as a trace (`--otlp_traces_endpoint`):

    prompt       |--------------------------------------------------|  one for each attempt
    queue        |-----|                                               issued, until an engine admits it
    generation         |--------------|                                on one engine
    verification                       |---|
    batch                                  |--*---------------------|  until its step is trained, or leaves it out; *: taken

`metric_table.py` has the names of spans and attributes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import GenerationResult
from open_instruct.report.isolation import Isolation
from open_instruct.report.metric_table import (
    ATTEMPT,
    BATCH,
    CAUSE,
    ENGINE,
    GENERATION,
    INPUT_TOKENS,
    NEWEST_VERSION,
    OLDEST_VERSION,
    OUTCOME,
    OUTPUT_TOKENS,
    PROMPT,
    PROMPT_ID,
    QUEUE,
    STEP,
    TOOL_TIME,
    VERIFICATION,
    VERSION,
)
from open_instruct.report.tracker import run_id_at
from open_instruct.rollouts.prompt_ledger import RUN_ENDED, IssuedPrompt
from open_instruct.scored_groups import CONSUMED
from open_instruct.system.background_calls import BackgroundCalls

if TYPE_CHECKING:
    from open_instruct.report.otlp import Attributes, SpanSender

GIVEN_UP = "given_up"
LOST = "lost"
MOST_WAITING = 100_000
"""Lives that wait to be made into spans. Further ones are left out."""
CLOSE_S = 2.0
"""Seconds that the receiver has at the end of a run, because the controller has to end soon."""


@dataclass
class _Attempt:
    """What is known of one attempt at a prompt. Times are Unix times; None: not yet, or (after a resume) not known."""

    prompt_id: str
    number: int
    version: int
    issued: float | None = None
    result: GenerationResult | None = None
    scored: float | None = None
    score_s: float = 0.0
    batched: float | None = None
    step: int | None = None


class PromptTraces:
    """Follows the prompts from their issue to their outcome, and sends the spans of each when it has one.

    The calls return at once, and a thread makes the spans. All of them may be called from any thread.

    Args:
        sender: where spans go.
        run_id: of the run; with a prompt's id the name of its trace, also after a resume.
    """

    def __init__(self, sender: "SpanSender", run_id: str, *, clock: Callable[[], float] = time.time) -> None:
        self._sender = sender
        self._run_id = run_id
        self._clock = clock
        self._open: dict[str, _Attempt] = {}
        self._lock = threading.Lock()
        self._isolation = Isolation("the trace of prompts")
        self._background = BackgroundCalls("traces", MOST_WAITING)

    def issued(self, prompt: IssuedPrompt) -> None:
        """The prompt goes to the engines."""
        with self._lock:
            self._open[prompt.prompt_id] = _attempt(prompt, issued=self._clock())

    def scored(self, result: GenerationResult, score_s: float) -> None:
        """Its responses have their scores, which took `score_s` seconds."""
        with self._lock:
            if (attempt := self._open.get(result.prompt_id)) is not None:
                attempt.result, attempt.scored, attempt.score_s = result, self._clock(), score_s

    def took(self, training_step: int, result: GenerationResult, prompt: IssuedPrompt, outcome: str) -> None:
        """A step has taken the group, or has left it out for the reason `outcome`."""
        with self._lock:
            attempt = self._open.setdefault(
                prompt.prompt_id, _attempt(prompt)
            )  # an earlier start of the run has issued it
            attempt.result, attempt.batched, attempt.step = result, self._clock(), training_step
            if outcome != CONSUMED:
                self._end(prompt.prompt_id, outcome)

    def trained(self, training_step: int) -> None:
        """The learners have trained the step."""
        with self._lock:
            for prompt_id in [attempt.prompt_id for attempt in self._open.values() if attempt.step == training_step]:
                self._end(prompt_id, CONSUMED)

    def given_up(self, result: GenerationResult) -> None:
        """An engine has given it up, or too few of its responses were scored."""
        with self._lock:
            if (attempt := self._open.get(result.prompt_id)) is not None:
                attempt.result = result
                self._end(result.prompt_id, GIVEN_UP, cause=result.error or "too few responses were scored")

    def lost(self, prompt_ids: Sequence[str]) -> None:
        """These prompts were lost with an engine."""
        with self._lock:
            for prompt_id in self._open.keys() & {*prompt_ids}:
                self._end(prompt_id, LOST, cause="its engine died")

    def close(self) -> None:
        """The run ends: what is open ends with it. Sends what is left."""
        with self._lock:
            for prompt_id in list(self._open):
                self._end(prompt_id, RUN_ENDED)
        self._background.end(self._sender.close, CLOSE_S)

    def _end(self, prompt_id: str, outcome: str, *, cause: str = "") -> None:
        attempt, now = self._open.pop(prompt_id), self._clock()
        self._background.submit(lambda: self._send(attempt, outcome, cause, now))

    def _send(self, attempt: _Attempt, outcome: str, cause: str, ended: float) -> None:
        with self._isolation:
            result = attempt.result
            statistics = None if result is None else result.token_statistics
            admitted = None if statistics is None or not statistics.start_time else statistics.start_time
            began = attempt.issued or admitted or attempt.scored or ended
            shared: Attributes = {
                PROMPT_ID: attempt.prompt_id,
                ATTEMPT: attempt.number,
                VERSION: attempt.version,
                ENGINE: None if result is None else result.engine_id,
            }
            root = self._sender.root(
                PROMPT,
                began,
                {**shared, OUTCOME: outcome, STEP: attempt.step, CAUSE: cause or None},
                trace=f"{self._run_id} {attempt.prompt_id}",
            )
            if attempt.issued is not None:
                root.child(QUEUE, attempt.issued, admitted if admitted is not None else ended, shared)
            if admitted is not None and statistics is not None and result is not None:
                root.child(GENERATION, admitted, admitted + statistics.generation_time, {**shared, **_cost(result)})
            if attempt.scored is not None:
                root.child(VERIFICATION, attempt.scored - attempt.score_s, attempt.scored, shared)
                root.child(BATCH, attempt.scored, ended, {**shared, STEP: attempt.step}, taken=attempt.batched)
            root.end(max(began, ended), failure=cause)


def _attempt(prompt: IssuedPrompt, *, issued: float | None = None) -> _Attempt:
    return _Attempt(prompt.prompt_id, max(0, prompt.num_issues - 1), prompt.version, issued)


def _cost(result: GenerationResult) -> "Attributes":
    """Versions, tokens and time of tools."""
    statistics = result.token_statistics
    return {
        OLDEST_VERSION: result.oldest_version,
        NEWEST_VERSION: result.newest_version,
        INPUT_TOKENS: statistics.num_prompt_tokens,
        OUTPUT_TOKENS: statistics.num_response_tokens,
        TOOL_TIME: statistics.tool_time,
    }


def open_traces(args: GRPOConfig) -> PromptTraces | None:
    """The traces of a run with `--otlp_traces_endpoint`."""
    if args.otlp_traces_endpoint is None:
        return None
    run_id = run_id_at(args.output_dir)
    with Isolation("the trace of prompts"):
        from open_instruct.report.otlp import SpanSender

        return PromptTraces(SpanSender(args.otlp_traces_endpoint, {"run": args.run_title, "run.id": run_id}), run_id)
    return None
