"""The samples of one rollout while they grow. A request continues where an earlier request ended, or begins a new sample."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from open_instruct.data_types import Completion, Sample
from open_instruct.workflows.conversations.ledger import Ledger


@dataclass(frozen=True)
class Talk:
    """The messages behind a sample, if the program used the chat endpoint."""

    messages: list[dict[str, Any]]
    """The last message is the model's."""
    tools: list[dict[str, Any]]
    ending: str
    """The control tokens with which the model's last turn ended; empty if it ended without any."""


@dataclass(eq=False)
class Branch:
    """A sample that may still grow."""

    ledger: Ledger
    talk: Talk | None = None
    finish_reason: str = "stop"
    is_busy: bool = False
    """Whether a request that continues this sample is running."""
    last_request: int = -1


@dataclass(frozen=True)
class Grown:
    """What a completion has changed, so that the change can be undone."""

    branch: Branch
    before: Branch | None
    """None: the branch is new."""


@dataclass
class Branches:
    """All samples of a rollout."""

    all: list[Branch] = field(default_factory=list)

    @property
    def idle(self) -> list[Branch]:
        """Samples that a request may continue."""
        return [branch for branch in self.all if not branch.is_busy]

    @property
    def num_response_tokens(self) -> int:
        return sum(branch.ledger.num_response_tokens for branch in self.all)

    def begun_by(self, token_ids: Sequence[int]) -> Branch | None:
        """The longest sample whose tokens are a prefix of `token_ids`; None if there is none."""
        ids = np.asarray(token_ids, np.int32)
        found, longest = None, 0
        for branch in self.idle:
            known = branch.ledger.token_ids
            if longest < len(known) <= len(ids) and np.array_equal(known, ids[: len(known)]):
                found, longest = branch, len(known)
        return found

    def grow(
        self, branch: Branch | None, token_ids: Sequence[int], said: Completion, *, number: int, talk: Talk | None
    ) -> Grown:
        """Add what the policy said to the prompt `token_ids`, which begins with the tokens of `branch` if there is one."""
        before = None if branch is None else copy.copy(branch)
        if branch is None:
            branch = Branch(Ledger(token_ids))
            self.all.append(branch)
        ledger = copy.copy(branch.ledger)
        ledger.spans = list(ledger.spans)
        if before is not None:
            ledger.inserted(list(token_ids)[len(ledger.token_ids) :])
        ledger.sampled(said)
        branch.ledger, branch.talk, branch.finish_reason, branch.last_request = ledger, talk, said.finish_reason, number
        return Grown(branch, before)

    def take_back(self, grown: Grown, number: int) -> None:
        """Undo `grow`. The program never received the reply to request `number`, so nothing that it does depends on it."""
        if grown.branch.is_busy or grown.branch.last_request != number:
            return
        if grown.before is None:
            self.all.remove(grown.branch)
        else:
            vars(grown.branch).update(vars(grown.before), is_busy=False)

    def samples(self, *, finish_reason: str | None, reward: float | None) -> list[Sample]:
        """All samples. The sample of the last request comes last, and only this sample is judged.

        Args:
            finish_reason: finish reason of the last sample; None takes the reason for which its last turn ended.
        """
        grown = sorted((one for one in self.all if one.ledger.spans), key=lambda branch: branch.last_request)
        return [
            branch.ledger.sample(
                finish_reason=finish_reason or branch.finish_reason if branch is grown[-1] else "stop",
                goes_on=branch is not grown[-1],
                environment_reward=reward,
            )
            for branch in grown
        ]
