"""From a plan to samples: what the reasoning cache generates for one prompt of a training run. Pure; the engine is a function.

    states (fresh samples at chosen states, the default)         turns (the trajectory's own)

    reasoning 1 ─► summary 1 ─► reasoning 2 ─► summary 2          reasoning 1 ─► summary 1 ─► reasoning 2 ─► …    n times
    │              │                           │                  └─ group 0     └─ group 1   └─ group 2
    ▼              ▼                           ▼
    n samples      n samples                   n samples          each group: the same turn of all trajectories
    at state 0     at state 1                  at state 2         (their prompts differ, so its baseline is approximate)

Every sample is a turn that `RCTurns` took, with exactly the prompt that the engine received. Sampling at chosen states follows
arXiv:2602.03773: one trajectory, and at each state a group whose samples share their prompt.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from open_instruct.data_types import Sample
from open_instruct.workflows.base import first_of
from open_instruct.workflows.rc.policies import to_training_text
from open_instruct.workflows.rc.state import InferenceProblemState, RCSettings
from open_instruct.workflows.rc.turns import FinishedTurn, RCTurns, Score
from open_instruct.workflows.rc.types import REASONING, Problem, RCPlan, ReachedState, TrainingText
from open_instruct.workflows.rc.weights import TurnWeights, turn_weight

VERSION_SPANS = "version_spans"
"""Key in a turn's metadata for the weight versions of its tokens."""
KV_AGE = "kv_age"
"""Key in a turn's metadata for the age of its keys and values."""


