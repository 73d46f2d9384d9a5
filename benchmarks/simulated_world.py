"""What a simulated run is made of, and what it came to."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from open_instruct.rollouts.staleness import FlowOptions

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class World:
    """What a simulated run is made of. Times in seconds, lengths in tokens."""

    flow: FlowOptions
    draw_length: Draw
    """Longest response of a group."""
    num_engines: int = 2
    groups_at_once: int = 4
    """Places of an engine."""
    token_s: float = 0.01
    engine_speeds: tuple[float, ...] = ()
    """Of each engine, relative; empty: all 1."""
    saturated_at: float = math.inf
    """More groups than this share the speed of that many."""
    score_s: float = 0.0
    """From a group's last token to its arrival, on average: the results queue and the verifiers."""
    step_s: float = 0.1
    """Constant part of a training step."""
    learner_token_s: float = 0.0
    sync_s: float = 0.01
    """From the end of a step to the new version on every engine; each gets it at a time of its own."""
    jitter: float = 0.0
    """Steps and syncs take up to this share longer."""
    swap_pause_s: float = 0.0
    inflight_updates: bool = True
    """Else an engine takes new weights when nothing runs in it."""
    sync_every: int = 1
    streaming: bool = False
    queue_batches: float = math.inf
    """Room of the message queue; at most what the bound lets wait."""
    zero_std_share: float = 0.0
    generation_timeout: float = math.inf
    max_attempts: int = 3
    num_deaths: int = 0
    fault_horizon_s: float = 10.0
    """Deaths and pauses fall in this time."""
    restart_s: float = 1.0
    late_share: float = 0.0
    """Of results: come twice; of results of a lost engine: come after all."""
    num_pauses: int = 0
    pause_s: float = 1.0
    killed_after: tuple[int, ...] = ()
    """Steps after which the whole run is killed and resumed."""
    group_size: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Mark:
    """How things stood at the end of a step."""

    at_s: float
    engine_tokens: float
    engine_possible_tokens: float
    learner_busy_s: float
    """Training, and handing on the weights."""
    num_groups: int


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to."""

    marks: list[Mark]
    """Beginning, then the end of each step."""
    ages: list[int]
    """Of every group that was trained: its oldest trained token."""
    lengths: list[float]
    counts: dict[str, object]
    num_stale_discarded: int
    num_duplicates: int
    num_truncated: int
    num_put_waits: int

    @property
    def makespan_s(self) -> float:
        return self.marks[-1].at_s

    def engine_share(self, first: int = 0, last: int = -1) -> float:
        """Tokens sampled between the ends of two steps, of those that live engines could have sampled."""
        start, end = self.marks[first], self.marks[last]
        return (end.engine_tokens - start.engine_tokens) / (end.engine_possible_tokens - start.engine_possible_tokens)

    def learner_share(self, first: int = 0, last: int = -1) -> float:
        start, end = self.marks[first], self.marks[last]
        return (end.learner_busy_s - start.learner_busy_s) / (end.at_s - start.at_s)

    def groups_per_s(self, first: int = 0, last: int = -1) -> float:
        start, end = self.marks[first], self.marks[last]
        return (end.num_groups - start.num_groups) / (end.at_s - start.at_s)


def log_normal(mean: float, sigma: float, longest: float) -> Draw:
    """Lengths with a heavy tail, cut off at `longest`."""
    mu = np.log(mean) - sigma**2 / 2
    return lambda rng: float(min(rng.lognormal(mu, sigma), longest))


def uniform(low: float, high: float) -> Draw:
    return lambda rng: float(rng.uniform(low, high))


def constant(length: float) -> Draw:
    return lambda rng: length
