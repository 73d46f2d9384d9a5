"""Which states are drawn, and the buffer of states: bounded, aged, each given once, saved and loaded."""

import gc
import json
from collections import Counter
from typing import Any

import pytest

from open_instruct.workflows.rc.plans import PlanOptions, RCPlanner, StateBuffer
from open_instruct.workflows.rc.types import ReachedState


def planner(**options: Any) -> RCPlanner:
    defaults = {"num_cycles": 4, "states_per_problem": 2, "num_summaries": 0, "eval_num_cycles": 3}
    return RCPlanner(PlanOptions(**(defaults | options)))


def state(number: int, version: int = 0, summary: str = "") -> ReachedState:
    return ReachedState(number, summary or f"summary {number} of version {version}", version)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_states_are_drawn_alike_and_never_twice() -> None:
    one = planner()
    drawn: Counter[int] = Counter()
    for seed in range(600):
        plan = one.training_plan(f"train-{seed}", 0, "problem", version=0, seed=seed)
        assert len(set(plan.states)) == 2
        assert plan.start == ReachedState()
        drawn.update(plan.states)
    assert sorted(drawn) == [0, 1, 2, 3]
    assert max(drawn.values()) - min(drawn.values()) < 90  # 300 each, standard deviation 12


def test_a_prompt_that_is_issued_again_has_the_same_plan() -> None:
    one = planner(buffer_size=10)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1), state(2), state(3)))
    plans = [one.training_plan("train-1", 7, "problem", version=1, seed=5) for _ in range(2)]
    assert plans[0] == plans[1]
    assert one.metrics()["rc/states_taken"] <= 1


def test_turns_have_no_states() -> None:
    plan = planner(states_per_problem=0, num_summaries=1).training_plan("train-0", 0, "problem", version=0, seed=0)
    assert (plan.states, plan.num_cycles, plan.num_summaries) == ((), 4, 1)


def test_an_evaluation_is_one_trajectory_from_the_beginning() -> None:
    one = planner(buffer_size=10, eval_num_cycles=6)
    one.training_plan("train-0", 0, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1),))
    plan = one.evaluation_plan("problem")
    assert (plan.start, plan.states, plan.num_cycles, plan.num_summaries) == (ReachedState(), (), 6, 0)


def test_a_buffered_state_spares_the_way_to_it() -> None:
    one = planner(buffer_size=10, states_per_problem=1)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1), state(2)))
    starts = {}
    for seed in range(30):
        plan = one.training_plan(f"train-{seed + 1}", 7, "problem", version=3, seed=seed)
        assert plan.start.number <= plan.states[0]
        if plan.start.number:
            starts[plan.start.number] = plan.states[0]
    assert set(starts) == {1, 2}  # each was given once
    metrics = one.metrics()
    assert (metrics["rc/states_taken"], metrics["rc/states_buffered"], metrics["rc/state_age_max"]) == (2, 0, 3)
    assert not [name for name in one.metrics() if "age" in name], "no state was taken since"


def test_a_later_state_begins_from_the_buffer_though_the_beginning_is_drawn_too() -> None:
    one = planner(buffer_size=10, states_per_problem=2, num_cycles=2)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1),))
    plan = one.training_plan("train-1", 7, "problem", version=0, seed=1)
    assert (plan.states, plan.start) == ((0, 1), state(1))


def test_with_trained_summaries_a_rollout_begins_before_the_drawn_state() -> None:
    one = planner(buffer_size=10, states_per_problem=1, num_summaries=2)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1), state(2), state(3)))
    for seed in range(30):
        plan = one.training_plan(f"train-{seed + 1}", 7, "problem", version=0, seed=seed)
        assert plan.start.number == 0 or plan.start.number < plan.states[0]


def test_what_lies_behind_the_last_cycle_is_not_kept() -> None:
    one = planner(buffer_size=10)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(3), state(4)))
    assert one.metrics()["rc/states_buffered"] == 1


# --- buffer -----------------------------------------------------------------------------------------------------------


