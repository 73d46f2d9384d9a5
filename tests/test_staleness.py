"""How old a sample may be, and what becomes of prompts: whatever happens in whatever order."""

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from open_instruct.staleness import (
    CONSUMED,
    RUN_ENDED,
    ZERO_STD,
    IssuedPrompt,
    PromptLedger,
    last_admissible_step,
    sample_age,
)

# --- the bound --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(version=st.integers(0, 50), later=st.integers(0, 10), async_steps=st.integers(0, 5), total=st.integers(1, 40))
def test_nothing_admitted_exceeds_the_bound(version: int, later: int, async_steps: int, total: int) -> None:
    last = last_admissible_step(version, async_steps=async_steps, num_training_steps=total)
    assert last <= total
    for training_step in range(version + 1, last + 1):
        # Its oldest token is of the version of its admission or of a later one.
        oldest = min(version + later, training_step - 1)
        assert 0 <= sample_age(training_step, oldest) <= async_steps


@settings(deadline=None)
@given(version=st.integers(0, 50), async_steps=st.integers(0, 5), total=st.integers(1, 40))
def test_all_that_may_be_admitted_is(version: int, async_steps: int, total: int) -> None:
    last = last_admissible_step(version, async_steps=async_steps, num_training_steps=total)
    assert last == total or sample_age(last + 1, version) == async_steps + 1
    # The next step is always admitted: training never waits for a prompt that waits for training.
    assert last >= min(version + 1, total)


@pytest.mark.parametrize(("async_steps", "expected"), [(0, [1, 2, 3, 4, 4]), (1, [2, 3, 4, 4, 4]), (9, [4] * 5)])
def test_last_admissible_step_of_a_run_of_four(async_steps: int, expected: list[int]) -> None:
    assert [
        last_admissible_step(version, async_steps=async_steps, num_training_steps=4) for version in range(5)
    ] == expected


def test_sample_age() -> None:
    assert sample_age(1, 0) == 0
    assert sample_age(5, 4) == 0
    assert sample_age(5, 2) == 2


# --- the ledger -------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a ledger should know, written down in the simplest way."""

    prompts: list[IssuedPrompt] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    staged: dict[str, str] = field(default_factory=dict)
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

    @rule(training_step=st.integers(1, 3))
    def issue(self, training_step: int) -> None:
        number = len(self.expected.prompts)
        prompt = IssuedPrompt(f"train-{number}", number, training_step)
        self.ledger.issue(prompt)
        self.expected.prompts.append(prompt)

    @rule(number=st.integers(0, 30))
    def arrive(self, number: int) -> None:
        prompt_id = f"train-{number}"
        waited_for = {prompt.prompt_id for prompt in self.expected.open} - self.expected.arrived
        assert self.ledger.arrive(prompt_id) == (prompt_id in waited_for)
        if prompt_id in waited_for:
            self.expected.arrived.add(prompt_id)
        else:
            self.expected.num_duplicates += 1

    @precondition(lambda self: self.undecided())
    @rule(data=st.data(), fate=st.sampled_from([CONSUMED, ZERO_STD]))
    def stage(self, data: Any, fate: str) -> None:
        prompt_id = data.draw(st.sampled_from(self.undecided()))
        self.ledger.stage(prompt_id, fate)
        self.expected.staged[prompt_id] = fate

    def undecided(self) -> list[str]:
        return [p.prompt_id for p in self.expected.open if p.prompt_id not in self.expected.staged]

    @rule(training_step=st.integers(1, 3), fate=st.sampled_from([CONSUMED, ZERO_STD]))
    def commit(self, training_step: int, fate: str) -> None:
        for prompt in self.expected.open:
            if prompt.training_step == training_step:
                if not self.ledger.is_staged(prompt.prompt_id):
                    self.ledger.stage(prompt.prompt_id, fate)
                    self.expected.staged[prompt.prompt_id] = fate
                self.expected.fates[prompt.prompt_id] = self.expected.staged.pop(prompt.prompt_id)
        self.ledger.commit(training_step)

    @rule()
    def close(self) -> None:
        self.ledger.close()
        self.expected.fates |= {prompt.prompt_id: RUN_ENDED for prompt in self.expected.open}
        self.expected.staged = {}

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.ledger.state_dict()), copy.deepcopy(self.expected)

    @rule()
    def kill_and_load(self) -> None:
        state, expected = self.saved
        self.ledger, self.expected = PromptLedger(), copy.deepcopy(expected)
        issued_again = self.ledger.load_state_dict(json.loads(state))
        # What taught nothing need not be sampled again; a fate of consumed needs its samples, and they are gone.
        self.expected.staged = {i: fate for i, fate in self.expected.staged.items() if fate == ZERO_STD}
        assert issued_again == [p for p in self.expected.open if p.prompt_id not in self.expected.staged]
        self.expected.num_reissued += len(issued_again)
        self.expected.arrived &= {*self.expected.fates, *self.expected.staged}

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
    def open_prompts_are_known_by_step_in_order(self) -> None:
        for training_step in (1, 2, 3):
            of_step = self.ledger.for_step(training_step)
            expected = [prompt for prompt in self.expected.open if prompt.training_step == training_step]
            assert [prompt.prompt_id for prompt in of_step] == [prompt.prompt_id for prompt in expected]
            for prompt in of_step:
                assert prompt.arrived == (prompt.prompt_id in self.expected.arrived)
                assert self.ledger.is_staged(prompt.prompt_id) == (prompt.prompt_id in self.expected.staged)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


