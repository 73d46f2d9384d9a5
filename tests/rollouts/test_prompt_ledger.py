"""What becomes of prompts: the account balances whatever happens in whatever order."""

import copy
import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from open_instruct.rollouts.prompt_ledger import (
    CONSUMED,
    FAILED,
    MASKED,
    RUN_ENDED,
    ZERO_STD,
    IssuedPrompt,
    PromptLedger,
)


@dataclass
class Expected:
    """What a ledger should know, written down in the simplest way."""

    prompts: list[IssuedPrompt] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    staged: dict[str, tuple[int, str]] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    num_reissued: int = 0
    num_duplicates: int = 0

    @property
    def open(self) -> list[IssuedPrompt]:
        return [prompt for prompt in self.prompts if prompt.prompt_id not in self.fates]


class LedgerMachine(RuleBasedStateMachine):
    """Issues, results, results that come twice, fates, commits, the end of the run and kills, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PromptLedger()
        self.expected = Expected()
        self.saved: tuple[str, Expected] = (json.dumps(self.ledger.state_dict()), Expected())

    @rule(version=st.integers(0, 3))
    def issue(self, version: int) -> None:
        number = len(self.expected.prompts)
        prompt = IssuedPrompt(f"train-{number}", number, version)
        self.ledger.issue(prompt)
        self.expected.prompts.append(prompt)

    @rule(number=st.integers(0, 30))
    def arrive(self, number: int) -> None:
        prompt_id = f"train-{number}"
        waited_for = (
            {prompt.prompt_id for prompt in self.expected.open} - self.expected.arrived - {*self.expected.staged}
        )
        prompt = self.ledger.arrive(prompt_id)
        assert (prompt is not None) == (prompt_id in waited_for)
        if prompt is not None:
            self.ledger.update(dataclasses.replace(prompt, arrived=True))
            self.expected.arrived.add(prompt_id)
        else:
            self.expected.num_duplicates += 1

    @precondition(lambda self: self.undecided())
    @rule(data=st.data(), fate=st.sampled_from([CONSUMED, ZERO_STD, FAILED]), training_step=st.integers(1, 3))
    def stage(self, data: Any, fate: str, training_step: int) -> None:
        prompt_id = data.draw(st.sampled_from(self.undecided()))
        self.ledger.stage(prompt_id, fate, training_step)
        self.expected.staged[prompt_id] = training_step, fate

    def undecided(self) -> list[str]:
        return [p.prompt_id for p in self.expected.open if p.prompt_id not in self.expected.staged]

    @rule(training_step=st.integers(1, 3))
    def commit(self, training_step: int) -> None:
        settled = {i: fate for i, (step, fate) in self.expected.staged.items() if step == training_step}
        for prompt_id in settled:
            self.expected.fates[prompt_id] = self.expected.staged.pop(prompt_id)[1]
        in_order = [(p.prompt_id, settled[p.prompt_id]) for p in self.expected.prompts if p.prompt_id in settled]
        assert [(prompt.prompt_id, fate) for prompt, fate in self.ledger.commit(training_step)] == in_order

    @rule()
    def close(self) -> None:
        left_out = {i: fate for i, (_, fate) in self.expected.staged.items() if fate != CONSUMED}
        ended = {prompt.prompt_id: left_out.get(prompt.prompt_id, RUN_ENDED) for prompt in self.expected.open}
        assert [(prompt.prompt_id, fate) for prompt, fate in self.ledger.close()] == list(ended.items())
        self.expected.fates |= ended
        self.expected.staged = {}

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.ledger.state_dict()), copy.deepcopy(self.expected)

    @rule()
    def kill_and_load(self) -> None:
        state, expected = self.saved
        self.ledger, self.expected = PromptLedger(), copy.deepcopy(expected)
        self.ledger.load_state_dict(json.loads(state))
        # What was staged needs its samples, and they are gone.
        self.expected.staged = {}
        self.expected.arrived &= set(self.expected.fates)

    @invariant()
    def adds_up(self) -> None:
        counts: Any = self.ledger.counts()
        assert counts["issued"] == counts["consumed"] + sum(counts["dropped"].values()) + counts["open"]
        self.ledger.check()

    @invariant()
    def each_prompt_has_one_fate_and_the_right_one(self) -> None:
        fates = Counter(self.expected.fates.values())
        assert +self.ledger.fates == fates
        assert self.ledger.counts() == {
            "issued": len(self.expected.prompts),
            "consumed": fates.pop(CONSUMED, 0),
            "dropped": {reason: self.ledger.fates[reason] for reason in self.ledger.fates if reason != CONSUMED},
            "reissued": self.expected.num_reissued,
            "open": len(self.expected.open),
        }
        assert self.ledger.num_duplicates == self.expected.num_duplicates

    @invariant()
    def open_prompts_are_known_in_order(self) -> None:
        prompts = self.ledger.open_prompts()
        assert [prompt.prompt_id for prompt in prompts] == [prompt.prompt_id for prompt in self.expected.open]
        for prompt in prompts:
            assert prompt.arrived == (prompt.prompt_id in self.expected.arrived)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


@pytest.fixture
def ledger() -> PromptLedger:
    """Five prompts."""
    ledger = PromptLedger()
    for number in range(5):
        ledger.issue(IssuedPrompt(f"train-{number}", number, 0))
    return ledger


def test_a_staged_fate_is_not_final(ledger: PromptLedger) -> None:
    for number in range(4):
        ledger.stage(f"train-{number}", ZERO_STD if number == 3 else CONSUMED, 1)
    ledger.stage("train-4", CONSUMED, 2)
    assert ledger.counts() == {"issued": 5, "consumed": 0, "dropped": {}, "reissued": 0, "open": 5}
    ledger.commit(1)
    assert ledger.counts() == {"issued": 5, "consumed": 3, "dropped": {ZERO_STD: 1}, "reissued": 0, "open": 1}


def test_a_result_after_its_fate_changes_nothing(ledger: PromptLedger) -> None:
    ledger.stage("train-2", CONSUMED, 1)
    ledger.commit(1)
    before = ledger.counts()
    assert ledger.arrive("train-2") is None
    assert ledger.counts() == before


def test_a_result_of_a_prompt_that_was_just_given_up_is_not_waited_for(ledger: PromptLedger) -> None:
    ledger.stage("train-2", FAILED, 1)
    assert ledger.arrive("train-2") is None
    assert ledger.num_duplicates == 1


def test_places_used_are_those_of_prompts_with_a_fate_and_of_skipped_rows_before_them() -> None:
    ledger = PromptLedger()
    for number in (0, 1, 3, 4, 5, 7):  # the rows of 2 and 6 are solved, so they are skipped
        ledger.issue(IssuedPrompt(f"train-{number}", number, 0))
    assert ledger.num_places_used(1) == 0
    for number, fate, step in ((0, CONSUMED, 1), (1, ZERO_STD, 1), (3, CONSUMED, 1), (5, FAILED, 2)):
        ledger.stage(f"train-{number}", fate, step)
    assert (ledger.num_places_used(1), ledger.num_places_used(2)) == (4, 5)
    ledger.commit(1)
    again = PromptLedger()
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert (again.num_places_used(1), again.num_places_used(2)) == (4, 4)
    ledger.commit(2)
    assert ledger.num_places_used(2) == 5


def test_places_used_are_known_of_a_state_of_before_they_were_counted(ledger: PromptLedger) -> None:
    ledger.stage("train-0", CONSUMED, 1)
    ledger.stage("train-1", ZERO_STD, 1)
    ledger.commit(1)
    state = ledger.state_dict()
    del state["newest_settled"]
    ledger.load_state_dict(state)
    assert ledger.num_places_used(1) == 2


def test_close_drops_what_is_open(ledger: PromptLedger) -> None:
    ledger.stage("train-0", CONSUMED, 1)
    ledger.close()
    assert ledger.counts() == {"issued": 5, "consumed": 0, "dropped": {RUN_ENDED: 5}, "reissued": 0, "open": 0}


def test_close_keeps_the_reason_for_which_a_step_left_a_prompt_out(ledger: PromptLedger) -> None:
    for number, fate in enumerate([ZERO_STD, CONSUMED, MASKED, FAILED]):
        ledger.stage(f"train-{number}", fate, 1)
    ended = ledger.close()
    assert [fate for _, fate in ended] == [ZERO_STD, RUN_ENDED, MASKED, FAILED, RUN_ENDED]
    assert [prompt.prompt_id for prompt, _ in ended] == [f"train-{number}" for number in range(5)]
    assert ledger.counts() == {
        "issued": 5,
        "consumed": 0,
        "dropped": {ZERO_STD: 1, RUN_ENDED: 2, MASKED: 1, FAILED: 1},
        "reissued": 0,
        "open": 0,
    }


def test_what_cannot_be_is_refused(ledger: PromptLedger) -> None:
    with pytest.raises(AssertionError, match="train-0 is already issued"):
        ledger.issue(IssuedPrompt("train-0", 0, 1))
    with pytest.raises(AssertionError, match="train-9 got the fate consumed but is not open"):
        ledger.stage("train-9", CONSUMED, 1)
    ledger.stage("train-0", CONSUMED, 1)
    with pytest.raises(AssertionError, match="train-0 got the fate zero_std, but step 1 has it"):
        ledger.stage("train-0", ZERO_STD, 2)
    ledger.fates["lost"] += 1
    with pytest.raises(AssertionError, match="5 issued, 1 settled, 5 open"):
        ledger.check()
