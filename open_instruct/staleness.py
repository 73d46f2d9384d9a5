"""How old a sample may be, and what became of every prompt.

A training step `t` (1, 2, …) trains weights of version `t - 1` into version `t`; the prompts for it are issued no earlier than
`async_steps` versions before. Everything sampled for it is therefore at most `async_steps` versions old: the bound holds by
construction, and no finished work has to be thrown away to keep it.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace

CONSUMED = "consumed"
ZERO_STD = "zero_std"
RUN_ENDED = "run_ended"


def last_admissible_step(version: int, *, async_steps: int, num_training_steps: int) -> int:
    """The highest training step whose prompts may be issued while every engine serves `version` or newer."""
    return min(version + 1 + async_steps, num_training_steps)


def sample_age(training_step: int, oldest_version: int) -> int:
    """Versions between the weights being trained in `training_step` and the oldest that sampled one of its tokens."""
    return training_step - 1 - oldest_version


@dataclass(frozen=True)
class IssuedPrompt:
    """An issued prompt that has no fate yet."""

    prompt_id: str
    issue_number: int
    """Position in the run's prompt order, 0, 1, …"""
    training_step: int
    arrived: bool = False


class PromptLedger:
    """One prompt, one fate: issued = consumed + dropped (by reason) + open, at every moment.

    A fate is first `stage`d and becomes final when its training step is `commit`ted, so that a checkpoint between two steps
    never speaks of a step that it does not contain. Not thread-safe: the controller's lock guards it.
    """

    def __init__(self) -> None:
        self.num_issued = 0
        self.num_reissued = 0
        self.num_duplicates = 0
        self.fates: Counter[str] = Counter()
        self._open: dict[str, IssuedPrompt] = {}
        self._staged: dict[str, str] = {}

    def issue(self, prompt: IssuedPrompt) -> None:
        assert prompt.prompt_id not in self._open, f"{prompt.prompt_id} is already issued and open"
        self._open[prompt.prompt_id] = prompt
        self.num_issued += 1

    def arrive(self, prompt_id: str) -> bool:
        """Record a result; False if it is not waited for (it came twice, or its prompt has its fate already)."""
        prompt = self._open.get(prompt_id)
        if prompt is None or prompt.arrived:
            self.num_duplicates += 1
            return False
        self._open[prompt_id] = replace(prompt, arrived=True)
        return True

    def for_step(self, training_step: int) -> list[IssuedPrompt]:
        """Open prompts of a step in the order in which they were issued."""
        prompts = [p for p in self._open.values() if p.training_step == training_step]
        return sorted(prompts, key=lambda p: p.issue_number)

    def is_staged(self, prompt_id: str) -> bool:
        return prompt_id in self._staged

    def stage(self, prompt_id: str, fate: str) -> None:
        """Decide a fate that becomes final with the commit of the prompt's step."""
        assert prompt_id in self._open, f"{prompt_id} got the fate {fate} but is not open"
        assert prompt_id not in self._staged, f"{prompt_id} got the fate {fate} after {self._staged.get(prompt_id)}"
        self._staged[prompt_id] = fate

    def commit(self, training_step: int) -> list[tuple[IssuedPrompt, str]]:
        """The step was trained: make the fates of its prompts final; they come back in the order of issue."""
        prompts = self.for_step(training_step)
        undecided = [prompt.prompt_id for prompt in prompts if prompt.prompt_id not in self._staged]
        assert not undecided, f"step {training_step} is done, but {undecided} have no fate"
        settled = [(prompt, self._staged.pop(prompt.prompt_id)) for prompt in prompts]
        for prompt, fate in settled:
            self.fates[fate] += 1
            del self._open[prompt.prompt_id]
        self.check()
        return settled

    def close(self, reason: str = RUN_ENDED) -> None:
        """The run ends here: whatever is still open is dropped for `reason`."""
        self.fates[reason] += len(self._open)
        self._open.clear()
        self._staged.clear()
        self.check()

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
        """Plain values. Results are not part of it: open prompts will be issued again, but for those found to teach nothing."""
        return {
            "num_issued": self.num_issued,
            "num_reissued": self.num_reissued,
            "num_duplicates": self.num_duplicates,
            "fates": dict(self.fates),
            "open": [asdict(prompt) for prompt in self._open.values()],
            "zero_std": [prompt_id for prompt_id, fate in self._staged.items() if fate == ZERO_STD],
        }

    def load_state_dict(self, state: dict) -> list[IssuedPrompt]:
        """Restore, and return the open prompts that have to be issued again, in this order."""
        self.num_issued = state["num_issued"]
        self.num_duplicates = state["num_duplicates"]
        self.fates = Counter(state["fates"])
        self._staged = dict.fromkeys(state["zero_std"], ZERO_STD)
        self._open = {prompt["prompt_id"]: IssuedPrompt(**prompt) for prompt in state["open"]}
        prompts = [
            replace(prompt, arrived=False) for prompt in self._open.values() if not self.is_staged(prompt.prompt_id)
        ]
        prompts.sort(key=lambda p: p.issue_number)
        self._open |= {prompt.prompt_id: prompt for prompt in prompts}
        self.num_reissued = state["num_reissued"] + len(prompts)
        self.check()
        return prompts
