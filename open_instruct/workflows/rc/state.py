"""The state of one trajectory of the reasoning cache: turns, counters and summary. Pure; only a successful turn changes it."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from open_instruct.workflows.rc.prompts import ReasoningPart, fill_template
from open_instruct.workflows.rc.types import (
    CONTROL,
    ONE_LONG_TURN,
    REASONING,
    SUMMARIZATION,
    Generation,
    Problem,
    ReachedState,
    TrainingText,
)

ATTEMPT = "/attempt-"


@dataclass(frozen=True)
class RCSettings:
    """How the turns of a trajectory are made. All token counts refer to the model's tokenizer."""

    num_reasoning_steps: int
    reasoning_prompt_template: str
    summarization_prompt_template: str
    max_reasoning_tokens: int
    max_summary_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    use_think_tags: bool = False
    reasoning_for_summary: ReasoningPart = "thoughts"
    summarization_style: Literal["replace", "append"] = "replace"
    truncated_summary: Literal["keep", "keep_previous"] = "keep"
    stop_when_solved: bool = False
    seed: int = 42

    def token_budget(self, cycle: int) -> int:
        """Most tokens that are sampled up to and including the answer of a cycle, counted from 1. A cycle's own summary comes
        after its answer: with 1000 reasoning and 100 summary tokens, the budget of cycle 2 is 2100."""
        return cycle * self.max_reasoning_tokens + (cycle - 1) * self.max_summary_tokens

    @property
    def token_budgets(self) -> list[int]:
        return [self.token_budget(cycle) for cycle in range(1, self.num_reasoning_steps + 1)]

    def as_one_long_turn(self) -> "RCSettings":
        """The same settings with one reasoning turn, which may sample as many tokens as all cycles together."""
        return replace(self, num_reasoning_steps=1, max_reasoning_tokens=self.token_budget(self.num_reasoning_steps))