@pytest.fixture
def ledger() -> PromptLedger:
    """Four prompts of step 1 and one of step 2; the first two have come back."""
    ledger = PromptLedger()
    for number in range(5):
        ledger.issue(IssuedPrompt(f"train-{number}", number, 1 if number < 4 else 2))
    assert ledger.arrive("train-0")
    assert ledger.arrive("train-1")
    return ledger


def test_a_result_counts_once(ledger: PromptLedger) -> None:
    assert not ledger.arrive("train-0")
    assert not ledger.arrive("train-99")
    assert ledger.num_duplicates == 2
    assert ledger.arrive("train-2")


def test_a_staged_fate_is_not_final(ledger: PromptLedger) -> None:
    for number in range(4):
        ledger.stage(f"train-{number}", ZERO_STD if number == 3 else CONSUMED)
    assert ledger.counts() == {"issued": 5, "consumed": 0, "dropped": {}, "reissued": 0, "open": 5}
    ledger.commit(1)
    assert ledger.counts() == {"issued": 5, "consumed": 3, "dropped": {ZERO_STD: 1}, "reissued": 0, "open": 1}


def test_a_result_after_its_fate_changes_nothing(ledger: PromptLedger) -> None:
    for number in range(4):
        ledger.stage(f"train-{number}", CONSUMED)
    ledger.commit(1)
    before = ledger.counts()
    assert not ledger.arrive("train-2")
    assert ledger.counts() == before


def test_close_drops_what_is_open(ledger: PromptLedger) -> None:
    ledger.stage("train-0", CONSUMED)
    ledger.close()
    assert ledger.counts() == {"issued": 5, "consumed": 0, "dropped": {RUN_ENDED: 5}, "reissued": 0, "open": 0}
    assert not ledger.is_staged("train-0")


def test_a_checkpoint_issues_again_what_it_holds_no_fate_of(ledger: PromptLedger) -> None:
    ledger.stage("train-0", CONSUMED)
    state = json.loads(json.dumps(ledger.state_dict()))
    state["open"].reverse()
    resumed = PromptLedger()
    again = resumed.load_state_dict(state)
    assert [(p.prompt_id, p.issue_number, p.training_step, p.arrived) for p in again] == [
        (f"train-{number}", number, 1 if number < 4 else 2, False) for number in range(5)
    ]
    assert resumed.counts() == {"issued": 5, "consumed": 0, "dropped": {}, "reissued": 5, "open": 5}
    assert resumed.arrive("train-0")


def test_what_cannot_be_is_refused(ledger: PromptLedger) -> None:
    with pytest.raises(AssertionError, match="train-0 is already issued"):
        ledger.issue(IssuedPrompt("train-0", 0, 1))
    with pytest.raises(AssertionError, match="train-9 got the fate consumed but is not open"):
        ledger.stage("train-9", CONSUMED)
    ledger.stage("train-0", CONSUMED)
    with pytest.raises(AssertionError, match="train-0 got the fate zero_std after consumed"):
        ledger.stage("train-0", ZERO_STD)
    ledger.fates["lost"] += 1
    with pytest.raises(AssertionError, match="5 issued, 1 settled, 5 open"):
        ledger.check()
