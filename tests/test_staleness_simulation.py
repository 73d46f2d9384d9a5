"""Whole runs on a simulated clock: the bound holds, nothing is lost, nothing stands still, and no capacity is wasted."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator import Simulation, World, constant, log_normal, uniform
from open_instruct.staleness import FlowOptions

NUM_SCHEDULES = 1000


def random_world(seed: int) -> World:
    """Anything that the options allow, with deaths, time-outs, results that come twice and groups that teach nothing."""
    rng = np.random.default_rng(seed)
    threshold = int(rng.integers(0, 4))
    bound = threshold + int(rng.integers(0, 3))
    prompts = int(rng.integers(1, 7))
    policy = ("wait", "drop", "truncate")[int(rng.integers(3))]
    may_over_issue = 1 <= threshold < bound and rng.random() < 0.6
    flow = FlowOptions(
        prompts_per_step=prompts,
        num_training_steps=int(rng.integers(3, 9)),
        staleness_threshold=threshold,
        max_staleness=bound,
        over_issued=int(rng.integers(1, prompts + 1)) if may_over_issue else 0,
        straggler_policy=policy,
    )
    engines = int(rng.integers(1, 5))
    return World(
        flow=flow,
        draw_length=(constant(20), uniform(5, 50), log_normal(20, 1.2, 400))[int(rng.integers(3))],
        num_engines=engines,
        groups_at_once=int(rng.integers(1, 5)),
        engine_speeds=tuple(rng.uniform(0.3, 2, engines)),
        step_s=float(rng.choice([0.01, 0.2, 1.0])),
        learner_token_s=float(rng.choice([0, 0.002])),
        sync_s=float(rng.choice([0, 0.05, 0.5])),
        swap_pause_s=float(rng.choice([0, 0.03, 0.3])),
        inflight_updates=bool(rng.random() < 0.7) or policy == "truncate",
        sync_every=int(rng.integers(1, threshold + 2)),
        streaming=bool(rng.random() < 0.5),
        zero_std_share=float(rng.choice([0, 0.3, 0.7])),
        generation_timeout=float(rng.choice([math.inf, 1.0])),
        num_deaths=int(rng.integers(0, 4)),
        death_horizon_s=4.0,
        restart_s=float(rng.choice([0.1, 2.0])),
        duplicate_share=0.1,
        seed=seed,
    )


def test_the_bound_holds_and_nothing_is_lost_in_a_thousand_schedules() -> None:
    """Ages, the ledger at every commit, and the absence of deadlocks are asserted inside; here, that the hard cases did occur."""
    outcomes = [(world, Simulation(world).run()) for world in map(random_world, range(NUM_SCHEDULES))]
    for world, outcome in outcomes:
        assert len(outcome.step_ends_s) == world.flow.num_training_steps
    over_the_threshold = sum(max(o.ages) > w.flow.staleness_threshold for w, o in outcomes)
    assert over_the_threshold > 10
    assert sum(max(o.ages) == w.flow.max_staleness > 0 for w, o in outcomes) > 100
    assert sum(o.num_recovered > 0 for _, o in outcomes) > 100
    assert sum(o.num_stale_discarded > 0 for _, o in outcomes) > 0
    assert sum("failed" in o.counts["dropped"] for _, o in outcomes) > 0  # type: ignore[operator]
    assert sum("zero_std" in o.counts["dropped"] for _, o in outcomes) > 300  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(40))
def test_no_capacity_is_wasted_where_the_bound_allows(seed: int) -> None:
    """The slower of engines and learners is never idle for more than 5 % once enough steps may be under way.

    A straggler blocks the steps behind it for as long as it takes, L seconds; to be busy meanwhile, the engines need the prompts
    of L seconds and one batch more, and as much again as the batch that the learners hold.
    """
    rng = np.random.default_rng(seed)
    prompts, engines, places = int(rng.integers(2, 12)), int(rng.integers(1, 5)), int(rng.integers(2, 8))
    draw, longest = [(constant(20.0), 20.0), (uniform(5, 50), 50.0), (log_normal(20, 1.0, 150), 150.0)][seed % 3]
    mean = float(np.mean([draw(np.random.default_rng(n)) for n in range(4000)]))
    engine_rate = engines * places / (mean * 0.01)  # groups per second
    step_s = prompts / engine_rate * float(rng.choice([0.3, 0.8, 1.2, 3.0]))
    rate = min(engine_rate, prompts / (step_s + 0.001))
    threshold = math.ceil(longest * 0.01 * rate / prompts) + 3
    steps = math.ceil(60 * longest * 0.01 * rate / prompts)
    flow = FlowOptions(prompts, steps, staleness_threshold=threshold, max_staleness=threshold)
    world = World(flow, draw, engines, places, step_s=step_s, sync_s=0.001, seed=seed, streaming=bool(seed % 2))
    outcome = Simulation(world).run()
    first, last = steps // 6, steps - steps // 6  # neither the filling of the pipeline nor its emptying
    durations = np.mean(outcome.durations_s)
    capacity = min(engines * places / durations, prompts / (step_s + 0.001))
    measured = (last - first) * prompts / (outcome.step_ends_s[last] - outcome.step_ends_s[first])
    assert measured > 0.95 * capacity, (measured, capacity, world)


def least_makespan(world: World, lengths: list[float]) -> float:
    """The best that any order and timing of starts can do under the bound, by trying every order.

    A prompt of step t may start when version t - 1 - threshold is there. Starting each as early as its place in the order allows
    covers the best schedule.
    """
    flow = world.flow
    return (
        min(_makespan(world, lengths, order) for order in itertools.permutations(range(len(lengths)))) if flow else 0.0
    )


def _makespan(world: World, lengths: list[float], order: tuple[int, ...]) -> float:
    flow = world.flow
    places = [0.0] * (world.num_engines * world.groups_at_once)
    ends: dict[int, float] = {}
    version_at = dict.fromkeys(range(-flow.staleness_threshold, 1), 0.0)
    earliest = 0.0
    for number in order:
        needed = number // flow.prompts_per_step - flow.staleness_threshold
        if needed not in version_at:
            return math.inf  # it would wait for a step that waits for it
        place = min(range(len(places)), key=places.__getitem__)
        earliest = max(places[place], version_at[needed], earliest)
        places[place] = ends[number] = earliest + lengths[number] * world.token_s
        for step in range(1, flow.num_training_steps + 1):
            own = range((step - 1) * flow.prompts_per_step, step * flow.prompts_per_step)
            if step not in version_at and step - 1 in version_at and all(n in ends for n in own):
                ready = max(*(ends[n] for n in own), version_at[step - 1])
                version_at[step] = ready + world.step_s + world.sync_s
    return version_at[flow.num_training_steps]


@pytest.mark.parametrize("threshold", [0, 1, 2])
@pytest.mark.parametrize("prompts", [1, 2, 3])
@pytest.mark.parametrize("places", [1, 2, 3])
@pytest.mark.parametrize("step_s", [0.05, 0.2, 0.5])
def test_small_runs_are_as_quick_as_the_best_schedule(threshold: int, prompts: int, places: int, step_s: float) -> None:
    steps = 6 // prompts
    flow = FlowOptions(prompts, steps, threshold, threshold)
    world = World(flow, constant(20.0), 1, places, step_s=step_s, sync_s=0.01)
    best = least_makespan(world, [20.0] * (steps * prompts))
    assert Simulation(world).run().makespan_s <= 1.05 * best + 1e-9


def test_streaming_at_bound_0_overlaps_training_with_the_wait_for_stragglers() -> None:
    flow = FlowOptions(16, 20, 0, 0)
    world = World(
        flow, log_normal(30, 1.0, 300), 1, 16, step_s=0.01, learner_token_s=0.002, sync_s=0.001, streaming=False, seed=3
    )
    plain, streaming = (Simulation(replace(world, streaming=on)).run().makespan_s for on in (False, True))
    assert streaming < 0.85 * plain


@pytest.mark.parametrize("policy", ["wait", "drop", "truncate"])
def test_each_policy_deals_with_stragglers_in_its_way(policy: str) -> None:
    flow = FlowOptions(6, 60, 1, 2, over_issued=6, straggler_policy=policy)  # type: ignore[arg-type]
    outcome = Simulation(World(flow, log_normal(20, 1.6, 3000), 4, 4, step_s=0.02, sync_s=0.001, seed=1)).run()
    assert max(outcome.ages) == 2
    assert (outcome.num_stale_discarded > 0) == (policy == "drop")
    assert outcome.counts["consumed"] == 6 * 60


def test_waiting_prompts_are_paced_not_thrown_away() -> None:
    """A learner that is ten times slower than the engines gets everything fresh: prompts wait, nothing is discarded."""
    flow = FlowOptions(4, 30, 2, 2)
    outcome = Simulation(World(flow, uniform(5, 50), 2, 4, step_s=5.0)).run()
    assert outcome.num_stale_discarded == 0
    assert outcome.counts["dropped"] == {}
    assert outcome.learner_busy_s / outcome.makespan_s > 0.98