@dataclass
class InferenceProblemState:
    """One trajectory: a problem and all turns about it so far.

    After k whole cycles `overall_cycle_step` is 2k, the other counters are k, and each store holds k entries.
    """

    problem: Problem
    settings: RCSettings
    rollout_index: int = 0
    """The attempt at this problem, from 0."""
    sample_id: int = 0
    """Number of the sample among the samples of the problem in this attempt, from 0."""
    is_one_long_turn: bool = False
    """Whether this trajectory is a control, which ends after its single reasoning turn. The turn's metadata says so."""

    curr_summary: str = ""
    curr_reasoning: str = ""
    reasoning_turn_number: int = 0
    summarization_turn_number: int = 0
    overall_cycle_step: int = 0

    reasoning_rollout_store: list[TrainingText] = field(default_factory=list)
    summarization_rollout_store: list[TrainingText] = field(default_factory=list)
    reasoning_string_store: list[str] = field(default_factory=list)
    """Processed text, without think tags."""
    summarization_string_store: list[str] = field(default_factory=list)
    """`curr_summary` after each summary turn."""
    reasoning_string_complete_store: list[str] = field(default_factory=list)
    """Raw outputs."""
    summarization_string_complete_store: list[str] = field(default_factory=list)
    """Raw outputs."""

    num_retries: int = 0
    """Failed attempts at turns."""
    num_requeues: int = 0
    """Times that a turn used up its retries and the trajectory was put back."""

    @classmethod
    def beginning_at(
        cls, state: ReachedState, problem: Problem, settings: RCSettings, *, sample_id: int = 0
    ) -> "InferenceProblemState":
        """A trajectory that continues from a reached state. Its stores hold only its own turns."""
        return cls(
            problem,
            settings,
            sample_id=sample_id,
            curr_summary=state.summary,
            reasoning_turn_number=state.number,
            summarization_turn_number=state.number,
            overall_cycle_step=2 * state.number,
        )

    def branch(self, sample_id: int) -> "InferenceProblemState":
        """Another trajectory that continues from the current state of this one. Its stores hold only its own turns."""
        stores: dict[str, Any] = {name: [] for name in self.__dataclass_fields__ if name.endswith("_store")}
        return replace(self, sample_id=sample_id, num_retries=0, num_requeues=0, **stores)

    @property
    def group_id(self) -> str:
        """Identifies all samples of a problem in one attempt. Controls form a group of their own."""
        group = f"{self.problem.problem_id}{ATTEMPT}{self.rollout_index}"
        return f"{group}/{ONE_LONG_TURN}" if self.is_one_long_turn else group

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}/{self.sample_id}"

    @property
    def next_turn_type(self) -> str:
        return REASONING if self.reasoning_turn_number == self.summarization_turn_number else SUMMARIZATION

    @property
    def is_done(self) -> bool:
        if self.is_one_long_turn:
            return self.reasoning_turn_number == 1
        if self.settings.stop_when_solved and self.reasoning_rollout_store:
            reward = self.reasoning_rollout_store[-1].reward
            if reward is not None and reward >= 1.0:
                return True
        return self.summarization_turn_number >= self.settings.num_reasoning_steps

    @property
    def turn_seed(self) -> int:
        """Seed of the next turn. It differs between turns and trajectories, and is the same if the run is repeated."""
        key = f"{self.settings.seed} {self.trajectory_id} {self.overall_cycle_step}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) >> 1

    @property
    def rollouts(self) -> list[TrainingText]:
        """The turns so far, in the order in which they were made."""
        turns = [*self.reasoning_rollout_store, *self.summarization_rollout_store]
        return sorted(turns, key=lambda turn: turn.metadata["cycle_step"])

    # --- prompts ------------------------------------------------------------------------------------------------------

    def get_filled_reasoning_prompt(self, *, curr_summary: str | None = None) -> str:
        """The prompt of a reasoning turn: the problem and the summary, but no earlier reasoning. `curr_summary` replaces the
        state's summary if that is too long."""
        summary = self.curr_summary if curr_summary is None else curr_summary
        return fill_template(
            self.settings.reasoning_prompt_template, {"problem": self.problem.text, "curr_summary": summary}
        )

    def get_filled_summarization_prompt(
        self, *, reasoning: str | None = None, existing_summary: str | None = None
    ) -> str:
        """The prompt of a summary turn: problem, summary so far, latest reasoning. Arguments replace texts that are too long."""
        values = {
            "problem": self.problem.text,
            "existing_summary": self.curr_summary if existing_summary is None else existing_summary,
            "reasoning": self.curr_reasoning if reasoning is None else reasoning,
        }
        return fill_template(self.settings.summarization_prompt_template, values)

    # --- turns that succeeded -----------------------------------------------------------------------------------------

    def update_reasoning(self, rollout: TrainingText, generation: Generation, reasoning: str) -> None:
        """Add a reasoning turn and complete its metadata. `reasoning` is the turn's processed text."""
        self._take_up(rollout, generation, REASONING, self.reasoning_turn_number + 1)
        self.curr_reasoning = reasoning
        self.reasoning_turn_number += 1
        self.reasoning_rollout_store.append(rollout)
        self.reasoning_string_store.append(self.curr_reasoning)
        self.reasoning_string_complete_store.append(rollout.text)

    def update_summarization(self, rollout: TrainingText, generation: Generation, summary: str) -> None:
        """Add a summary turn and complete its metadata. `summary` is the turn's processed text, "" if it is not usable."""
        self._take_up(rollout, generation, SUMMARIZATION, self.summarization_turn_number + 1)
        is_cut = not generation.finished and self.settings.truncated_summary == "keep_previous"
        if not summary:
            rollout.metadata["empty_summary"] = True
        if summary and not is_cut:
            self.curr_summary = summary
        else:
            rollout.metadata["kept_previous_summary"] = True
        self.summarization_turn_number += 1
        self.summarization_rollout_store.append(rollout)
        self.summarization_string_store.append(self.curr_summary)
        self.summarization_string_complete_store.append(rollout.text)

    def _take_up(self, rollout: TrainingText, generation: Generation, turn_type: str, turn_number: int) -> None:
        assert turn_type == self.next_turn_type, (turn_type, self.trajectory_id, self.overall_cycle_step)
        rollout.group_id = self.group_id
        rollout.trajectory_id = self.trajectory_id
        rollout.problem_id = self.problem.problem_id
        rollout.metadata |= {
            "model_version": generation.first_version,
            "rollout_index": self.rollout_index,
            "cycle_step": self.overall_cycle_step,
            "turn_type": turn_type,
            "turn_number": turn_number,
            "model_version_end": generation.last_version,
            "sample_id": self.sample_id,
            "dataset": self.problem.dataset,
        }
        if self.problem.row:
            rollout.metadata["row"] = self.problem.row
        if self.is_one_long_turn:
            rollout.metadata[CONTROL] = ONE_LONG_TURN
        if not generation.exact_tokens:
            rollout.metadata["exact_tokens"] = False
        self.overall_cycle_step += 1
