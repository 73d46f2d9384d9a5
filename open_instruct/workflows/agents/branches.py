"""The samples of one rollout while they grow. A request continues where an earlier request ended, or begins a new sample."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from open_instruct.data_types import Completion, Sample
from open_instruct.workflows.conversations.ledger import Ledger, Span


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
    is_copy: bool = False
    """Whether the branch was a copy that no sample stood for before."""


@dataclass
class Branches:
    """All samples of a rollout."""

    all: list[Branch] = field(default_factory=list)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def spans(self) -> list[Span]:
        """The spans of all samples. A span that several samples have in common is there once."""
        return list({id(span): span for branch in self.all for span in branch.ledger.spans}.values())

    def continued(self, branch: Branch | None) -> Branch | None:
        """The sample that a request goes on with: `branch`, or a copy of it if another request is continuing it. For example, a
        client that has given a request up asks again before the engine knows."""
        if branch is None or not branch.is_busy:
            return branch
        return Branch(branch.ledger, branch.talk, branch.finish_reason, last_request=branch.last_request)

    def begun_by(self, token_ids: Sequence[int]) -> Branch | None:
        """The longest sample whose tokens are a prefix of `token_ids`; None if there is none."""
        ids = np.asarray(token_ids, np.int32)
        prefix, longest = None, 0
        for branch in self.all:
            tokens = branch.ledger.token_ids
            is_better = longest < len(tokens) or (longest == len(tokens) and prefix is not None and prefix.is_busy)
            if is_better and len(tokens) <= len(ids) and np.array_equal(tokens, ids[: len(tokens)]):
                prefix, longest = branch, len(tokens)
        return prefix

    def grow(
        self, branch: Branch | None, token_ids: Sequence[int], completion: Completion, *, number: int, talk: Talk | None
    ) -> Grown:
        """Add what the policy said to the prompt `token_ids`, which begins with the tokens of `branch` if there is one."""
        before = None if branch is None else copy.copy(branch)
        is_copy = branch is not None and all(branch is not sibling for sibling in self.all)
        if branch is None:
            branch = Branch(Ledger(token_ids))
        if all(branch is not sibling for sibling in self.all):
            self.all.append(branch)
        ledger = copy.copy(branch.ledger)
        ledger.spans = list(ledger.spans)
        if before is not None:
            ledger.inserted(list(token_ids)[len(ledger.token_ids) :])
        ledger.sampled(completion)
        branch.ledger, branch.talk = ledger, talk
        branch.finish_reason, branch.last_request = completion.finish_reason, number
        return Grown(branch, before, is_copy)

    def take_back(self, growth: Grown, number: int) -> None:
        """Undo `grow`. The program never received the reply to request `number`, so nothing that it does depends on it."""
        if growth.branch.is_busy or growth.branch.last_request != number:
            return
        if growth.before is None or growth.is_copy:
            self.all.remove(growth.branch)
        else:
            vars(growth.branch).update(vars(growth.before), is_busy=False)

    def samples(self, *, finish_reason: str | None, reward: float | None) -> list[Sample]:
        """All samples. The sample of the last request comes last, and only this sample is judged.

        Args:
            finish_reason: finish reason of the last sample; None takes the reason for which its last turn ended.
        """
        branches = sorted(self._separate(), key=lambda branch: branch.last_request)
        return [
            branch.ledger.sample(
                finish_reason=finish_reason or branch.finish_reason if branch is branches[-1] else "stop",
                goes_on=branch is not branches[-1],
                environment_reward=reward,
            )
            for branch in branches
        ]

    def _separate(self) -> list[Branch]:
        """The samples without what they have in common, which is trained on once. A sample that another one continues is left
        out; of two samples that go on differently, the later one has the common part in its prompt."""
        longest_first = sorted(self.all, key=lambda branch: (-len(branch.ledger.spans), branch.last_request))
        branches: list[Branch] = []
        span_ids: set[int] = set()
        for branch in longest_first:
            spans = branch.ledger.spans
            num_common = sum(id(span) in span_ids for span in spans)
            if num_common == len(spans):
                continue
            while num_common < len(spans) and not spans[num_common].is_sampled:
                num_common += 1
            span_ids.update(map(id, spans))
            branches.append(branch if not num_common else replace(branch, ledger=branch.ledger.behind(num_common)))
        return branches
