"""How old a sample may be, when a prompt may be issued, and which groups a training step takes.

Training step `t` (1, 2, …) trains weights of version `t - 1` into version `t`. A sample's age in it is `t - 1` minus the oldest
version that sampled one of its trained tokens.

    PromptFlow                                                                            prompts_per_step = N
      next_prompt ─► sent ─► arrive ─► assign ─► the step being assembled ─► close_step     threshold = T, bound = M
          ▲  issues while fewer prompts are unassigned      │
          │  than the steps up to version + 1 + T need      └─ takes the first arrivals of its window: the oldest
          └──────── discarded, recovered, failed ◄──────────   N + over_issued unassigned prompts

Pacing keeps the threshold by construction. A prompt is issued at version `v` while step `a` is assembled only if all unassigned
prompts, this one included, fit into the steps `a … v + 1 + T`. Without over-issuing each step takes the oldest prompts, so the
prompt lands in step `v + 1 + T` at the latest, where its age is `v + 1 + T - 1 - v = T`. Example: T = 2, and a prompt is issued
at version 3. It is trained in step 6 at the latest, which trains version 5: its age is at most 2.

With over-issuing a step takes the prompts that arrive first, so at most `over_issued` newer prompts can overtake an older prompt.
When such a straggler would pass the bound `M > T`, the straggler policy decides: the step waits for the straggler, or the
straggler is discarded or truncated once it is too old.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Literal

from open_instruct.rollouts.prompt_ledger import FAILED, IssuedPrompt, PromptLedger

StragglerPolicy = Literal["wait", "drop", "truncate"]


def last_admissible_step(version: int, *, async_steps: int, num_training_steps: int) -> int:
    """The highest training step whose prompts may be issued if every engine begins them with `version` or newer."""
    return min(version + 1 + async_steps, num_training_steps)


def sample_age(training_step: int, oldest_version: int) -> int:
    """Number of versions between the weights trained in `training_step` and the oldest weights that sampled a trained token."""
    return training_step - 1 - oldest_version


@dataclass(frozen=True)
class FlowOptions:
    """The options of `PromptFlow`; see the module."""

    prompts_per_step: int
    num_training_steps: int
    staleness_threshold: int
    max_staleness: int
    over_issued: int = 0
    straggler_policy: StragglerPolicy = "wait"


@dataclass(frozen=True)
class Assignment:
    """A complete group that belongs to the step being assembled."""

    prompt: IssuedPrompt
    oldest_trained_version: int
    """With the policy `truncate`, tokens of older versions are not trained on. With the other policies no token is older."""
    is_straggler: bool
    """Whether an earlier step took a prompt that was issued later."""


class PromptFlow:
    """Decides when a prompt is issued and which training step takes its group.

    Issue numbers for which `is_skipped` is true are left out. The controller reports what happened (`set_version`, `arrive`,
    `recover`, `give_up`) and asks what to do (`next_prompt`, `assign`). No call waits, and the class uses no clock and no thread;
    the caller holds a lock.
    """

    def __init__(
        self, options: FlowOptions, ledger: PromptLedger, is_skipped: Callable[[int], bool] = lambda number: False
    ) -> None:
        self.options = options
        self._is_skipped = is_skipped
        self.ledger = ledger
        self.version = 0
        self.assembling = 1
        """The training step whose batch is being put together."""
        self.num_stale_discarded = 0
        self.next_issue_number = 0
        self._unassigned: dict[int, str] = {}
        """Prompt ids by issue number, in the order of issue because issue numbers only grow."""
        self._unsent: list[int] = []
        """A heap of the issue numbers of prompts to be issued again. Some may have arrived since, some may be in it twice."""
        self._arrived: dict[int, str] = {}
        """Prompt ids of complete groups that no step has taken, in the order of arrival."""
        self._eligible: dict[int, str] = {}
        """The part of `_arrived` that is in the window."""
        self._must_wait_for: set[int] = set()
        """Issue numbers of the stragglers that the step being assembled must wait for, because the next step is too late."""
        self._places = options.prompts_per_step
        """Number of groups that the step being assembled still takes."""
        self._newest_assigned = self._newest_of_earlier_steps = -1
        self._window_end = -1
        self._window_room = 0
        self._update_window()

    # --- issuing ------------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Every engine begins prompts that are issued from now on with `version` or newer."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version

    @property
    def num_admissible(self) -> int:
        """How many prompts may be unassigned at once: the number of places in all steps that the threshold allows to fill now."""
        options = self.options
        last_step = last_admissible_step(
            self.version, async_steps=options.staleness_threshold, num_training_steps=options.num_training_steps
        )
        return (
            self._places + (last_step - self.assembling) * options.prompts_per_step
            if last_step >= self.assembling
            else 0
        )

    @property
    def num_unassigned(self) -> int:
        return len(self._unassigned)

    def next_prompt(self) -> IssuedPrompt | None:
        """The next prompt for the engines, issued at the version that they have or get. None while no prompt may be issued."""
        while self._unsent and not self._waits_for_issue(self._unsent[0]):
            heappop(self._unsent)
        if self._unsent:
            number = self._unsent[0]
            if not self._is_admissible(number):
                return None
            while self._unsent and self._unsent[0] == number:  # a prompt that was lost twice is issued once
                heappop(self._unsent)
            prompt = self.ledger[self._unassigned[number]]
            self.ledger.num_reissued += 1
        elif len(self._unassigned) < self.num_admissible:
            prompt = self._issue()
        else:
            return None
        prompt = replace(prompt, version=self.version, num_issues=prompt.num_issues + 1)
        self.ledger.update(prompt)
        return prompt

    def _is_admissible(self, number: int) -> bool:
        """Whether a lost prompt may be issued again now. It is false only after a resume with more unassigned prompts than are
        admissible, because the threshold was lowered or because the groups of extended steps ahead are lost."""
        if len(self._unassigned) <= self.num_admissible:
            return True
        return sum(1 for issue_number in self._unassigned if issue_number < number) < self.num_admissible

    def _waits_for_issue(self, number: int) -> bool:
        """Whether the prompt still has to be issued: its result may have arrived after it was taken for lost."""
        return number in self._unassigned and number not in self._arrived

    def _issue(self) -> IssuedPrompt:
        while self._is_skipped(self.next_issue_number):
            self.next_issue_number += 1
        number = self.next_issue_number
        prompt = IssuedPrompt(f"train-{number}", number, self.version)
        self.next_issue_number += 1
        self.ledger.issue(prompt)
        self._unassigned[number] = prompt.prompt_id
        if self._window_room > 0:
            self._window_room -= 1
            self._window_end = number
        return prompt

    # --- arrival ------------------------------------------------------------------------------------------------------

    def arrive(self, prompt_id: str, *, oldest_version: int, newest_version: int) -> bool:
        """A complete group has arrived. False if the group is not needed."""
        prompt = self.ledger.arrive(prompt_id)
        if prompt is None:
            return False
        self.ledger.update(replace(prompt, arrived=True, version=oldest_version, newest_version=newest_version))
        self._arrived[prompt.issue_number] = prompt_id
        if prompt.issue_number <= self._window_end:
            self._eligible[prompt.issue_number] = prompt_id
        if self._must_be_waited_for(prompt.issue_number, oldest_version):
            self._must_wait_for.add(prompt.issue_number)  # it was removed if the prompt was taken for lost
        return True

    def waits_for(self, prompt_id: str, being_scored: Collection[str] = ()) -> bool:
        """Whether a result for this prompt would be the first one. If not, it is counted as a duplicate."""
        if prompt_id in being_scored:
            self.ledger.num_duplicates += 1
            return False
        return self.ledger.arrive(prompt_id) is not None

    def waited_for(self, most: int) -> tuple[int, list[IssuedPrompt]]:
        """How many prompts are with the engines, or on the way there or back, and the first `most` in the order of issue."""
        waited_for = (prompt_id for number, prompt_id in self._unassigned.items() if number not in self._arrived)
        prompts = [self.ledger[prompt_id] for prompt_id in islice(waited_for, most)]
        return len(self._unassigned) - len(self._arrived), prompts

    def give_up(self, prompt_id: str, *, max_attempts: int) -> bool:
        """The engines failed on a prompt: issue it again, or drop it after `max_attempts` failures. True if it is issued again.

        Only failures count: with `max_attempts` 3, a prompt that was lost five times with an engine and failed twice is issued
        again.
        """
        prompt = self.ledger.arrive(prompt_id)
        if prompt is None:
            return False
        prompt = replace(prompt, num_failures=prompt.num_failures + 1)
        if prompt.num_failures < max_attempts:
            self._send_again(prompt)
            return True
        del self._unassigned[prompt.issue_number]
        self._must_wait_for.discard(prompt.issue_number)
        self.ledger.stage(prompt_id, FAILED, self.assembling)
        self._update_window()
        return False

    def recover(self, present: Collection[str]) -> list[str]:
        """An engine died: issue the prompts again that were sent, have not arrived and are not among `present` (ids of prompts in
        the prompt queue or with a living engine). Returns the ids of the lost prompts."""
        unsent = set(self._unsent)
        prompt_ids = [
            prompt_id
            for number, prompt_id in self._unassigned.items()
            if number not in self._arrived and number not in unsent and prompt_id not in present
        ]
        for prompt_id in prompt_ids:
            self._send_again(self.ledger[prompt_id])
        return prompt_ids

    def _send_again(self, prompt: IssuedPrompt) -> None:
        self.ledger.update(replace(prompt, arrived=False))
        self._arrived.pop(prompt.issue_number, None)
        self._eligible.pop(prompt.issue_number, None)
        self._must_wait_for.discard(prompt.issue_number)
        heappush(self._unsent, prompt.issue_number)

    # --- assembling ---------------------------------------------------------------------------------------------------

    def assign(self) -> list[Assignment]:
        """Give complete groups of the window to the step being assembled, in the order of arrival, until the step is full."""
        assigned = []
        while (number := self._next_to_assign()) is not None:
            if (assignment := self._assign(self.ledger[self._eligible[number]])) is not None:
                assigned.append(assignment)
        return assigned

    def _next_to_assign(self) -> int | None:
        """The group that arrived first in the window. If every place left is reserved for a straggler: an arrived straggler."""
        if self._places == 0:
            return None
        if self._places > len(self._must_wait_for):
            return next(iter(self._eligible), None)
        return next((number for number in self._must_wait_for if number in self._eligible), None)

    def _assign(self, prompt: IssuedPrompt) -> Assignment | None:
        oldest_allowed = self.assembling - 1 - self.options.max_staleness
        policy = self.options.straggler_policy
        if prompt.version < oldest_allowed and not (policy == "truncate" and prompt.newest_version >= oldest_allowed):
            # With the policy `wait` only a result whose prompt was taken for lost and issued again can be too old.
            self.num_stale_discarded += 1
            self._send_again(prompt)
            return None
        for waiting in (self._arrived, self._eligible, self._unassigned):
            del waiting[prompt.issue_number]
        self._must_wait_for.discard(prompt.issue_number)
        self._places -= 1
        is_straggler = prompt.issue_number < self._newest_of_earlier_steps
        self._newest_assigned = max(self._newest_assigned, prompt.issue_number)
        return Assignment(prompt, max(prompt.version, oldest_allowed), is_straggler)

    def _must_be_waited_for(self, number: int, oldest_version: int) -> bool:
        """Whether the step being assembled must wait for this prompt, because in the next step the prompt would break the bound.

        This happens only to stragglers, because all prompts that were issued at its version or before fit into earlier steps.
        """
        is_straggler = number < self._newest_of_earlier_steps
        next_is_too_late = oldest_version < self.assembling - self.options.max_staleness
        return is_straggler and next_is_too_late and self.options.straggler_policy == "wait"

    def _update_must_wait_for(self) -> None:
        stragglers = takewhile(lambda number: number < self._newest_of_earlier_steps, self._unassigned)
        self._must_wait_for = {
            number
            for number in stragglers
            if self._must_be_waited_for(number, self.ledger[self._unassigned[number]].version)
            and (number in self._arrived or number not in self._unsent)  # an unsent prompt gets newer tokens
        }

    def _window(self) -> Iterator[tuple[int, str]]:
        return islice(self._unassigned.items(), self._places + self.options.over_issued)

    @property
    def step_is_full(self) -> bool:
        return self._places == 0

    def extend_step(self, num_groups: int | None = None) -> None:
        """The batch of the step holds too little to train on, so the step takes further groups, by default `prompts_per_step`."""
        self._places += self.options.prompts_per_step if num_groups is None else num_groups
        self._update_window()

    def close_step(self) -> None:
        """The batch is complete; the next step is assembled."""
        assert self.step_is_full, f"step {self.assembling} has {self._places} places left"
        self.assembling += 1
        self._newest_of_earlier_steps = self._newest_assigned
        self._places = self.options.prompts_per_step
        self._update_window()
        self._update_must_wait_for()

    def _update_window(self) -> None:
        """Find the last prompt of the window. Assigning a prompt removes it from the window and fills a place, so the end of the
        window moves only when places are added."""
        window = self._places + self.options.over_issued
        self._window_room = max(0, window - len(self._unassigned))
        self._window_end = max((number for number, _ in self._window()), default=-1)
        self._eligible = {number: i for number, i in self._arrived.items() if number <= self._window_end}

    # --- resuming -----------------------------------------------------------------------------------------------------

    def start(self, training_step: int, finished: Collection[str] = ()) -> None:
        """Go on after `training_step`, whose weights every engine serves.

        Open prompts are issued again in the order of their first issue, except the prompts in `finished`, whose groups were saved
        and will `arrive`.
        """
        self.version = training_step
        self.assembling = training_step + 1
        for prompt in self.ledger.open_prompts():
            self._unassigned[prompt.issue_number] = prompt.prompt_id
            if prompt.prompt_id not in finished:
                heappush(self._unsent, prompt.issue_number)
        self._update_window()
