"""A run on a simulated clock: the real admission, ledger and message queue, with fake engines and learners. No model, no Ray.

    PromptFlow ─► prompt queue ─► engines (a group takes its longest response; weight swaps pause it; engines die and come back)
        ▲                            │
        └── arrive, give_up, recover ┘        SampleBuffer ─► learners (a constant and a cost per token) ─► weights ─► engines

Everything is checked on the way: no trained token is older than the bound, each step trains its groups once, the counters balance
at every commit, and the run comes to its end.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from open_instruct.message_queue import QueueItem, SampleBuffer
from open_instruct.staleness import CONSUMED, ZERO_STD, Assignment, FlowOptions, IssuedPrompt, PromptFlow, PromptLedger

Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class World:
    """What a simulated run is made of. Times in seconds, lengths in tokens."""

    flow: FlowOptions
    draw_length: Draw
    """Longest response of a group."""
    num_engines: int = 2
    groups_at_once: int = 4
    """Groups that an engine generates at the same time, each at full speed."""
    token_s: float = 0.01
    engine_speeds: tuple[float, ...] = ()
    """Of each engine, relative; empty: all 1."""
    step_s: float = 0.1
    """Constant part of a training step."""
    learner_token_s: float = 0.0
    sync_s: float = 0.01
    """From the end of a step to the new version on every engine."""
    swap_pause_s: float = 0.0
    inflight_updates: bool = True
    sync_every: int = 1
    streaming: bool = False
    zero_std_share: float = 0.0
    generation_timeout: float = float("inf")
    max_attempts: int = 3
    num_deaths: int = 0
    death_horizon_s: float = 10.0
    restart_s: float = 1.0
    duplicate_share: float = 0.0
    group_size: int = 4
    seed: int = 0


@dataclass
class _Group:
    """A group inside an engine."""

    prompt: IssuedPrompt
    length: float
    left_s: float
    oldest_version: int
    started_at: float
    timed_out: bool = False


@dataclass
class _Engine:
    number: int
    speed: float
    version: int = 0
    running: dict[str, _Group] = field(default_factory=dict)
    alive: bool = True
    paused_until: float = 0.0
    closed: bool = False
    """Takes nothing new, because an update waits for it to be empty."""
    generation: int = 0
    """Changes when running groups are rescheduled: events of before are void."""
    busy_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to."""

    makespan_s: float
    step_ends_s: list[float]
    learner_busy_s: float
    engine_busy_group_s: float
    ages: list[int]
    """Of every consumed group, oldest trained token."""
    counts: dict[str, object]
    num_stale_discarded: int
    num_recovered: int
    durations_s: list[float]
    """Of generated groups, without pauses."""


class Deadlock(AssertionError):
    """Nothing is left to happen and the run is not over."""


