"""What the best schedule comes to, worked out without any of the code under test."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from benchmarks.simulated_world import World


def makespan_in_issue_order(world: World, lengths: Sequence[float]) -> float:
    """Of a run without faults, if nothing ever waits but for what it must: a prompt for its version and a place, a step for its
    groups and the step before. Equal engines that do not share their speed.
    """
    flow = world.flow
    free_at = [0.0] * (world.num_engines * world.groups_at_once)
    version_at = [0.0] * (flow.staleness_threshold + 1)  # of versions -threshold … 0, then of each step's
    earliest = 0.0
    for step in range(flow.num_training_steps):
        ends = []
        for length in lengths[step * flow.prompts_per_step : (step + 1) * flow.prompts_per_step]:
            place = free_at.index(min(free_at))
            earliest = max(free_at[place], version_at[step], earliest)
            free_at[place] = earliest + length * world.token_s
            ends.append((free_at[place], length))
        version_at.append(_step_end(world, ends, version_at[-1]))
    return version_at[-1]


def _step_end(world: World, ends: list[tuple[float, float]], learner_is_free_at: float) -> float:
    """A streaming learner takes each group as it comes, any other all at once."""
    now = learner_is_free_at if world.streaming else max(learner_is_free_at, *(end for end, _ in ends))
    for end, length in sorted(ends):
        now = max(now, end) + length * world.learner_token_s
    return now + world.step_s + world.sync_s


@dataclass(frozen=True)
class SmallRun:
    """In whole units of time. A group takes `short` or, with probability `long_share`, `long`; nobody knows before."""

    prompts_per_step: int
    num_steps: int
    threshold: int
    places: int
    short: int
    long: int
    long_share: float
    step: int

    def lengths(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every outcome of the draws, with its probability."""
        for is_long in product((False, True), repeat=self.prompts_per_step * self.num_steps):
            probability = math.prod(self.long_share if one else 1 - self.long_share for one in is_long)
            yield probability, tuple(self.long if one else self.short for one in is_long)


Waiting = tuple[int, ...]
"""Of each step: groups that are not begun."""
Running = tuple[tuple[int, int], ...]
"""Step and time so far of each group that runs, sorted."""


def least_expected_makespan(run: SmallRun) -> float:
    """The least that any schedule under the bound reaches on average, by trying every one.

    A schedule decides at every moment, from all that has happened, which groups to begin, if any: those whose weights would be no
    more than `threshold` versions behind in the step that trains them. Each step trains its own groups.
    """

    @cache
    def cost(version: int, learner: int, waiting: Waiting, running: Running) -> float:
        """From here, with `learner` units of the step under way left, or 0."""
        if version == run.num_steps:
            return 0.0
        return min(after(version, learner, *begun) for begun in _beginnings(run, version, waiting, running))

    @cache
    def after(version: int, learner: int, waiting: Waiting, running: Running) -> float:
        """One unit of time later."""
        is_training = learner > 0
        expected = 1.0
        if not running and not is_training:
            return math.inf  # nothing runs: a schedule that waits for nothing
        for probability, still_running in _advance(run, running):
            left = learner - 1 if is_training else 0
            new_version = version + (is_training and left == 0)
            if left == 0 and new_version < run.num_steps and _is_complete(new_version, waiting, still_running):
                left = run.step
            expected += probability * cost(new_version, left, waiting, still_running)
        return expected

    return cost(0, 0, (run.prompts_per_step,) * run.num_steps, ())


def _beginnings(run: SmallRun, version: int, waiting: Waiting, running: Running) -> Iterator[tuple[Waiting, Running]]:
    """Everything that may be begun now, nothing included."""
    admissible = range(version, min(version + 1 + run.threshold, run.num_steps))
    for numbers in product(*(range(waiting[step] + 1) for step in admissible)):
        if len(running) + sum(numbers) <= run.places:
            begun = dict(zip(admissible, numbers, strict=True))
            yield (
                tuple(number - begun.get(step, 0) for step, number in enumerate(waiting)),
                tuple(sorted(running + tuple((step, 0) for step, number in begun.items() for _ in range(number)))),
            )


def _advance(run: SmallRun, running: Running) -> Iterator[tuple[float, Running]]:
    """What may run on after one unit of time, with probabilities."""
    older = [(step, age + 1) for step, age in running if age + 1 < run.long]
    undecided = [number for number, (_, age) in enumerate(older) if age == run.short]
    for goes_on in product((False, True), repeat=len(undecided)):
        stops = {number for number, on in zip(undecided, goes_on, strict=True) if not on}
        probability = math.prod(run.long_share if on else 1 - run.long_share for on in goes_on)
        yield probability, tuple(sorted(one for number, one in enumerate(older) if number not in stops))


def _is_complete(step: int, waiting: Waiting, running: Running) -> bool:
    return waiting[step] == 0 and all(other != step for other, _ in running)