def test_the_buffer_is_bounded_in_all_and_by_problem() -> None:
    buffer = StateBuffer(size=5, per_problem=2, max_age=None)
    for row in range(4):
        for version in range(3):
            buffer.add(row, state(1, version))
            assert len(buffer) <= 5
    assert buffer.counts["dropped_full"] == 12 - 5
    kept = buffer.state_dict()
    assert [(one["row"], one["version"]) for one in kept] == [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


@pytest.mark.parametrize(("version", "found"), [(5, True), (6, False)])
def test_states_past_their_age_are_dropped_and_counted(version: int, found: bool) -> None:
    buffer = StateBuffer(size=5, per_problem=2, max_age=3)
    buffer.add(0, state(1, version=2))
    taken = buffer.take(0, at_most=3, version=version)
    assert (taken is not None) == found
    assert buffer.counts["dropped_old"] == (not found)
    assert len(buffer) == 0


def test_the_furthest_and_newest_is_taken_and_each_once() -> None:
    buffer = StateBuffer(size=9, per_problem=9, max_age=None)
    for number, version in ((1, 0), (2, 0), (2, 1), (3, 1)):
        buffer.add(0, state(number, version))
    taken = [buffer.take(0, at_most=2, version=1) for _ in range(4)]
    assert [(one.number, one.version) if one else None for one in taken] == [(2, 1), (2, 0), (1, 0), None]
    assert buffer.take(1, at_most=9, version=1) is None
    assert len(buffer) == 1


def num_states_alive() -> int:
    gc.collect()
    return sum(isinstance(one, ReachedState) for one in gc.get_objects())


def test_buffer_keeps_no_state_that_left_it_over_thousands_of_steps() -> None:
    """States are dropped for their age, taken, and pushed out by newer ones of their problem: the buffer never overflows."""
    buffer = StateBuffer(size=10_000, per_problem=4, max_age=60)
    before = num_states_alive()
    for step in range(3000):
        for row in range(step % 50, 400, 50):
            buffer.take(row, at_most=2, version=step)
            for number in (1, 2, 3):
                buffer.add(row, state(number, version=step))
    assert buffer.counts["taken"] > 0
    assert buffer.counts["dropped_old"] > 0
    assert buffer.counts["dropped_full"] > 0
    assert num_states_alive() - before == len(buffer) <= 4 * 400


def test_buffer_of_one_state_per_problem_keeps_the_newest() -> None:
    buffer = StateBuffer(size=5, per_problem=1, max_age=None)
    for version in range(4):
        buffer.add(7, state(1, version))
    assert [one["version"] for one in buffer.state_dict()] == [3]
    assert len(buffer) == 1


def test_planner_forgets_the_plans_of_prompts_that_came_back_or_were_dropped() -> None:
    one = planner(buffer_size=100, states_per_problem=1, max_state_age=3)
    before = num_states_alive()
    for number in range(3000):
        one.training_plan(f"train-{number}", number % 20, "problem", version=number // 20, seed=number)
        if number % 3:
            one.arrived(f"train-{number}", (state(1, number // 20),))
        else:
            one.dropped(f"train-{number}")
    assert num_states_alive() - before == one.metrics()["rc/states_buffered"] <= 100
    assert len(one.state_dict()["buffer"]) == one.metrics()["rc/states_buffered"]
    assert one.state_dict()["out"] == {}


def test_a_saved_buffer_comes_back_with_what_was_out() -> None:
    one = planner(buffer_size=10, states_per_problem=1)
    one.training_plan("train-0", 7, "problem", version=0, seed=0)
    one.arrived("train-0", (state(1, 2, "one"), state(2, 3, "two")))
    seed = next(s for s in range(50) if _is_drawn(s, 3))
    assert one.training_plan("train-1", 7, "problem", version=4, seed=seed).start.summary == "two"
    saved = json.loads(json.dumps(one.state_dict()))
    other = planner(buffer_size=10, states_per_problem=1)
    other.load_state_dict(saved)
    assert other.metrics()["rc/states_buffered"] == 1
    assert other.training_plan("train-1", 7, "problem", version=5, seed=0) == one.training_plan(
        "train-1", 7, "problem", version=4, seed=seed
    )
    other.arrived("train-1", (state(2, 5, "three"),))  # its samples were saved before they were scored
    assert [one["summary"] for one in other.state_dict()["buffer"]] == ["one", "three"]
    before = planner(buffer_size=10, states_per_problem=1)
    before.load_state_dict(saved["buffer"])  # a checkpoint of before
    assert before.metrics()["rc/states_buffered"] == 1


def _is_drawn(seed: int, number: int) -> bool:
    plan = planner(states_per_problem=1).training_plan("train-9", 0, "problem", version=0, seed=seed)
    return plan.states == (number,)
