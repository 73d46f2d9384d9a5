"""What a plan becomes: which turns are sampled, what their prompts hold, who is compared with whom. The engine is a function."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine_stage import RC_OPTIONS
from rc_fakes import MAX_MODEL_LEN, SUMMARY_MARK, THINK_MARK, codec, settings

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import EVAL, TRAIN, Completion, PromptRequest, SamplingConfig
from open_instruct.workflows.base import Context, Effect
from open_instruct.workflows.rc.rollouts import RCRollout, keep_versions, roll_out
from open_instruct.workflows.rc.turns import RCTurns
from open_instruct.workflows.rc.types import (
    REASONING,
    SUMMARIZATION,
    EngineError,
    Generation,
    RCPlan,
    ReachedState,
    TurnRequest,
)
from open_instruct.workflows.rc.workflow import ReasoningCache

PROBLEM = "How many?"


@dataclass
class PlayedEngine:
    """Numbers its replies in the order of the requests; `weights` is the version that samples."""

    reply: Callable[[TurnRequest, int], str] = lambda request, number: f"{request.turn_type} {number}."
    weights: Callable[[int], int] = lambda number: 0
    requests: list[TurnRequest] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def generate(self, request: TurnRequest) -> Generation:
        number = len(self.requests)
        self.requests.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001 * (number % 3))  # they come back in another order
        self.at_once -= 1
        text = self.reply(request, number)
        token_ids = codec().encode(text)
        spans = [(self.weights(number), len(token_ids))]
        return Generation(text, token_ids, [-0.5] * len(token_ids), "stop", spans)

    def prompts(self, turn_type: str) -> list[str]:
        return [codec().decode(one.prompt_ids) for one in self.requests if one.turn_type == turn_type]


async def _not_asked(*_: object) -> float:
    raise AssertionError


async def rolling_out(
    plan: RCPlan, generate: Callable[[TurnRequest], Awaitable[Generation]], num_samples: int
) -> RCRollout:
    policies = {REASONING: keep_versions, SUMMARIZATION: keep_versions}
    workflow = RCTurns(generate, codec(), policies, _not_asked, MAX_MODEL_LEN)
    return await roll_out(workflow, plan, settings(1), num_samples, "train-0")


def run(plan: RCPlan, engine: PlayedEngine, num_samples: int = 3) -> RCRollout:
    return asyncio.run(rolling_out(plan, engine.generate, num_samples))


def groups(rollout: RCRollout) -> list[tuple[int, str, int]]:
    return [(one.group, one.kind, one.number) for one in rollout.samples]


def query(rollout: RCRollout, position: int) -> str:
    return codec().decode(rollout.samples[position].prompt_ids.tolist())


# --- fresh samples at states ------------------------------------------------------------------------------------------


def test_each_drawn_state_is_a_group_with_one_prompt() -> None:
    engine = PlayedEngine()
    rollout = run(RCPlan(PROBLEM, states=(0, 2), num_cycles=3), engine)
    assert groups(rollout) == [(0, REASONING, 1)] * 3 + [(1, REASONING, 3)] * 3
    for group in (0, 1):
        assert len({one.prompt_ids.tobytes() for one in rollout.samples if one.group == group}) == 1
    assert [state.number for state in rollout.states] == [1, 2]
    assert query(rollout, 0) == f"{THINK_MARK} {PROBLEM} KNOWING  GO"
    assert query(rollout, 5) == f"{THINK_MARK} {PROBLEM} KNOWING {rollout.states[1].summary} GO"


def test_samples_are_what_the_engine_was_asked_and_said() -> None:
    """Token ids, log-probs and versions are those of the very turn: the prompt is never built a second time."""
    engine = PlayedEngine(weights=lambda number: number)
    rollout = run(RCPlan(PROBLEM, states=(1,), num_cycles=2), engine)
    for one in rollout.samples:
        number = int(codec().decode(one.response_ids.tolist()).split()[1].rstrip("."))
        assert one.prompt_ids.tolist() == engine.requests[number].prompt_ids
        assert one.version_spans == [(number, len(one.response_ids))]
        assert len(one.logprobs) == len(one.response_ids) > 0


def test_all_turns_have_seeds_of_their_own() -> None:
    engine = PlayedEngine()
    run(RCPlan(PROBLEM, states=(0, 1, 2), num_cycles=3, num_summaries=2), engine)
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == len(seeds)
    again = PlayedEngine()
    run(RCPlan(PROBLEM, states=(0, 1, 2), num_cycles=3, num_summaries=2), again)
    assert sorted(seeds) == sorted(request.seed for request in again.requests)


def test_nothing_is_generated_past_the_last_drawn_state() -> None:
    engine = PlayedEngine()
    run(RCPlan(PROBLEM, states=(1,), num_cycles=5), engine)
    assert len(engine.prompts(REASONING)) == 1 + 3
    assert len(engine.prompts(SUMMARIZATION)) == 1


def test_a_rollout_begins_where_another_one_stood() -> None:
    engine = PlayedEngine()
    rollout = run(RCPlan(PROBLEM, ReachedState(2, "SEVEN SO FAR", 5), states=(2, 3), num_cycles=4), engine)
    assert groups(rollout)[0] == (0, REASONING, 3)
    assert query(rollout, 0) == f"{THINK_MARK} {PROBLEM} KNOWING SEVEN SO FAR GO"
    assert [state.number for state in rollout.states] == [3]
    assert engine.prompts(SUMMARIZATION)[0].startswith(f"{SUMMARY_MARK} {PROBLEM} OLD SEVEN SO FAR NEW ")


def test_the_beginning_can_be_sampled_beside_a_later_start() -> None:
    engine = PlayedEngine()
    rollout = run(RCPlan(PROBLEM, ReachedState(2, "SEVEN SO FAR", 5), states=(0, 2), num_cycles=4), engine)
    assert groups(rollout) == [(0, REASONING, 1)] * 3 + [(1, REASONING, 3)] * 3
    assert query(rollout, 0) == f"{THINK_MARK} {PROBLEM} KNOWING  GO"
    assert query(rollout, 3) == f"{THINK_MARK} {PROBLEM} KNOWING SEVEN SO FAR GO"
    assert len(engine.requests) == 6


def test_samples_do_not_wait_for_the_rest_of_the_way() -> None:
    engine = PlayedEngine()
    run(RCPlan(PROBLEM, states=(0, 1, 2), num_cycles=3), engine, num_samples=8)
    assert engine.most_at_once > 8


def test_trained_summaries_are_a_group_and_lead_to_one_each() -> None:
    engine = PlayedEngine()
    rollout = run(RCPlan(PROBLEM, states=(1,), num_cycles=2, num_summaries=2), engine)
    assert groups(rollout) == [(0, SUMMARIZATION, 1)] * 2 + [(1, REASONING, 2)] * 3 + [(2, REASONING, 2)] * 3
    assert [one.parent for one in rollout.samples] == [-1, -1, 0, 0, 0, 1, 1, 1]
    for one in rollout.samples[2:]:
        summary = codec().decode(rollout.samples[one.parent].response_ids.tolist())
        assert f"KNOWING {summary} GO" in codec().decode(one.prompt_ids.tolist())


# --- the turns themselves ---------------------------------------------------------------------------------------------


def test_turns_are_compared_by_type_and_number() -> None:
    engine = PlayedEngine()
    rollout = run(RCPlan(PROBLEM, num_cycles=2, num_summaries=1), engine)
    assert groups(rollout) == [(0, REASONING, 1)] * 3 + [(1, SUMMARIZATION, 1)] * 3 + [(2, REASONING, 2)] * 3
    assert [one.is_judged for one in rollout.samples] == [True] * 3 + [False] * 3 + [True] * 3
    assert [one.parent for one in rollout.samples] == [-1] * 6 + [3, 4, 5]


def test_untrained_summaries_are_no_samples() -> None:
    rollout = run(RCPlan(PROBLEM, num_cycles=3), PlayedEngine())
    assert groups(rollout) == [(step, REASONING, step // 2 + 1) for step in (0, 2, 4) for _ in range(3)]
    assert {one.parent for one in rollout.samples} == {-1}
    assert len(rollout.states) == 3 * 2


# --- both -------------------------------------------------------------------------------------------------------------


def test_states_are_as_old_as_the_weights_that_wrote_them() -> None:
    engine = PlayedEngine(weights=lambda number: 10 + number)
    rollout = run(RCPlan(PROBLEM, states=(2,), num_cycles=3), engine)
    written = [number for number, one in enumerate(engine.requests) if one.turn_type == SUMMARIZATION]
    assert [state.version for state in rollout.states] == [10 + number for number in written]


def test_tokens_of_all_turns_are_counted() -> None:
    engine = PlayedEngine(reply=lambda *_: "seven")
    rollout = run(RCPlan(PROBLEM, states=(0, 1), num_cycles=2), engine)
    assert rollout.num_tokens == len(engine.requests) * len(codec().encode("seven"))


@pytest.mark.parametrize("plan", [RCPlan(PROBLEM, states=(0, 2), num_cycles=3), RCPlan(PROBLEM, num_cycles=3)])
def test_a_turn_that_fails_ends_the_others(plan: RCPlan) -> None:
    engine = PlayedEngine()
    cancelled: list[TurnRequest] = []

    async def generate(request: TurnRequest) -> Generation:
        number = len(engine.requests)
        if number == 3:
            raise EngineError("gone")
        try:
            generation = await engine.generate(request)
            if number > 0:  # the first goes on, to its next turn
                await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise
        return generation

    async def fail() -> None:
        with pytest.raises(EngineError, match="gone"):
            await rolling_out(plan, generate, 3)
        await asyncio.sleep(0.01)
        assert cancelled

    asyncio.run(fail())


# --- seeds, as an engine is asked with them -----------------------------------------------------------------------------


class AskedContext(Context):
    """Says the same to every request, and remembers the seeds of the requests."""

    def __init__(self) -> None:
        super().__init__(seed=1, max_model_len=MAX_MODEL_LEN)
        self.seeds: list[int] = []

    @property
    def codec(self) -> ChatCodec:
        return codec()

    def vllm_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> Any:
        raise AssertionError

    async def _generate(self, effect: Effect, prompt_ids: np.ndarray, sampling: SamplingConfig) -> list[Completion]:
        assert sampling.seed is not None
        self.seeds.append(sampling.seed)
        token_ids = np.array(codec().encode("seven"), np.int32)
        return [Completion(token_ids, np.zeros(len(token_ids), np.float32), "stop", [(0, len(token_ids))])]

    def _call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    def _now(self, effect: Effect) -> float:
        raise AssertionError


def seeds_of(prompt_id: str, *, row: int, marker: str) -> list[int]:
    config = SamplingConfig(max_tokens=64, n=2, seed=5)
    task = RCPlan(PROBLEM, num_cycles=2)
    request = PromptRequest(np.arange(3, dtype=np.int32), config, row, prompt_id, 0, marker=marker, task=task)
    ctx = AskedContext()
    asyncio.run(ReasoningCache(RC_OPTIONS).run(request, ctx))
    assert len(set(ctx.seeds)) == len(ctx.seeds) == 2 * 3
    return sorted(ctx.seeds)


def test_two_evaluations_ask_with_the_same_seeds() -> None:
    """The id of an evaluation prompt has the version in it."""
    first = seeds_of("eval-0-3", row=3, marker=EVAL)
    assert seeds_of("eval-20-3", row=3, marker=EVAL) == first
    assert seeds_of("eval-20-4", row=4, marker=EVAL) != first


def test_two_prompts_of_training_on_one_row_ask_with_other_seeds() -> None:
    assert seeds_of("train-1", row=3, marker=TRAIN) != seeds_of("train-9", row=3, marker=TRAIN)
