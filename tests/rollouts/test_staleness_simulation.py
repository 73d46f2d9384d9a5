"""Whole runs on a simulated clock: the bound holds, nothing is lost, nothing stands still, and no capacity is wasted."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from best_schedule import SmallRun, least_expected_makespan, makespan_in_issue_order

from benchmarks.simulated_world import Outcome, World, constant, log_normal, uniform
from benchmarks.simulator import Deadlock, Simulation
from open_instruct.rollouts.staleness import FlowOptions

NUM_SCHEDULES = 1000
NUM_AMPLE = 300
NUM_QUIET = 300
LENGTHS = (constant(20.0), uniform(5, 50), log_normal(20, 1.2, 400), log_normal(20, 1.6, 2000))


def random_world(seed: int) -> World:
    """Anything that the options allow, with every fault that a run has to live through."""
    rng = np.random.default_rng(seed)
    threshold = int(rng.integers(0, 4))
    bound = threshold + int(rng.integers(0, 3))
    prompts = int(rng.integers(1, 7))
    policy: Any = ("wait", "drop", "truncate")[int(rng.integers(3))]
    may_over_issue = 1 <= threshold < bound and rng.random() < 0.9
    steps = int(rng.integers(3, 16))
    engines = int(rng.integers(1, 5))
    flow = FlowOptions(
        prompts_per_step=prompts,
        num_training_steps=steps,
        staleness_threshold=threshold,
        max_staleness=bound,
        over_issued=int(rng.integers(1, prompts + 1)) if may_over_issue else 0,
        straggler_policy=policy,
    )
    world = World(
        flow=flow,
        draw_length=LENGTHS[int(rng.integers(4))],
        num_engines=engines,
        groups_at_once=int(rng.integers(1, 5)),
        engine_speeds=tuple(rng.uniform(0.3, 2, engines)),
        saturated_at=float(rng.choice([math.inf, 1.0, 2.5])),
        score_s=float(rng.choice([0, 0.02, 0.3])),
        step_s=float(rng.choice([0.01, 0.1, 1.0])),
        learner_token_s=float(rng.choice([0, 0.002])),
        sync_s=float(rng.choice([0, 0.02, 0.5])),
        jitter=float(rng.choice([0, 1.0])),
        swap_pause_s=float(rng.choice([0, 0.03, 0.3])),
        inflight_updates=bool(rng.random() < 0.7) or policy == "truncate",
        sync_every=int(rng.integers(1, threshold + 2)),
        streaming=bool(rng.random() < 0.5),
        queue_batches=float(rng.choice([1, 1.5, math.inf])),
        zero_std_share=float(rng.choice([0, 0.3, 0.7])),
        generation_timeout=float(rng.choice([math.inf, 2.0])),
        max_attempts=int(rng.integers(1, 4)),
        num_deaths=int(rng.integers(0, 5)),
        fault_horizon_s=4.0,
        restart_s=float(rng.choice([0.1, 2.0])),
        late_share=float(rng.choice([0, 0.3])),
        num_pauses=int(rng.integers(0, 3)),
        pause_s=float(rng.choice([0.1, 2.0])),
        killed_after=tuple(n for n in range(1, steps) if rng.random() < 0.1),
        seed=seed,
    )
    return with_stragglers(world) if may_over_issue and seed % 2 else world


def with_stragglers(world: World) -> World:
    """Steps go by so quickly that what was left behind comes to the bound."""
    flow = replace(world.flow, num_training_steps=25, max_staleness=world.flow.staleness_threshold + 1)
    return replace(world, flow=flow, draw_length=LENGTHS[3], step_s=0.01, learner_token_s=0.0, sync_s=0.01)


def ample_world(seed: int) -> World:
    """The threshold is so high that capacity is the only limit.

    In the time that the slowest group takes, `latency`, both sides want to handle `latency * rate` others. They wait behind it,
    as many as run meanwhile are begun, and two batches are with the learners: one is trained, one is put together.
    """
    rng = np.random.default_rng(seed)
    world = random_world(seed)
    draw, longest = ((constant(20.0), 20.0), (uniform(5, 50), 50.0), (log_normal(20, 1, 150), 150.0))[
        int(rng.integers(3))
    ]
    num_deaths = int(rng.integers(0, 2))
    speeds = rng.uniform(0.5, 2, world.num_engines)
    prompts = int(rng.integers(2, 12))
    places = world.num_engines * world.groups_at_once
    at_full_speed = min(world.groups_at_once, world.saturated_at)
    mean = float(np.mean([draw(np.random.default_rng(n)) for n in range(1000)]))
    engine_rate = float(sum(speeds)) * at_full_speed / (mean * world.token_s)
    batch_s = prompts / engine_rate * float(rng.choice([0.3, 0.8, 1.25, 3.0]))
    groups_per_step = prompts / (1 - world.zero_std_share**prompts)
    trained_share = (1 - world.zero_std_share) * groups_per_step / prompts
    rate = min(engine_rate, groups_per_step / (batch_s * (0.6 + 0.4 * trained_share)))
    sequence_s = longest * world.token_s / float(min(speeds)) * world.groups_at_once / at_full_speed
    latency = (1 + num_deaths) * (1.2 * sequence_s + 2 * world.score_s)
    waiting = latency * rate
    threshold = math.ceil((waiting + min(waiting, places)) / prompts) + 2 + (world.sync_every - 1)
    return replace(
        world,
        flow=FlowOptions(prompts, 4 * threshold + 20, threshold, threshold),
        draw_length=draw,
        engine_speeds=tuple(speeds),
        step_s=0.5 * batch_s,
        learner_token_s=0.4 * batch_s / (prompts * mean),
        sync_s=0.1 * batch_s,
        jitter=0.3 * world.jitter,
        swap_pause_s=0.1 * batch_s * float(rng.choice([0, 1])),
        inflight_updates=True,
        queue_batches=math.inf,
        generation_timeout=math.inf,
        num_deaths=num_deaths,
        num_pauses=0,
        restart_s=0.1 * sequence_s,
        killed_after=(),
    )


def test_a_thousand_schedules() -> None:
    """The bound, the ledger, pacing and deadlocks are checked inside, at every event; here, that the hard cases did occur."""
    outcomes = [(world, Simulation(world).run()) for world in map(random_world, range(NUM_SCHEDULES))]
    assert all(len(o.marks) == 1 + w.flow.num_training_steps for w, o in outcomes)

    def number(happened: Any) -> int:
        return sum(bool(happened(world, outcome)) for world, outcome in outcomes)

    assert number(lambda w, o: max(o.ages) == w.flow.staleness_threshold > 0) > 100
    assert number(lambda w, o: max(o.ages) > w.flow.staleness_threshold) > 100
    assert number(lambda w, o: max(o.ages) == w.flow.max_staleness > w.flow.staleness_threshold) > 100
    assert number(lambda w, o: w.num_deaths and o.counts["reissued"]) > 300
    assert number(lambda w, o: o.num_duplicates) > 200
    assert number(lambda w, o: o.num_stale_discarded) > 20
    assert number(lambda w, o: o.num_truncated) > 20
    assert number(lambda w, o: o.num_put_waits) > 100
    assert number(lambda w, o: "failed" in o.counts["dropped"]) > 50
    assert number(lambda w, o: "zero_std" in o.counts["dropped"]) > 300
    assert number(lambda w, o: w.killed_after) > 200


def shares(outcome: Outcome, world: World) -> tuple[float, float]:
    """Of engines and learners, from when the pipeline is full until nothing more is left to issue."""
    threshold, steps = world.flow.staleness_threshold, world.flow.num_training_steps
    window = 2 * threshold, steps - 1 - threshold
    return outcome.engine_share(*window), outcome.learner_share(*window)


def test_no_capacity_is_wasted_where_the_bound_allows() -> None:
    """Engines or learners are never idle for more than 5 %, through deaths, late results and groups that teach nothing."""
    for world in map(ample_world, range(NUM_AMPLE)):
        engine_share, learner_share = shares(Simulation(world).run(), world)
        assert max(engine_share, learner_share) >= 0.95, (engine_share, learner_share, world)


@pytest.mark.parametrize("slower", ["engines", "learners"])
def test_throughput_is_that_of_the_slower_side(slower: str) -> None:
    """In groups per second, from the numbers of the world alone."""
    mean = 27.5
    engine_rate = 2 * 4 / (mean * 0.01)
    step_s = 8 / engine_rate * (0.8 if slower == "engines" else 1.25)
    world = World(FlowOptions(8, 200, 6, 6), uniform(5, 50), 2, 4, step_s=step_s, sync_s=0.0)
    outcome = Simulation(world).run()
    assert outcome.groups_per_s(20, 190) == pytest.approx(min(engine_rate, 8 / step_s), rel=0.05)


def quiet_world(seed: int) -> tuple[World, list[float]]:
    """Without faults, at any threshold; and the lengths of its groups."""
    rng = np.random.default_rng(seed)
    prompts, steps, threshold = int(rng.integers(1, 9)), int(rng.integers(2, 15)), int(rng.integers(0, 6))
    draw = LENGTHS[int(rng.integers(4))]
    lengths = [draw(rng) for _ in range(prompts * steps)]
    left = iter(lengths)
    world = World(
        FlowOptions(prompts, steps, threshold, threshold),
        lambda _: next(left),
        num_engines=int(rng.integers(1, 4)),
        groups_at_once=int(rng.integers(1, 5)),
        step_s=float(rng.choice([0.01, 0.2, 1.0])),
        learner_token_s=float(rng.choice([0, 0.002, 0.01])),
        sync_s=float(rng.choice([0, 0.1])),
        streaming=bool(rng.random() < 0.5),
    )
    return world, lengths


def test_nothing_waits_but_for_its_version_a_place_and_its_groups() -> None:
    """At every threshold: what queue, ledger and pacing take in turns is as quick as if each knew all of the others."""
    for world, lengths in map(quiet_world, range(NUM_QUIET)):
        assert Simulation(world).run().makespan_s == pytest.approx(makespan_in_issue_order(world, lengths)), world


@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize(("prompts", "steps"), [(1, 6), (2, 3), (3, 2), (2, 2)])
def test_small_runs_are_as_quick_as_the_best_schedule(threshold: int, prompts: int, steps: int) -> None:
    """On average over all lengths, against every schedule under the bound that does not know the lengths before."""
    for places in (1, 2, 3):
        for long, step in ((2, 1), (2, 3), (4, 1), (4, 3)):
            run = SmallRun(prompts, steps, threshold, places, short=1, long=long, long_share=0.4, step=step)
            assert expected_makespan(run) <= 1.0001 * least_expected_makespan(run), run


def expected_makespan(run: SmallRun) -> float:
    flow = FlowOptions(run.prompts_per_step, run.num_steps, run.threshold, run.threshold)
    expected = 0.0
    for probability, lengths in run.lengths():
        left = iter(lengths)
        world = World(flow, lambda _, left=left: next(left), 1, run.places, token_s=1.0, step_s=run.step, sync_s=0.0)
        expected += probability * Simulation(world).run().makespan_s
    return expected


def test_streaming_at_bound_0_overlaps_training_with_the_wait_for_stragglers() -> None:
    world = World(
        FlowOptions(16, 20, 0, 0),
        log_normal(30, 1.0, 300),
        1,
        16,
        step_s=0.01,
        learner_token_s=0.002,
        sync_s=0.001,
        seed=3,
    )
    plain, streaming = (Simulation(replace(world, streaming=on)).run().makespan_s for on in (False, True))
    assert streaming < 0.85 * plain


@pytest.mark.parametrize("policy", ["wait", "drop", "truncate"])
def test_each_policy_deals_with_stragglers_in_its_way(policy: Any) -> None:
    flow = FlowOptions(6, 60, 1, 2, over_issued=6, straggler_policy=policy)
    outcome = Simulation(World(flow, log_normal(20, 1.6, 3000), 4, 4, step_s=0.02, sync_s=0.001, seed=1)).run()
    assert max(outcome.ages) == 2
    assert (outcome.num_stale_discarded > 0) == (policy == "drop")
    assert (outcome.num_truncated > 0) == (policy == "truncate")
    assert outcome.counts["consumed"] == 6 * 60


def test_over_issuing_does_not_wait_for_every_straggler() -> None:
    world = World(FlowOptions(8, 100, 1, 4), log_normal(20, 1.2, 400), 2, 8, step_s=0.1, sync_s=0.001, seed=1)
    plain = Simulation(world).run()
    over_issued = Simulation(replace(world, flow=replace(world.flow, over_issued=4))).run()
    assert over_issued.makespan_s < 0.8 * plain.makespan_s


def test_waiting_prompts_are_paced_not_thrown_away() -> None:
    """A learner that is ten times slower than the engines gets everything fresh: prompts wait, nothing is discarded."""
    outcome = Simulation(World(FlowOptions(4, 30, 2, 2), uniform(5, 50), 2, 4, step_s=5.0)).run()
    assert outcome.num_stale_discarded == 0
    assert outcome.counts["dropped"] == {}
    assert outcome.learner_share() > 0.98


def test_a_belt_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine's prompts that nobody recovers."""
    monkeypatch.setattr("open_instruct.rollouts.staleness.PromptFlow.recover", lambda *_: [])
    world = World(FlowOptions(4, 30, 1, 1), uniform(5, 50), 1, 4, num_deaths=1, fault_horizon_s=2.0)
    with pytest.raises(Deadlock, match="held"):
        Simulation(world).run()
