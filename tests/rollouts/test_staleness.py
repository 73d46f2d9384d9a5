"""How old a sample may be, and which prompts a step takes: whatever happens in whatever order."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from open_instruct.rollouts.prompt_ledger import CONSUMED, FAILED, ZERO_STD, PromptLedger
from open_instruct.rollouts.staleness import FlowOptions, PromptFlow, last_admissible_step, sample_age

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


# --- the flow of prompts ----------------------------------------------------------------------------------------------


class Flow:
    """A `PromptFlow` of two prompts a step, as the tests speak to it."""

    def __init__(self, threshold: int = 0, bound: int | None = None, **options: Any) -> None:
        flow_options = FlowOptions(2, 6, threshold, threshold if bound is None else bound, **options)
        self.flow = PromptFlow(flow_options, PromptLedger())

    def issue(self) -> list[int]:
        """Numbers of all prompts that may be issued now."""
        numbers = []
        while (prompt := self.flow.next_prompt()) is not None:
            numbers.append(prompt.issue_number)
        return numbers

    def arrive(self, *numbers: int, oldest: int | None = None, newest: int | None = None) -> None:
        version = self.flow.version
        for number in numbers:
            waited_for = self.flow.arrive(
                f"train-{number}",
                oldest_version=version if oldest is None else oldest,
                newest_version=version if newest is None else newest,
            )
            assert waited_for, number

    def assign(self) -> list[int]:
        assigned = self.flow.assign()
        for one in assigned:
            self.flow.ledger.stage(one.prompt.prompt_id, CONSUMED, self.flow.assembling)
        return [one.prompt.issue_number for one in assigned]

    def finish_step(self) -> None:
        """Close, train, and send the weights."""
        self.flow.close_step()
        step = self.flow.assembling - 1
        self.flow.ledger.commit(step)
        self.flow.set_version(step)


def test_a_step_takes_the_oldest_prompts_whatever_comes_first() -> None:
    play = Flow(threshold=1)
    assert play.issue() == [0, 1, 2, 3]
    play.arrive(3, 1)
    assert play.assign() == [1]  # 3 is for the next step
    play.arrive(0)
    assert play.assign() == [0]
    play.finish_step()
    assert play.assign() == [3]
    assert play.issue() == [4, 5]


def test_over_issuing_takes_the_first_to_come() -> None:
    play = Flow(threshold=1, bound=3, over_issued=1)
    play.issue()
    play.arrive(2, 1)
    assert play.assign() == [2, 1]
    play.finish_step()
    assert play.issue() == [4, 5]
    play.arrive(3, 4)  # 4 is outside of the window: 0 and 3 and one more
    assert play.assign() == [3, 4]


def test_waiting_for_one_that_would_be_too_old() -> None:
    play = Flow(threshold=1, bound=2, over_issued=1)
    play.issue()
    play.arrive(1, 2)
    assert play.assign() == [1, 2]  # 0 is left behind, sampled from version 0
    play.finish_step()
    play.issue()
    play.arrive(3, 4)
    assert play.assign() == [3, 4]  # in step 3 it would be 2 steps old: that is allowed
    play.finish_step()
    play.issue()
    play.arrive(5, 6)
    assert play.assign() == [5]  # in step 4 it would be 3 steps old: the other place is kept for it
    play.arrive(0, oldest=0)
    assert play.assign() == [0]


@pytest.mark.parametrize(("policy", "newest"), [("drop", 3), ("truncate", 0), ("truncate", 1)])
def test_one_that_is_too_old(policy: Any, newest: int) -> None:
    play = Flow(threshold=1, bound=2, over_issued=1, straggler_policy=policy)
    for numbers in ((1, 2), (3, 4), (5, 6)):
        play.issue()
        play.arrive(*numbers)
        assert play.assign() == list(numbers)
        play.finish_step()
    play.issue()
    play.arrive(0, oldest=0, newest=newest)
    [*assigned] = play.flow.assign()
    if policy == "truncate" and newest >= 1:  # step 4 allows version 1
        assert [(one.prompt.issue_number, one.oldest_trained_version) for one in assigned] == [(0, 1)]
        return
    assert assigned == []
    assert play.flow.num_stale_discarded == 1
    assert play.issue() == [0]  # issued again, at the version of now
    assert play.flow.ledger["train-0"].version == 3
    assert play.flow.ledger.num_reissued == 1


def test_a_step_of_groups_that_teach_nothing_gets_as_many_again() -> None:
    play = Flow()
    assert play.issue() == [0, 1]
    play.arrive(0, 1)
    for one in play.flow.assign():
        play.flow.ledger.stage(one.prompt.prompt_id, ZERO_STD, 1)
    assert play.issue() == []
    play.flow.extend_step()
    assert play.issue() == [2, 3]
    play.arrive(3, 2)
    assert play.assign() == [3, 2]
    play.finish_step()
    assert play.flow.ledger.counts()["dropped"] == {ZERO_STD: 2}


def test_a_step_may_take_a_few_groups_more() -> None:
    play = Flow()
    assert play.issue() == [0, 1]
    play.arrive(0, 1)
    assert play.assign() == [0, 1]
    play.flow.extend_step(1)
    assert play.issue() == [2]
    play.arrive(2)
    assert play.assign() == [2]
    play.finish_step()
    assert play.issue() == [3, 4]


def test_numbers_that_are_skipped_are_never_issued() -> None:
    play = Flow()
    play.flow = PromptFlow(play.flow.options, PromptLedger(), lambda number: number in (0, 2, 3))
    assert play.issue() == [1, 4]
    play.arrive(4, 1)
    assert play.assign() == [4, 1]
    play.finish_step()
    assert play.issue() == [5, 6]


def test_what_an_engine_took_with_it_is_issued_again_first() -> None:
    play = Flow(threshold=1)
    play.issue()
    play.arrive(1)
    assert play.flow.recover(present={"train-3"}) == ["train-0", "train-2"]
    assert play.issue() == [0, 2]
    play.arrive(0, 2, 3)
    assert not play.flow.waits_for("train-2")  # it was not lost after all
    assert play.flow.ledger.num_duplicates == 1


def test_one_that_comes_after_it_was_given_up_for_lost_is_not_issued_again() -> None:
    play = Flow()
    play.issue()
    assert play.flow.recover(present=()) == ["train-0", "train-1"]
    play.arrive(0)
    assert play.issue() == [1]
    play.arrive(1)
    assert play.assign() == [0, 1]


def test_one_that_comes_late_and_too_old_is_issued_again_even_where_the_policy_is_to_wait() -> None:
    play = Flow(threshold=1, bound=2, over_issued=1)
    for numbers in ((1, 2), (3, 4), (5, 6)):
        play.issue()
        if numbers[0] == 5:
            assert play.flow.recover(present=()) != []
            play.issue()
        play.arrive(*numbers)
        assert play.assign() == list(numbers)
        play.finish_step()
    play.arrive(0, oldest=0)  # its engine was taken for dead, and it is 3 steps old
    assert play.assign() == []
    assert play.issue() == [0, 8, 9]


def test_one_that_comes_late_while_it_waits_to_be_issued_has_its_last_chance() -> None:
    play = Flow(threshold=1, bound=2, over_issued=1)
    for numbers in ((1, 2), (3, 4)):
        play.issue()
        play.arrive(*numbers)
        assert play.assign() == list(numbers)
        play.finish_step()
    play.issue()
    assert play.flow.recover(present={"train-5", "train-6", "train-7"}) == ["train-0"]
    play.arrive(5)
    assert play.assign() == [5]
    play.arrive(6)
    play.arrive(0, oldest=0)
    assert play.assign() == [0]


def test_nobody_waits_for_one_that_will_be_issued_again_with_newer_weights() -> None:
    play = Flow(threshold=1, bound=2, over_issued=1)
    for numbers in ((1, 2), (3, 4)):
        play.issue()
        play.arrive(*numbers)
        assert play.assign() == list(numbers)
        if numbers == (3, 4):
            play.flow.recover(present=())
        play.finish_step()
    assert play.issue() == [0, 5, 6, 7]
    play.arrive(5, 6)
    assert play.assign() == [5, 6]


def test_a_place_is_kept_for_a_last_chance_whatever_comes_at_once() -> None:
    play = Flow(threshold=1, bound=2, over_issued=2)
    for numbers in ((2, 3), (4, 5)):
        play.issue()
        play.arrive(*numbers)
        assert play.assign() == list(numbers)
        play.finish_step()
    play.issue()
    play.arrive(6, 7)
    assert play.assign() == []  # both places are kept for 0 and 1
    play.arrive(1, oldest=0)
    assert play.assign() == [1]
    play.arrive(0, oldest=0)
    assert play.assign() == [0]


def test_one_that_is_lost_twice_is_issued_once() -> None:
    play = Flow()
    play.issue()
    assert play.flow.recover(present={"train-1"}) == ["train-0"]
    assert play.flow.give_up("train-0", max_attempts=3)  # the engine that was taken for dead gave it up
    assert play.issue() == [0]
    assert play.flow.ledger.num_reissued == 1


def test_two_copies_that_both_fail_for_the_last_time_are_one_failure() -> None:
    play = Flow()
    play.issue()
    assert not play.flow.give_up("train-1", max_attempts=1)
    assert not play.flow.give_up("train-1", max_attempts=1)
    assert not play.flow.waits_for("train-1")
    play.issue()
    play.arrive(0, 2)
    assert play.assign() == [0, 2]
    play.finish_step()
    assert play.flow.ledger.counts()["dropped"] == {FAILED: 1}


def test_a_prompt_that_fails_again_and_again_is_given_up() -> None:
    play = Flow()
    play.issue()
    for _ in range(2):
        assert play.flow.give_up("train-1", max_attempts=3)
        assert play.issue() == [1]
    assert not play.flow.give_up("train-1", max_attempts=3)
    assert play.issue() == [2]  # in its place
    play.arrive(0, 2)
    assert play.assign() == [0, 2]
    play.finish_step()
    assert play.flow.ledger.counts()["dropped"] == {FAILED: 1}


def test_attempts_are_counted_by_failures_and_not_by_dead_engines_or_resumes() -> None:
    play = Flow()
    play.issue()
    for _ in range(3):
        assert play.flow.recover(present={"train-1"}) == ["train-0"]
        assert play.issue() == [0]
    state = json.loads(json.dumps(play.flow.ledger.state_dict()))
    play = Flow()
    play.flow.ledger.load_state_dict(state)
    play.flow.next_issue_number = 2
    play.flow.start(0)
    assert play.issue() == [0, 1]
    assert play.flow.give_up("train-0", max_attempts=2)
    assert play.issue() == [0]
    assert play.flow.ledger["train-0"].num_failures == 1
    assert not play.flow.give_up("train-0", max_attempts=2)


def test_failures_of_a_prompt_are_saved_and_loaded() -> None:
    play = Flow()
    play.issue()
    play.flow.give_up("train-1", max_attempts=3)
    state = json.loads(json.dumps(play.flow.ledger.state_dict()))
    ledger = PromptLedger()
    ledger.load_state_dict(state)
    assert [prompt.num_failures for prompt in ledger.open_prompts()] == [0, 1]
    state["open"][0]["num_attempts"] = 2  # of a state that counted issues: nothing failed as far as it tells
    del state["open"][0]["num_failures"]
    ledger.load_state_dict(state)
    assert [prompt.num_failures for prompt in ledger.open_prompts()] == [0, 1]


def test_a_resumed_flow_issues_open_prompts_first_and_no_more_than_the_bound_allows() -> None:
    killed = Flow(threshold=1)
    killed.issue()
    killed.arrive(0, 1)
    killed.assign()
    killed.finish_step()
    assert killed.issue() == [4, 5]
    state = json.loads(json.dumps(killed.flow.ledger.state_dict()))
    resumed = Flow(threshold=0)
    resumed.flow.ledger.load_state_dict(state)
    resumed.flow.next_issue_number = killed.flow.next_issue_number
    resumed.flow.start(1)
    assert resumed.issue() == [2, 3]
    resumed.arrive(2, 3)
    assert resumed.assign() == [2, 3]
    resumed.finish_step()
    assert resumed.issue() == [4, 5]
    assert resumed.flow.ledger.num_reissued == 4


@dataclass(frozen=True)
class Copy:
    """A prompt inside an engine. There may be several of one, after an engine was taken for dead and was not."""

    prompt_id: str
    version: int


class FlowMachine(RuleBasedStateMachine):
    """Everything that may happen to a flow, in any order; then the run is brought to its end."""

    @initialize(
        prompts=st.integers(1, 3),
        threshold=st.integers(0, 2),
        slack=st.integers(0, 2),
        over_issued=st.integers(0, 3),
        policy=st.sampled_from(["wait", "drop", "truncate"]),
    )
    def begin(self, prompts: int, threshold: int, slack: int, over_issued: int, policy: Any) -> None:
        over_issued = min(over_issued, prompts) if threshold and slack else 0
        self.options = FlowOptions(prompts, 8, threshold, threshold + slack, over_issued, policy)
        self.flow = PromptFlow(self.options, PromptLedger())
        self.copies: list[Copy] = []
        self.tokens: dict[str, tuple[int, int]] = {}
        """Oldest and newest version of what arrived."""
        self.num_trained = self.num_resumed = 0
        self.teaches = self.was_anything_late = False

    @rule(number=st.integers(1, 6))
    def issue(self, number: int) -> None:
        for _ in range(number):
            if (prompt := self.flow.next_prompt()) is not None:
                assert prompt.version == self.flow.version
                self.copies.append(Copy(prompt.prompt_id, prompt.version))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), comes_twice=st.booleans())
    def arrive(self, data: Any, comes_twice: bool) -> None:
        copy = data.draw(st.sampled_from(self.copies))
        oldest = data.draw(st.integers(copy.version, min(copy.version + 1, self.flow.version)))
        newest = data.draw(st.integers(oldest, self.flow.version))
        self.take(copy, oldest, newest, comes_twice=comes_twice)

    def take(self, copy: Copy, oldest: int, newest: int, *, comes_twice: bool = False) -> None:
        if not comes_twice:
            self.copies.remove(copy)
        if self.flow.arrive(copy.prompt_id, oldest_version=oldest, newest_version=newest):
            self.tokens[copy.prompt_id] = oldest, newest

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.copies))
        self.copies.remove(copy)
        self.flow.give_up(copy.prompt_id, max_attempts=2)

    @rule(data=st.data(), really=st.booleans())
    def recover(self, data: Any, really: bool) -> None:
        lost = data.draw(st.lists(st.sampled_from(self.copies), unique=True)) if self.copies else []
        kept = [copy for copy in self.copies if copy not in lost]
        self.flow.recover({copy.prompt_id for copy in kept})
        self.was_anything_late |= not really
        if really:
            self.copies = kept

    @rule(zero_std=st.integers(0, 7))
    def assign(self, zero_std: int) -> None:
        step = self.flow.assembling
        if step > self.options.num_training_steps:
            return
        for number, one in enumerate(self.flow.assign()):
            oldest, newest = self.tokens.pop(one.prompt.prompt_id)
            is_truncated = oldest < one.oldest_trained_version
            assert not is_truncated or self.options.straggler_policy == "truncate"
            age = sample_age(step, max(oldest, one.oldest_trained_version))
            assert newest >= one.oldest_trained_version
            assert 0 <= age <= self.options.max_staleness
            assert self.options.over_issued or age <= self.options.staleness_threshold
            is_kept = not zero_std >> number & 1
            self.flow.ledger.stage(one.prompt.prompt_id, CONSUMED if is_kept else ZERO_STD, step)
            self.teaches |= is_kept
        if self.flow.step_is_full and self.teaches:
            self.flow.close_step()
            self.teaches = False
        elif self.flow.step_is_full:
            self.flow.extend_step()

    @rule()
    def train(self) -> None:
        if self.num_trained < self.flow.assembling - 1:
            self.num_trained += 1
            fates = Counter(fate for _, fate in self.flow.ledger.commit(self.num_trained))
            assert (fates[CONSUMED] + fates[ZERO_STD]) % self.options.prompts_per_step == 0

    @rule()
    def sync(self) -> None:
        self.flow.set_version(self.num_trained)

    @rule(num_stragglers=st.integers(1, 3), num_steps=st.integers(1, 3))
    def go_on_without_stragglers(self, num_stragglers: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.issue(20)
            for one in self.copies[min(num_stragglers, self.options.over_issued) :]:
                self.take(one, one.version, self.flow.version)
            self.assign(0)
            self.train()
            self.sync()

    @rule()
    def kill_and_resume(self) -> None:
        next_issue_number = self.flow.next_issue_number
        ledger = PromptLedger()
        ledger.load_state_dict(json.loads(json.dumps(self.flow.ledger.state_dict())))
        self.num_resumed = len(ledger.open_prompts())
        self.flow = PromptFlow(self.options, ledger)
        self.flow.next_issue_number = next_issue_number
        self.flow.start(self.num_trained)
        self.copies, self.tokens, self.teaches = [], {}, False

    @invariant()
    def pacing_and_counters(self) -> None:
        if hasattr(self, "flow"):
            self.flow.ledger.check()
            assert self.flow.num_unassigned <= max(self.flow.num_admissible, self.num_resumed)
            assert (
                self.flow.num_stale_discarded == 0 or self.was_anything_late or self.options.straggler_policy != "wait"
            )

    def teardown(self) -> None:
        """Nothing stands still: if the engines answer, the run ends."""
        if not hasattr(self, "flow"):
            return
        self.flow.recover({copy.prompt_id for copy in self.copies})
        for _ in range(20 * self.options.num_training_steps):
            self.issue(20)
            for one in list(self.copies):
                self.take(one, one.version, self.flow.version)
            self.assign(0)
            self.train()
            self.sync()
            self.pacing_and_counters()
        assert self.num_trained == self.options.num_training_steps
        assert self.num_resumed or not self.flow.ledger.open_prompts()


FlowMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestFlow = FlowMachine.TestCase
