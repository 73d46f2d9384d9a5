"""A run on a simulated clock: the real admission, ledger and message queue, with fake engines and learners. No model, no Ray.

    PromptFlow ─► prompt queue ─► engines (a group takes as long as its longest response; weight swaps pause it; engines die)
        ▲                            │
        └── arrive, give_up, recover ┘     SampleBuffer ─► learners (a constant and a cost per token) ─► weights ─► engines

Checked at every event: the counters balance, and no more prompts wait for a step than pacing allows. Checked of every token that
is trained, by the version of the engine that sampled it: it is no older than the bound. Each step trains its groups, and at the
end every prompt has its fate. Nothing left to happen before the end is a deadlock.
"""

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.simulated_engine import Group, SimulatedEngine, Spans
from benchmarks.simulated_world import Mark, Outcome, World
from open_instruct.rollouts.message_queue import QueueItem, SampleBuffer
from open_instruct.rollouts.prompt_ledger import CONSUMED, FAILED, RUN_ENDED, ZERO_STD, IssuedPrompt, PromptLedger
from open_instruct.rollouts.staleness import Assignment, PromptFlow, sample_age

EVENTS_PER_GROUP = 400
"""A run with more of them makes no progress."""


@dataclass(frozen=True)
class _Piece:
    """Payload of a message: groups of a step, each as the spans that are trained."""

    training_step: int
    groups: list[Spans]
    is_last: bool


class Deadlock(AssertionError):
    """Nothing is left to happen and the run is not over, or it goes round in circles."""


