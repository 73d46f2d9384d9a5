"""The turns of a reasoning-cache (RC) rollout: think, summarise, think again. Pure: no server and no engine in it.

    problem, summary "" ─► reasoning 1 ─► summary 1 ─► reasoning 2 ─► summary 2 ─► … N times
                             sees the problem and the   sees the problem, the summary
                             latest summary alone       so far and this reasoning

Thinking can therefore go on far beyond one context window. `RCTurns` asks for one turn at a time through `generate` and occupies
nothing in an engine between two turns. An `InferenceProblemState` holds everything about a trajectory and changes only when a
turn has succeeded, so `run` on a state that stopped half-way continues with the turn that failed.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from open_instruct.chat_codec import ChatCodec
from open_instruct.workflows.rc.prompts import answer_of, reasoning_for_summary, summary_of, with_opening_tag
from open_instruct.workflows.rc.state import InferenceProblemState
from open_instruct.workflows.rc.types import (
    REASONING,
    Generation,
    Problem,
    PromptTooLong,
    TrainingText,
    TurnRequest,
)

Generate = Callable[[TurnRequest], Awaitable[Generation]]
"""Continues token ids; raises an `EngineError` when it cannot."""
Score = Callable[[Problem, list[int], str], Awaitable[float]]
"""Reward in [0, 1] of a response, given as token ids and as the text to judge."""
SHORTEST_ANSWER = 4
"""A prompt is shortened until 1/4 of the context is left for the answer, or less if the answer's token limit is lower."""


@dataclass(frozen=True)
class FinishedTurn:
    """A finished turn, from which a rollout policy makes a training sample."""

    problem: Problem
    turn_type: str
    request: TurnRequest
    generation: Generation
    text: str
    """The raw output."""
    answer: str
    """The text after the thoughts; empty if a thought was never closed."""


class RolloutPolicy(Protocol):
    """Makes a training sample from a finished turn. A configuration may name a policy by its dotted path."""

    async def __call__(self, turn: FinishedTurn, score: Score) -> TrainingText: ...


@dataclass(frozen=True)
class RCTurns:
    """Runs the turns of a trajectory."""

    generate: Generate
    codec: ChatCodec
    policies: Mapping[str, RolloutPolicy]
    """Rollout policies by turn type."""
    score: Score
    max_model_len: int
    """Most tokens, prompt and answer together, that an engine accepts."""

    async def run(self, state: InferenceProblemState) -> list[TrainingText]:
        """Take turns until the state is done. Returns its turns in order.

        Raises:
            EngineError: the engine gave no answer. The state is as it was before that turn; call `run` again to continue.
            PromptTooLong: the problem alone fills the context.
        """
        while not state.is_done:
            await self.take_turn(state)
        return state.rollouts

    async def take_turn(self, state: InferenceProblemState) -> TrainingText:
        """Take only the next turn and add it to the state. Raises the same errors as `run`."""
        request, was_shortened = self._request(state)
        generation = await self.generate(request)
        state.num_retries += generation.num_retries
        opens_think = _opens_think(state, request.turn_type)
        text = with_opening_tag(generation.text) if opens_think else generation.text
        turn = FinishedTurn(state.problem, request.turn_type, request, generation, text, answer_of(text))
        rollout = await self.policies[request.turn_type](turn, self.score)
        if was_shortened:
            rollout.metadata["prompt_shortened"] = True
        if request.turn_type == REASONING:
            reasoning = reasoning_for_summary(text, state.settings.reasoning_for_summary)
            state.update_reasoning(rollout, generation, self.codec.without_special_tokens(reasoning))
        else:
            state.update_summarization(rollout, generation, self._new_summary(state, text))
        return rollout

    def _new_summary(self, state: InferenceProblemState, text: str) -> str:
        summary = self.codec.without_special_tokens(summary_of(text))
        if state.settings.summarization_style == "append" and summary and state.curr_summary:
            return self.codec.shortened(f"{state.curr_summary}\n\n{summary}", state.settings.max_summary_tokens)
        return summary

    def _request(self, state: InferenceProblemState) -> tuple[TurnRequest, bool]:
        """The next turn, and whether something was left out of its prompt to make it fit."""
        settings, turn_type = state.settings, state.next_turn_type
        max_tokens = settings.max_reasoning_tokens if turn_type == REASONING else settings.max_summary_tokens
        room = self.max_model_len - min(max_tokens, self.max_model_len // SHORTEST_ANSWER)
        prompt_ids, was_shortened = self._prompt(state, room)
        if len(prompt_ids) >= self.max_model_len:
            raise PromptTooLong(
                f"the {turn_type} prompt has {len(prompt_ids)} tokens of {self.max_model_len} that the model takes"
            )
        request = TurnRequest(
            prompt_ids=prompt_ids,
            max_tokens=min(max_tokens, self.max_model_len - len(prompt_ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=state.turn_seed,
            turn_type=turn_type,
            name=f"sample-{state.sample_id}/turn-{state.overall_cycle_step}",
        )
        return request, was_shortened

    def _prompt(self, state: InferenceProblemState, room: int) -> tuple[list[int], bool]:
        """Token ids of the next prompt. If there are more than `room`, the middle of what the model wrote is left out."""
        if state.next_turn_type == REASONING:
            opens_think = _opens_think(state, REASONING)
            return _fit(
                lambda summary: self.codec.chat_prompt(
                    state.get_filled_reasoning_prompt(curr_summary=summary), opens_think=opens_think
                ),
                [state.curr_summary],
                room,
                self.codec,
            )
        return _fit(
            lambda reasoning, summary: self.codec.chat_prompt(
                state.get_filled_summarization_prompt(reasoning=reasoning, existing_summary=summary)
            ),
            [state.curr_reasoning, state.curr_summary],
            room,
            self.codec,
        )


def _opens_think(state: InferenceProblemState, turn_type: str) -> bool:
    return state.settings.use_think_tags and turn_type == REASONING


def _fit(build: Callable[..., list[int]], parts: list[str], room: int, codec: ChatCodec) -> tuple[list[int], bool]:
    """The prompt that `build` makes of the parts, and whether they were shortened to make it fit."""
    prompt_ids = build(*parts)
    if len(prompt_ids) <= room or not any(parts):
        return prompt_ids, False
    lengths = [len(codec.encode(part)) for part in parts]
    while len(prompt_ids) > room and any(lengths):
        # Text that is cut in two and joined again may have more tokens than its parts, hence the loop and the 1.
        lengths = _leveled(lengths, sum(lengths) - max(1, len(prompt_ids) - room))
        texts = (codec.shortened(part, length) if length else "" for part, length in zip(parts, lengths, strict=True))
        prompt_ids = build(*texts)
    return prompt_ids, True


def _leveled(lengths: list[int], total: int) -> list[int]:
    """The lengths with the longest cut down to a common level, so that they add up to `total` at most: [5, 2], 6 gives [4, 2]."""
    level = max(lengths)
    while level > 0 and sum(min(length, level) for length in lengths) > total:
        level -= 1
    return [min(length, level) for length in lengths]