@dataclass
class RCRollout:
    """The result of a plan."""

    samples: list[Sample] = field(default_factory=list)
    states: list[ReachedState] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of all turns that were taken, including the turns on the way to the samples."""


async def keep_versions(turn: FinishedTurn, score: Score) -> TrainingText:
    """The rollout policy of training. It scores nothing, because the verifiers score later."""
    del score
    return to_training_text(turn, None, {VERSION_SPANS: turn.generation.version_spans, KV_AGE: turn.generation.kv_age})


async def roll_out(
    workflow: RCTurns,
    plan: RCPlan,
    settings: RCSettings,
    num_samples: int,
    key: str,
    weights: TurnWeights = MappingProxyType({}),
) -> RCRollout:
    """Take all turns that the plan asks for. Turns that do not build on each other run in parallel.

    Args:
        settings: how turns are made. The number of cycles comes from the plan instead.
        num_samples: n, the number of samples per state, or of trajectories.
        key: name of the rollout. Together with the seed in `settings` it determines the seed of every turn.
        weights: weights of the samples in the loss.

    Raises:
        EngineError, PromptTooLong: a turn could not be taken; the running turns are cancelled.
    """
    problem = Problem(key, plan.problem, ground_truth=None, verifier="", dataset="")
    last_cycle = max((*plan.states, plan.num_cycles - 1)) + 1
    try:
        async with asyncio.TaskGroup() as tasks:
            builder = _RolloutBuilder(
                workflow, plan, problem, replace(settings, num_reasoning_steps=last_cycle), num_samples, weights, tasks
            )
            await (builder.to_states() if plan.states else builder.of_trajectories())
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    return builder.collected()


class _RolloutBuilder:
    """The turns of one plan while they are taken."""

    def __init__(
        self,
        workflow: RCTurns,
        plan: RCPlan,
        problem: Problem,
        settings: RCSettings,
        num_samples: int,
        weights: TurnWeights,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._workflow = workflow
        self._plan = plan
        self._problem = problem
        self._settings = settings
        self._num_samples = num_samples
        self._weights = weights
        self._tasks = tasks
        self._rollout = RCRollout()
        self._groups: dict[int, list[tuple[TrainingText, TrainingText | None]]] = {}
        """Samples by group. Each comes with the summary in its prompt, if that summary is a sample too."""

    def collected(self) -> RCRollout:
        """The samples in the order of their groups, once all turns are taken."""
        positions: dict[int, int] = {}
        for group in sorted(self._groups):
            for text, summary in sorted(self._groups[group], key=lambda pair: pair[0].metadata["sample_id"]):
                positions[id(text)] = len(self._rollout.samples)
                parent = -1 if summary is None else positions[id(summary)]
                self._rollout.samples.append(self._to_sample(text, group=group, parent=parent))
        return self._rollout

    def _to_sample(self, text: TrainingText, *, group: int, parent: int) -> Sample:
        kind, number = text.metadata["turn_type"], text.metadata["turn_number"]
        return Sample(
            prompt_ids=text.prompt_ids,
            response_ids=text.response_ids,
            logprobs=text.logprobs,
            finish_reason="stop" if text.finished else "length",
            version_spans=text.metadata[VERSION_SPANS],
            group=group,
            kind=kind,
            number=number,
            weight=turn_weight(self._weights, kind, number),
            is_judged=kind == REASONING,  # a right answer in a summary does not make it a good summary
            kv_age=text.metadata[KV_AGE],
            parent=parent,
        )

    def _beginning_at(self, state: ReachedState, *, sample_id: int = 0) -> InferenceProblemState:
        return InferenceProblemState.beginning_at(state, self._problem, self._settings, sample_id=sample_id)

    # --- fresh samples at states --------------------------------------------------------------------------------------

    async def to_states(self) -> None:
        plan = self._plan
        state = self._beginning_at(plan.start)
        if 0 in plan.states:
            self._sample_at(self._beginning_at(ReachedState()), summary=None)
        if plan.start.number and plan.start.number in plan.states:
            self._sample_at(state, summary=None)
        while state.summarization_turn_number < max(plan.states):
            self._count(await self._workflow.take_turn(state))
            state = await self._summarize(state)

    async def _summarize(self, state: InferenceProblemState) -> InferenceProblemState:
        """Take a summary turn and return the next state. At a chosen state, samples are taken. If several summaries lead to the
        state (because summaries are trained), the trajectory continues with the first summary."""
        is_chosen = state.reasoning_turn_number in self._plan.states
        is_trained = is_chosen and self._plan.num_summaries > 0
        ways = [state.branch(number) for number in range(self._plan.num_summaries)] if is_trained else [state]
        summaries = await self._take_turns(ways)
        if is_trained:
            self._groups[self._next_group] = [(summary, None) for summary in summaries]
        for way, summary in zip(ways, summaries, strict=True):
            self._count(summary)
            self._reach(way, summary)
            if is_chosen:
                self._sample_at(way, summary=summary if is_trained else None)
        return ways[0]

    @property
    def _next_group(self) -> int:
        return len(self._groups)

    def _sample_at(self, state: InferenceProblemState, summary: TrainingText | None) -> None:
        first_id = 1 + state.sample_id * self._num_samples  # sample 0 of each step is the trajectory's own
        branches = [state.branch(first_id + number) for number in range(self._num_samples)]
        group = self._groups.setdefault(self._next_group, [])

        async def sample() -> None:
            for text in await self._take_turns(branches):
                self._count(text)
                group.append((text, summary))

        self._tasks.create_task(sample())

    # --- the turns themselves -----------------------------------------------------------------------------------------

    async def of_trajectories(self) -> None:
        for number in range(self._num_samples):
            state = self._beginning_at(self._plan.start, sample_id=number)
            self._tasks.create_task(self._trajectory(state))

    async def _trajectory(self, state: InferenceProblemState) -> None:
        summary: TrainingText | None = None
        while True:
            reasoning = await self._workflow.take_turn(state)
            self._count(reasoning)
            self._add(reasoning, summary)
            if state.reasoning_turn_number == self._settings.num_reasoning_steps:
                return
            text = await self._workflow.take_turn(state)
            self._count(text)
            self._reach(state, text)
            if self._plan.num_summaries:
                summary = text
                self._add(summary, None)

    def _add(self, text: TrainingText, summary: TrainingText | None) -> None:
        self._groups.setdefault(text.metadata["cycle_step"], []).append((text, summary))

    # --- both ---------------------------------------------------------------------------------------------------------

    async def _take_turns(self, states: Sequence[InferenceProblemState]) -> list[TrainingText]:
        """Take the next turn of each state in parallel."""
        turns = [self._tasks.create_task(self._workflow.take_turn(state)) for state in states]
        return [await turn for turn in turns]

    def _count(self, text: TrainingText) -> None:
        self._rollout.num_tokens += len(text.response_ids)

    def _reach(self, state: InferenceProblemState, summary: TrainingText) -> None:
        version = min((version for version, _ in summary.metadata[VERSION_SPANS]), default=0)
        self._rollout.states.append(ReachedState(state.summarization_turn_number, state.curr_summary, version))