class Simulation:
    """Runs a `World` to its end: `Simulation(world).run()`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self._rng = np.random.default_rng(world.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        speeds = world.engine_speeds or (1.0,) * world.num_engines
        self.engines = [
            SimulatedEngine(number, world.groups_at_once, speed / world.token_s, world.saturated_at)
            for number, speed in enumerate(speeds)
        ]
        self._begin_run(PromptLedger(), 0, 0)
        self._num_stale_discarded = self._num_truncated = self._num_put_waits = 0
        self._ages: list[int] = []
        self._lengths: list[float] = []
        self._learner_busy_s = 0.0
        self._marks: list[Mark] = []

    def _begin_run(self, ledger: PromptLedger, next_issue_number: int, step: int) -> None:
        """From the start or, after a kill, from the end of `step`."""
        options = self.world.flow
        self.ledger = ledger
        self.flow = PromptFlow(options, ledger)
        self.flow.next_issue_number = next_issue_number
        self._num_resumed = len(ledger.open_prompts())
        """May be more than would be issued now: the steps ahead that took more groups, because none taught anything, are gone."""
        self.flow.start(step)
        room = (min(self.world.queue_batches, options.max_staleness + 1)) * options.prompts_per_step
        self.buffer = SampleBuffer(math.ceil(room) * self.world.group_size, max_staleness=options.max_staleness)
        self.buffer.set_version(step)
        self._events.clear()
        self._free = [(0, engine.number) for engine in self.engines]
        self._prompts: deque[IssuedPrompt] = deque()
        self._on_their_way: set[str] = set()
        self._arrived: dict[str, Spans] = {}
        self._batch: list[Spans] = []
        """Of the step being assembled, what is not sent yet."""
        self._teaches = False
        self._num_extensions: dict[int, int] = {}
        self._blocked: QueueItem | None = None
        self._num_trained_steps = step
        self._num_trained_groups = 0
        self._learner_is_busy = False
        self._to_swap: set[int] = set()
        self._num_pauses = 0

    def run(self) -> Outcome:
        self._plan_faults()
        self._mark()
        self._feed()
        options = self.world.flow
        most = EVENTS_PER_GROUP * (options.prompts_per_step * options.num_training_steps + 100)
        for number in itertools.count():
            if self._num_trained_steps == options.num_training_steps and not self._learner_is_busy:
                break
            if not self._events or number > most:
                raise Deadlock(self._describe())
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._check()
        return self._outcome()

    def _plan_faults(self) -> None:
        world = self.world
        for _ in range(world.num_deaths):
            engine = self.engines[int(self._rng.integers(len(self.engines)))]
            self._at(float(self._rng.uniform(0, world.fault_horizon_s)), lambda engine=engine: self._die(engine))
        for _ in range(world.num_pauses):
            begin = float(self._rng.uniform(0, world.fault_horizon_s))
            self._at(begin, lambda: self._pause(1))
            self._at(begin + world.pause_s, lambda: self._pause(-1))

    def _check(self) -> None:
        self.ledger.check()
        assert self.flow.num_unassigned <= max(self.flow.num_admissible, self._num_resumed), self._describe()

    def _outcome(self) -> Outcome:
        if left := self.ledger.open_prompts():
            assert self._num_resumed, f"issued for nothing: {left}, {self._describe()}"
            self.ledger.close()
        counts = self.ledger.counts()
        assert set(+self.ledger.fates) <= {CONSUMED, ZERO_STD, FAILED, *([RUN_ENDED] if self._num_resumed else [])}, (
            counts
        )
        num_stale_discarded = self._num_stale_discarded + self.flow.num_stale_discarded
        may_discard = self.world.flow.straggler_policy != "wait" or self.world.late_share > 0
        assert may_discard or num_stale_discarded == 0, f"{num_stale_discarded} were not waited for, {self._describe()}"
        queue = self.buffer.statistics()
        assert queue["total_produced"] == queue["total_consumed"], queue
        return Outcome(
            marks=self._marks,
            ages=self._ages,
            lengths=self._lengths,
            counts=counts,
            num_stale_discarded=num_stale_discarded,
            num_duplicates=self.ledger.num_duplicates,
            num_truncated=self._num_truncated,
            num_put_waits=self._num_put_waits,
        )

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _describe(self) -> str:
        held = {engine.number: list(engine.running) for engine in self.engines}
        return (
            f"at {self.now}: {self._num_trained_steps} steps are trained, {self.flow.assembling} is assembled, version "
            f"{self.flow.version}, {self.flow.num_unassigned} of {self.flow.num_admissible} unassigned, queued "
            f"{len(self._prompts)}, held {held}, on their way {self._on_their_way}, world {self.world}"
        )

    def _longer(self, seconds: float) -> float:
        return seconds * (1 + self.world.jitter * self._rng.random())

    # --- prompts and engines ------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Issue what the flow admits and hand it to engines with a free place, the least loaded first."""
        while True:
            room = 0 if self._num_pauses else 2 * len(self.engines) - len(self._prompts)
            if room > 0 and (prompt := self.flow.next_prompt()) is not None:
                self._prompts.append(prompt)
            elif self._prompts and (engine := self._least_loaded()) is not None:
                self._begin(engine, self._prompts.popleft())
            else:
                return

    def _pause(self, change: int) -> None:
        self._num_pauses = max(0, self._num_pauses + change)
        self._feed()

    def _least_loaded(self) -> SimulatedEngine | None:
        """Of the engines with room; entries of the heap whose load has changed are skipped."""
        while self._free:
            load, number = self._free[0]
            engine = self.engines[number]
            if engine.has_room and load == len(engine.running):
                return engine
            heapq.heappop(self._free)
        return None

    def _offer(self, engine: SimulatedEngine) -> None:
        if engine.has_room:
            heapq.heappush(self._free, (len(engine.running), engine.number))

    def _begin(self, engine: SimulatedEngine, prompt: IssuedPrompt) -> None:
        if prompt.prompt_id in engine.running:
            return  # it was given up for lost and is there after all
        group = engine.begin(prompt, self.world.draw_length(self._rng), self.now)
        self._offer(engine)
        self._expect_end(engine)
        if self.world.generation_timeout < math.inf:
            self._at(self.now + self.world.generation_timeout, lambda: self._time_out(engine, group))

    def _expect_end(self, engine: SimulatedEngine) -> None:
        if engine.expected == engine.schedule or (end := engine.next_end()) is None:
            return
        when, group = end
        schedule = engine.expected = engine.schedule
        self._at(when, lambda: self._end(engine, group) if schedule == engine.schedule else None)

    def _end(self, engine: SimulatedEngine, group: Group) -> None:
        spans = engine.end(group, self.now)
        self._lengths.append(group.length)
        self._place_is_free(engine)
        for _ in range(1 + self._is_late()):
            self._send_result(group.prompt.prompt_id, spans)

    def _time_out(self, engine: SimulatedEngine, group: Group) -> None:
        if engine.running.get(group.prompt.prompt_id) is group:
            engine.end(group, self.now)
            self.flow.give_up(group.prompt.prompt_id, max_attempts=self.world.max_attempts)
            self._place_is_free(engine)

    def _place_is_free(self, engine: SimulatedEngine) -> None:
        if engine.is_closed and not engine.running:
            self._swap(engine)
        self._offer(engine)
        self._expect_end(engine)
        self._feed()

    def _send_result(self, prompt_id: str, spans: Spans) -> None:
        if not self.flow.waits_for(prompt_id, self._on_their_way):
            return
        self._on_their_way.add(prompt_id)
        delay = float(self._rng.uniform(0, 2 * self.world.score_s))
        self._at(self.now + delay, lambda: self._arrive(prompt_id, spans))

    def _arrive(self, prompt_id: str, spans: Spans) -> None:
        self._on_their_way.discard(prompt_id)
        if self.flow.arrive(prompt_id, oldest_version=spans[0][0], newest_version=spans[-1][0]):
            self._arrived[prompt_id] = spans
        self._assemble()
        self._feed()

    def _die(self, engine: SimulatedEngine) -> None:
        """Its groups are gone, or one comes after all; it may take a prompt out of the queue with it."""
        if not engine.is_alive:
            return
        for group in engine.die(self.now):
            if self._is_late():
                self._come_late(group)
        if self._prompts and self._rng.random() < 0.5:
            self._prompts.popleft()
        held = {prompt_id for other in self.engines for prompt_id in other.running}
        seen = {prompt_id for prompt_id in self._on_their_way if not self._is_late()}
        self.flow.recover(held | seen | {prompt.prompt_id for prompt in self._prompts})
        self._is_swapped(engine)
        self._at(self.now + self.world.restart_s, lambda: self._come_back(engine))
        self._feed()

    def _is_late(self) -> bool:
        return self._rng.random() < self.world.late_share

    def _come_late(self, group: Group) -> None:
        """Its engine was taken for dead and was only slow: the result is as old as it can be."""
        spans = ((group.prompt.version, group.length),)
        delay = float(self._rng.exponential(5 * self.world.restart_s))
        self._at(self.now + delay, lambda: self._arrive(group.prompt.prompt_id, spans))

    def _come_back(self, engine: SimulatedEngine) -> None:
        engine.come_back(self._num_trained_steps, self.now)
        self._offer(engine)
        self._feed()

    # --- assembling: as the controller does it ------------------------------------------------------------------------

    def _assemble(self) -> None:
        while self._blocked is None and self.flow.assembling <= self.world.flow.num_training_steps:
            step = self.flow.assembling
            taken = self.flow.assign()
            for assignment in taken:
                self._take(assignment, step)
            complete = self.flow.step_is_full and self._teaches
            if self.flow.step_is_full and not complete:
                self.flow.extend_step()
                self._num_extensions[step] = self._num_extensions.get(step, 0) + 1
            if complete:
                self.flow.close_step()
                self._teaches = False
            if complete or (self.world.streaming and self._batch):
                self._send(step, is_last=complete)
            if not complete and not taken:
                return

    def _take(self, assignment: Assignment, step: int) -> None:
        spans = self._arrived.pop(assignment.prompt.prompt_id)
        teaches = self._rng.random() >= self.world.zero_std_share
        self.ledger.stage(assignment.prompt.prompt_id, CONSUMED if teaches else ZERO_STD, step)
        if teaches:
            trained = tuple(span for span in spans if span[0] >= assignment.oldest_trained_version)
            self._num_truncated += len(trained) < len(spans)
            self._batch.append(trained)
            self._teaches = True

    def _send(self, step: int, *, is_last: bool) -> None:
        groups, self._batch = self._batch, []
        oldest = min((spans[0][0] for spans in groups), default=step - 1)
        num_samples = max(len(groups), 1) * self.world.group_size
        self._blocked = QueueItem(_Piece(step, groups, is_last), oldest, num_samples, 0)
        self._put_blocked()
        self._num_put_waits += self._blocked is not None
        self._train()

    def _put_blocked(self) -> None:
        if self._blocked is not None and self.buffer.try_put(self._blocked):
            self._blocked = None

    # --- learners -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Take the next piece if the learners are free."""
        if self._learner_is_busy or (items := self.buffer.try_get(1, 1)) is None:
            return
        piece: _Piece = items[0].payload
        self._learner_is_busy = True
        seconds = self._longer(self._step_seconds(piece))
        self._check_ages(piece)
        self._at(self.now + seconds, lambda: self._trained(piece, seconds))
        if self._blocked is not None:
            self._put_blocked()
            self._assemble()

    def _step_seconds(self, piece: _Piece) -> float:
        num_tokens = sum(tokens for spans in piece.groups for _, tokens in spans)
        return num_tokens * self.world.learner_token_s + (self.world.step_s if piece.is_last else 0.0)

    def _check_ages(self, piece: _Piece) -> None:
        """By what the engines sampled and what the learners hold, not by what the flow says of it."""
        options = self.world.flow
        step = self._num_trained_steps + 1
        assert piece.training_step == step, f"a piece of step {piece.training_step} while {step} is trained"
        for spans in piece.groups:
            assert spans, f"a group of step {step} has nothing to train on"
            age = sample_age(step, min(version for version, _ in spans))
            assert 0 <= age <= options.max_staleness, f"age {age} in step {step}, {self._describe()}"
            assert options.over_issued or age <= options.staleness_threshold, f"age {age}, {self._describe()}"
            self._ages.append(age)

    def _trained(self, piece: _Piece, seconds: float) -> None:
        self._learner_busy_s += seconds
        self._num_trained_groups += len(piece.groups)
        if not piece.is_last:
            self._learner_is_busy = False
            self._train()
            return
        step = piece.training_step
        self._check_settled(step, [fate for _, fate in self.ledger.commit(step)])
        self._num_trained_steps = step
        self._num_trained_groups = 0
        if step % self.world.sync_every:
            self._finish_step()
        else:
            self._begin_sync()

    def _check_settled(self, step: int, fates: list[str]) -> None:
        per_step = self.world.flow.prompts_per_step
        assert fates.count(CONSUMED) == self._num_trained_groups, (step, fates)
        num_groups = fates.count(CONSUMED) + fates.count(ZERO_STD)
        num_extensions = self._num_extensions.pop(step, 0)
        assert num_groups == per_step * (1 + num_extensions), f"step {step}: {fates}, extended {num_extensions} times"
        assert 1 <= fates.count(CONSUMED) <= per_step, f"step {step} is not one batch: {fates}"

    # --- weights ------------------------------------------------------------------------------------------------------

    def _begin_sync(self) -> None:
        """Every live engine gets the weights, at its own time; the learners go on when the last one has them."""
        seconds = self._longer(self.world.sync_s)
        self._learner_busy_s += seconds
        self._to_swap = {engine.number for engine in self.engines}
        for engine in self.engines:
            last = engine.number == len(self.engines) - 1
            delay = seconds if last else seconds * float(self._rng.random())
            self._at(self.now + delay, lambda engine=engine: self._weights_are_there(engine))

    def _weights_are_there(self, engine: SimulatedEngine) -> None:
        if not engine.is_alive:
            self._is_swapped(engine)
        elif self.world.inflight_updates or not engine.running:
            self._swap(engine)
        else:
            engine.is_closed = True

    def _swap(self, engine: SimulatedEngine) -> None:
        engine.swap(self._num_trained_steps, self.now, self.world.swap_pause_s)
        self._expect_end(engine)
        self._offer(engine)
        self._is_swapped(engine)

    def _is_swapped(self, engine: SimulatedEngine) -> None:
        """Or dead: it comes back with the learners' weights."""
        if engine.number in self._to_swap:
            self._to_swap.discard(engine.number)
            if not self._to_swap:
                self.flow.set_version(self._num_trained_steps)
                self._finish_step()

    def _finish_step(self) -> None:
        step = self._num_trained_steps
        self._learner_is_busy = False
        self.buffer.set_version(step)
        self._mark()
        if step in self.world.killed_after:
            self._kill_and_resume()
        self._assemble()
        self._train()
        self._feed()

    def _mark(self) -> None:
        for engine in self.engines:
            engine.advance(self.now)
        self._marks.append(
            Mark(
                at_s=self.now,
                engine_tokens=sum(engine.num_tokens for engine in self.engines),
                engine_possible_tokens=sum(engine.num_possible_tokens for engine in self.engines),
                learner_busy_s=self._learner_busy_s,
                num_groups=len(self._ages),
            )
        )

    def _kill_and_resume(self) -> None:
        """Only what a checkpoint holds survives."""
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self._num_stale_discarded += self.flow.num_stale_discarded
        ledger = PromptLedger()
        ledger.load_state_dict(state)
        for engine in self.engines:
            engine.die(self.now)
            engine.come_back(self._num_trained_steps, self.now)
        self._begin_run(ledger, self.flow.next_issue_number, self._num_trained_steps)
