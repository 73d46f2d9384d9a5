"""What became of every prompt of a run: issued = consumed + dropped + open, at every moment."""

from collections import Counter
from dataclasses import asdict, dataclass

from open_instruct.scored_groups import CONSUMED

ZERO_STD = "zero_std"
MASKED = "masked"
"""No token of the group may be trained on, because all its responses were cut off (`mask_truncated_completions`)."""
FAILED = "failed"
RUN_ENDED = "run_ended"


@dataclass(frozen=True)
class IssuedPrompt:
    """An issued prompt whose outcome is not known yet."""

    prompt_id: str
    issue_number: int
    """Position in the run's prompt order, 0, 1, …"""
    version: int
    """Lower bound on the version of every token of the group: `PromptFlow.version` at the last issue of the prompt, replaced by
    the version of the oldest token when the group arrives."""
    newest_version: int = -1
    """Version of the newest token of the group, from its arrival on."""
    arrived: bool = False
    num_issues: int = 0
    """How often the prompt was issued."""
    num_failures: int = 0
    """How often an engine gave the group up. If the prompt is issued again because its engine died or the run was resumed, that
    is not a failure."""


class PromptLedger:
    """The account of all prompts. Each prompt gets one fate: consumed, or dropped for a reason. At every moment the number of
    issued prompts equals consumed + dropped + open.

    A fate is first staged for a training step (`stage`) and becomes final when that step has been trained (`commit`). So a
    checkpoint between two steps holds no fate of a later step. Not thread-safe: the controller's lock guards it.
    """

    def __init__(self) -> None:
        self.num_issued = 0
        self.num_reissued = 0
        self.num_duplicates = 0
        self.fates: Counter[str] = Counter()
        self._newest_settled = -1
        """The highest issue number with a final fate."""
        self._open: dict[str, IssuedPrompt] = {}
        self._staged: dict[int, dict[str, str]] = {}

    def __getitem__(self, prompt_id: str) -> IssuedPrompt:
        return self._open[prompt_id]

    def open_prompts(self) -> list[IssuedPrompt]:
        """In the order of their first issue."""
        return sorted(self._open.values(), key=lambda p: p.issue_number)

    def issue(self, prompt: IssuedPrompt) -> None:
        assert prompt.prompt_id not in self._open, f"{prompt.prompt_id} is already issued and open"
        self._open[prompt.prompt_id] = prompt
        self.num_issued += 1

    def update(self, prompt: IssuedPrompt) -> None:
        """Replace what is known of an open prompt. The prompt stays open."""
        assert prompt.prompt_id in self._open, f"{prompt.prompt_id} is not open"
        self._open[prompt.prompt_id] = prompt

    def arrive(self, prompt_id: str) -> IssuedPrompt | None:
        """The prompt of a result that arrived. None if the result is not needed: it arrived twice, or its prompt has a fate."""
        prompt = self._open.get(prompt_id)
        if prompt is None or prompt.arrived or self._step_of_fate(prompt_id) is not None:
            self.num_duplicates += 1
            return None
        return prompt

    def stage(self, prompt_id: str, fate: str, training_step: int) -> None:
        """Give a prompt the fate that becomes final when `training_step` is committed."""
        assert prompt_id in self._open, f"{prompt_id} got the fate {fate} but is not open"
        staged = self._step_of_fate(prompt_id)
        assert staged is None, f"{prompt_id} got the fate {fate}, but step {staged} has it"
        self._staged.setdefault(training_step, {})[prompt_id] = fate

    def _step_of_fate(self, prompt_id: str) -> int | None:
        """The step that makes the prompt's staged fate final."""
        return next((step for step, fates in self._staged.items() if prompt_id in fates), None)

    def left_out(self) -> list[tuple[int, IssuedPrompt, str]]:
        """Prompts with a staged fate other than consumed: step, prompt, fate."""
        return [
            (step, self._open[prompt_id], fate)
            for step, fates in self._staged.items()
            for prompt_id, fate in fates.items()
            if fate != CONSUMED
        ]

    def commit(self, training_step: int) -> list[tuple[IssuedPrompt, str]]:
        """The step was trained: make the fates of its prompts final. Returns these prompts and fates in the order of issue."""
        staged = self._staged.pop(training_step, {})
        pairs = sorted(
            ((self._open.pop(prompt_id), fate) for prompt_id, fate in staged.items()),
            key=lambda pair: pair[0].issue_number,
        )
        self.fates.update(fate for _, fate in pairs)
        self._newest_settled = max([self._newest_settled, *(prompt.issue_number for prompt, _ in pairs)])
        self.check()
        return pairs

    def num_places_used(self, training_step: int) -> int:
        """How many places of the prompt order the steps up to this one have used: those of prompts with a fate, and those of rows
        that were skipped before the newest of these prompts.

        Example: prompts 0, 1, 3 and 5 have a fate, 4 is still with the engines, and the row of 2 was skipped: 5 places of 6.
        """
        staged = {prompt_id for step, fates in self._staged.items() if step <= training_step for prompt_id in fates}
        newest = max([self._newest_settled, *(self._open[prompt_id].issue_number for prompt_id in staged)])
        undecided = (prompt for prompt_id, prompt in self._open.items() if prompt_id not in staged)
        return newest + 1 - sum(prompt.issue_number < newest for prompt in undecided)

    def close(self, reason: str = RUN_ENDED) -> list[tuple[IssuedPrompt, str]]:
        """The run ends: drop every prompt that is still open. Returns these prompts and fates in the order of issue.

        A prompt that a step has already left out keeps the reason for that. All other prompts are dropped for `reason`. Example:
        the step that is being put together has left out 3 groups as `zero_std` and was going to train on 2; 4 prompts are with
        the engines. Then 3 prompts are dropped as `zero_std` and 6 as `run_ended`.
        """
        staged = {prompt_id: fate for fates in self._staged.values() for prompt_id, fate in fates.items()}
        pairs = [
            (prompt, reason if (fate := staged.get(prompt.prompt_id, CONSUMED)) == CONSUMED else fate)
            for prompt in self.open_prompts()
        ]
        self.fates.update(fate for _, fate in pairs)
        self._open.clear()
        self._staged.clear()
        self.check()
        return pairs

    def check(self) -> None:
        settled = sum(self.fates.values())
        assert self.num_issued == settled + len(self._open), (
            f"ledger does not add up: {self.num_issued} issued, {settled} settled, {len(self._open)} open"
        )

    def counts(self) -> dict[str, object]:
        """`issued`, `consumed`, `dropped` by reason, `reissued`, `open`: groups of samples since the run's first start."""
        dropped = {fate: number for fate, number in self.fates.items() if fate != CONSUMED}
        return {
            "issued": self.num_issued,
            "consumed": self.fates[CONSUMED],
            "dropped": dropped,
            "reissued": self.num_reissued,
            "open": len(self._open),
        }

    def state_dict(self) -> dict:
        """Plain values. Results and staged fates are left out: a prompt that a step has taken but not trained is open."""
        return {
            "num_issued": self.num_issued,
            "num_reissued": self.num_reissued,
            "num_duplicates": self.num_duplicates,
            "fates": dict(self.fates),
            "newest_settled": self._newest_settled,
            "open": [asdict(prompt) for prompt in self.open_prompts()],
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` gave. The open prompts count as neither sent nor arrived."""
        self.num_issued = state["num_issued"]
        self.num_reissued = state["num_reissued"]
        self.num_duplicates = state["num_duplicates"]
        self.fates = Counter(state["fates"])
        self._newest_settled = state.get("newest_settled", sum(self.fates.values()) - 1)  # states of earlier versions
        self._staged = {}
        self._open = {prompt["prompt_id"]: _restored(prompt) for prompt in state["open"]}
        self.check()


def _restored(prompt: dict) -> IssuedPrompt:
    """A prompt of a saved state. Old states have `num_attempts`, which counted issues and says nothing about failures."""
    return IssuedPrompt(
        **{name: value for name, value in prompt.items() if name != "num_attempts"} | {"arrived": False}
    )