class Simulation:
    """Runs a `World` to its end: `Simulation(world).run()`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self._rng = np.random.default_rng(world.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.ledger = PromptLedger()
        self.flow = PromptFlow(world.flow, self.ledger)
        options = world.flow
        room = (options.max_staleness + 1) * options.prompts_per_step * world.group_size
        self.buffer = SampleBuffer(room, max_staleness=options.max_staleness, clock=lambda: self.now)
        self._blocked: deque[QueueItem] = deque()
        speeds = world.engine_speeds or (1.0,) * world.num_engines
        self.engines = [_Engine(number, speed) for number, speed in enumerate(speeds)]
        self._free = [(0, number) for number in range(len(self.engines))]
        self._prompts: deque[IssuedPrompt] = deque()
        self._lengths: dict[tuple[str, int], float] = {}
        self._teaches = False
        self._pending_tokens = 0.0
        self._pending_groups = 0
        self._oldest = 0
        self._step = 1
        self._learner_busy = False
        self._step_ends: list[float] = []
        self._learner_busy_s = 0.0
        self._ages: list[int] = []
        self._durations: list[float] = []
        self._num_recovered = 0

    def run(self) -> Outcome:
        for _ in range(self.world.num_deaths):
            engine = self.engines[int(self._rng.integers(len(self.engines)))]
            self._at(float(self._rng.uniform(0, self.world.death_horizon_s)), lambda engine=engine: self._die(engine))
        self._feed()
        while len(self._step_ends) < self.world.flow.num_training_steps:
            if not self._events:
                raise Deadlock(self._describe())
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.ledger.check()
        counts = self.ledger.counts()
        assert counts["open"] == 0 or self.world.flow.num_training_steps == len(self._step_ends)
        return Outcome(
            makespan_s=self.now,
            step_ends_s=self._step_ends,
            learner_busy_s=self._learner_busy_s,
            engine_busy_group_s=sum(engine.busy_s for engine in self.engines),
            ages=self._ages,
            counts=counts,
            num_stale_discarded=self.flow.num_stale_discarded,
            num_recovered=self._num_recovered,
            durations_s=self._durations,
        )

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _describe(self) -> str:
        held = {engine.number: list(engine.running) for engine in self.engines}
        return (
            f"at {self.now}: step {self._step} is waited for, {self.flow.assembling} assembled, version {self.flow.version}, "
            f"{self.flow.num_unassigned} unassigned, queued {len(self._prompts)}, held {held}, world {self.world}"
        )

    # --- prompts and engines ------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Issue what the flow admits and hand it to engines with a free place, the least loaded first."""
        while True:
            room = 2 * len(self.engines) - len(self._prompts)
            if room > 0 and (prompt := self.flow.next_prompt()) is not None:
                self._prompts.append(prompt)
            elif self._prompts and (engine := self._least_loaded()) is not None:
                self._begin(engine, self._prompts.popleft())
            else:
                return

    def _least_loaded(self) -> _Engine | None:
        """Of the engines that may take a group; entries of the heap whose load has changed are skipped."""
        while self._free:
            load, number = self._free[0]
            engine = self.engines[number]
            if self._takes(engine) and load == len(engine.running):
                return engine
            heapq.heappop(self._free)
        return None

    def _offer(self, engine: _Engine) -> None:
        if self._takes(engine):
            heapq.heappush(self._free, (len(engine.running), engine.number))

    def _takes(self, engine: _Engine) -> bool:
        return engine.alive and not engine.closed and len(engine.running) < self.world.groups_at_once

    def _begin(self, engine: _Engine, prompt: IssuedPrompt) -> None:
        length = self._lengths.setdefault((prompt.prompt_id, prompt.num_attempts), self.world.draw_length(self._rng))
        seconds = length * self.world.token_s / engine.speed
        timed_out = seconds > self.world.generation_timeout
        left = min(seconds, self.world.generation_timeout)
        group = _Group(prompt, length, left, engine.version, self.now, timed_out)
        engine.running[prompt.prompt_id] = group
        self._offer(engine)
        self._schedule(engine, group)

    def _schedule(self, engine: _Engine, group: _Group) -> None:
        generation = engine.generation
        start = max(self.now, engine.paused_until)
        group.started_at = start
        self._at(start + group.left_s, lambda: self._end(engine, group, generation))

    def _end(self, engine: _Engine, group: _Group, generation: int) -> None:
        if generation != engine.generation or not engine.alive:
            return
        del engine.running[group.prompt.prompt_id]
        self._offer(engine)
        engine.busy_s += self.now - group.started_at
        if group.timed_out:
            self.flow.give_up(group.prompt.prompt_id, max_attempts=self.world.max_attempts)
        else:
            self._durations.append(group.length * self.world.token_s / engine.speed)
            self._arrive(group, engine.version)
        self._assemble()
        self._feed()

    def _arrive(self, group: _Group, newest: int) -> None:
        prompt_id = group.prompt.prompt_id
        for _ in range(1 + (self._rng.random() < self.world.duplicate_share)):
            if self.flow.waits_for(prompt_id):
                self._lengths[prompt_id, 0] = group.length
                self.flow.arrive(prompt_id, oldest_version=group.oldest_version, newest_version=newest)

    def _die(self, engine: _Engine) -> None:
        """Its groups are gone; the others' and what is queued are not. It comes back with the current weights."""
        if not engine.alive:
            return
        engine.alive = False
        engine.generation += 1
        engine.running.clear()
        held = {prompt_id for other in self.engines for prompt_id in other.running}
        lost = self.flow.recover(held | {prompt.prompt_id for prompt in self._prompts})
        self._num_recovered += len(lost)
        self._at(self.now + self.world.restart_s, lambda: self._come_back(engine))
        self._feed()

    def _come_back(self, engine: _Engine) -> None:
        engine.alive = True
        engine.closed = False
        engine.version = self.flow.version
        self._offer(engine)
        self._feed()

    # --- assembling: as the controller does it ------------------------------------------------------------------------

    def _assemble(self) -> None:
        while self.flow.assembling <= self.world.flow.num_training_steps:
            step = self.flow.assembling
            taken = self.flow.assign()
            for assignment in taken:
                self._take(assignment, step)
            complete = self.flow.step_is_full and self._teaches
            if self.flow.step_is_full and not complete:
                self.flow.extend_step()
            if complete:
                self.flow.close_step()
            if complete or (self.world.streaming and self._pending_groups):
                self._send(step, is_last=complete)
            if complete:
                self._teaches = False
            elif not taken:
                return

    def _take(self, assignment: Assignment, step: int) -> None:
        prompt = assignment.prompt
        teaches = self._rng.random() >= self.world.zero_std_share
        self.ledger.stage(prompt.prompt_id, CONSUMED if teaches else ZERO_STD, step)
        if not teaches:
            return
        age = step - 1 - assignment.oldest_trained_version
        options = self.world.flow
        assert age <= options.max_staleness, f"age {age} over the bound: {assignment}"
        assert options.over_issued or age <= options.staleness_threshold, f"age {age} over the threshold: {assignment}"
        self._ages.append(age)
        self._teaches = True
        self._oldest = min(self._oldest, assignment.oldest_trained_version) if self._pending_groups else step - 1 - age
        self._pending_tokens += self._lengths.get((prompt.prompt_id, 0), 0.0)
        self._pending_groups += 1

    def _send(self, step: int, *, is_last: bool) -> None:
        oldest = self._oldest if self._pending_groups else step - 1
        samples = max(self._pending_groups, 1) * self.world.group_size
        item = QueueItem((step, self._pending_tokens, is_last), oldest, samples, self.now, 0)
        self._pending_tokens, self._pending_groups = 0.0, 0
        self._blocked.append(item)
        self._put_blocked()
        self._train()

    def _put_blocked(self) -> None:
        while self._blocked and self.buffer.try_put([self._blocked[0]]):
            self._blocked.popleft()

    # --- learners -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Take the next piece if the learners are free."""
        if self._learner_busy or (items := self.buffer.try_get(1, 1)) is None:
            return
        self._put_blocked()
        assert not self.buffer.take_expired(), "something expired in the queue"
        step, tokens, is_last = items[0].payload
        assert step == self._step, f"a piece of step {step} while {self._step} is trained"
        assert step - 1 - items[0].version <= self.world.flow.max_staleness
        seconds = tokens * self.world.learner_token_s + (self.world.step_s if is_last else 0.0)
        self._learner_busy = True
        self._learner_busy_s += seconds
        self._at(self.now + seconds, lambda: self._trained(is_last))

    def _trained(self, is_last: bool) -> None:
        if not is_last:
            self._learner_busy = False
            self._train()
            return
        step = self._step
        settled = self.ledger.commit(step)
        consumed = sum(fate == CONSUMED for _, fate in settled)
        assert 1 <= consumed <= self.world.flow.prompts_per_step, f"step {step} consumed {consumed}"
        sends = step % self.world.sync_every == 0
        self._at(self.now + (self.world.sync_s if sends else 0.0), lambda: self._stepped(step, sends))

    def _stepped(self, step: int, sends: bool) -> None:
        if sends and not self.world.inflight_updates and any(e.alive and e.running for e in self.engines):
            for engine in self.engines:
                engine.closed = True
            self._at(self.now + self.world.token_s, lambda: self._when_drained(step))
            return
        self._finish_step(step, sends)

    def _when_drained(self, step: int) -> None:
        if any(e.alive and e.running for e in self.engines):
            self._at(self.now + self.world.token_s, lambda: self._when_drained(step))
        else:
            self._finish_step(step, True)

    def _finish_step(self, step: int, sends: bool) -> None:
        self._step_ends.append(self.now)
        self._step = step + 1
        self._learner_busy = False
        self.buffer.set_version(step)
        if sends:
            for engine in self.engines:
                if engine.alive:
                    self._swap(engine, step)
            self.flow.set_version(step)
        self._assemble()
        self._train()
        self._feed()

    def _swap(self, engine: _Engine, version: int) -> None:
        """New weights between two tokens: what runs goes on after the pause."""
        engine.version = version
        engine.closed = False
        self._offer(engine)
        if not engine.running or not self.world.swap_pause_s:
            return
        engine.generation += 1
        engine.paused_until = self.now + self.world.swap_pause_s
        for group in engine.running.values():
            done = max(self.now - group.started_at, 0.0)
            engine.busy_s += done
            group.left_s -= done
            self._schedule(engine, group)


def log_normal(mean: float, sigma: float, longest: float) -> Draw:
    """Lengths with a heavy tail, cut off at `longest`."""
    mu = np.log(mean) - sigma**2 / 2
    return lambda rng: float(min(rng.lognormal(mu, sigma), longest))


def uniform(low: float, high: float) -> Draw:
    return lambda rng: float(rng.uniform(low, high))


def constant(length: float) -> Draw:
    return lambda rng: length
