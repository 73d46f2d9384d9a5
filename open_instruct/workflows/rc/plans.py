"""What a training run asks of the reasoning cache, prompt by prompt: which states to sample at, and where to begin. Pure.

A rollout need not begin at the beginning, because a buffer keeps states that earlier rollouts reached. A rollout that begins at
such a state skips the turns before it. Example: if states 2 and 3 are drawn, a buffered state 1 saves the first cycle. The buffer
is bounded, holds no state older than allowed, and returns each state once.
"""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from open_instruct.workflows.rc.types import RCPlan, ReachedState


@dataclass(frozen=True)
class PlanOptions:
    """The options of a run from which the plans of its prompts are made."""

    num_cycles: int
    states_per_problem: int
    """States to sample at for each problem; 0: the trajectory's own turns are trained on."""
    num_summaries: int
    """As in `RCPlan`."""
    eval_num_cycles: int
    buffer_size: int = 0
    """Most states in the buffer; 0 is no buffer."""
    buffer_states_per_problem: int = 4
    max_state_age: int | None = None
    """In weight versions; None is no limit."""


class StateBuffer:
    """Reached states by dataset row, oldest first."""

    def __init__(self, size: int, per_problem: int, max_age: int | None) -> None:
        self._size = size
        self._per_problem = per_problem
        self._max_age = max_age
        self._states: defaultdict[int, dict[int, ReachedState]] = defaultdict(dict)
        """By row, then by arrival number."""
        self._rows: OrderedDict[int, int] = OrderedDict()
        """Arrival number to row, oldest first, for exactly the states in `_states`. An `OrderedDict`, because in a dict the first
        key is slow to find once many keys were deleted."""
        self._num_arrivals = 0
        self.counts: Counter[str] = Counter()
        """`dropped_old`, `dropped_full`, `taken`."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, state: ReachedState) -> None:
        """Add a state. If the room for this problem or the whole buffer is full, the oldest states are dropped."""
        if self._size == 0:
            return
        if len(self._states[row]) == self._per_problem:
            self._drop(next(iter(self._states[row])))
        self._states[row][self._num_arrivals] = state
        self._rows[self._num_arrivals] = row
        self._num_arrivals += 1
        while len(self) > self._size:
            self._drop(next(iter(self._rows)))

    def take(self, row: int, *, at_most: int, version: int) -> ReachedState | None:
        """Remove and return the state with the highest number up to `at_most`; if several have this number, the newest."""
        self._drop_aged(row, version)
        fitting = [(state.number, arrival) for arrival, state in self._of(row).items() if state.number <= at_most]
        if not fitting:
            return None
        self.counts["taken"] += 1
        return self._remove(max(fitting)[1])

    def state_dict(self) -> list[dict[str, Any]]:
        """The states, oldest first."""
        return [{"row": row, **asdict(self._states[row][arrival])} for arrival, row in self._rows.items()]

    def load_state_dict(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self.add(entry["row"], ReachedState(entry["number"], entry["summary"], entry["version"]))

    def _of(self, row: int) -> dict[int, ReachedState]:
        return self._states.get(row, {})

    def _drop_aged(self, row: int, version: int) -> None:
        if self._max_age is None:
            return
        for arrival in [n for n, state in self._of(row).items() if version - state.version > self._max_age]:
            self._remove(arrival)
            self.counts["dropped_old"] += 1

    def _drop(self, arrival: int) -> None:
        self._remove(arrival)
        self.counts["dropped_full"] += 1

    def _remove(self, arrival: int) -> ReachedState:
        row = self._rows.pop(arrival)
        state = self._states[row].pop(arrival)
        if not self._states[row]:
            del self._states[row]
        return state


class RCPlanner:
    """Makes the plans of a run. It remembers the plans of open prompts, so a prompt that is issued again gets the same plan."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._buffer = StateBuffer(options.buffer_size, options.buffer_states_per_problem, options.max_state_age)
        self._out: dict[str, tuple[int, RCPlan]] = {}
        """Row and plan of each open prompt, by prompt id."""
        self._ages: list[int] = []
        """Ages of the buffered states that rollouts began at since the last call of `metrics`."""

    def training_plan(self, prompt_id: str, row: int, problem: str, *, version: int, seed: int) -> RCPlan:
        """The plan of a training prompt that is issued while `version` is served."""
        if prompt_id not in self._out:
            self._out[prompt_id] = (row, self._draw(row, problem, version, seed))
        return self._out[prompt_id][1]

    def _draw(self, row: int, problem: str, version: int, seed: int) -> RCPlan:
        options = self._options
        if not options.states_per_problem:
            return RCPlan(problem, num_cycles=options.num_cycles, num_summaries=options.num_summaries)
        draw = np.random.default_rng(seed).permutation(options.num_cycles)[: options.states_per_problem]
        states = tuple(sorted(draw.tolist()))
        later = [state for state in states if state > 0]
        # If summaries are trained, a rollout samples the summaries that lead to each drawn state, so it begins before the first.
        at_most = later[0] - (1 if options.num_summaries else 0) if later else 0
        start = self._buffer.take(row, at_most=at_most, version=version)
        if start is not None:
            self._ages.append(version - start.version)
        return RCPlan(problem, start or ReachedState(), states, options.num_cycles, options.num_summaries)

    def evaluation_plan(self, problem: str) -> RCPlan:
        """One trajectory from the beginning."""
        return RCPlan(problem, num_cycles=self._options.eval_num_cycles)

    def arrived(self, prompt_id: str, states: tuple[ReachedState, ...]) -> None:
        """Called when the result of a training prompt has arrived. Later rollouts can begin at the states that it reached, except
        at the last state, where nothing is trained."""
        row, _ = self._out.pop(prompt_id, (None, None))
        if row is None or not self._options.states_per_problem:
            return
        for state in states:
            if state.number < self._options.num_cycles:
                self._buffer.add(row, state)

    def dropped(self, prompt_id: str) -> None:
        """Called when a training prompt has failed for the last time. The state at which its rollout began is lost as well."""
        self._out.pop(prompt_id, None)

    def metrics(self) -> dict[str, float]:
        """`rc/…` metrics of the buffer: its size, counts since this process started, ages (in versions) since the last call."""
        if not self._options.buffer_size:
            return {}
        counts = self._buffer.counts
        ages, self._ages = self._ages, []
        age_metrics = {"rc/state_age_mean": fmean(ages), "rc/state_age_max": max(ages)} if ages else {}
        return {
            "rc/states_buffered": len(self._buffer),
            "rc/states_dropped_old": counts["dropped_old"],
            "rc/states_dropped_full": counts["dropped_full"],
            "rc/states_taken": counts["taken"],
            **age_metrics,
        }

    def state_dict(self) -> dict[str, Any]:
        """The buffer and the plans of open prompts, as plain values."""
        out = {prompt_id: {"row": row, "plan": asdict(plan)} for prompt_id, (row, plan) in self._out.items()}
        return {"buffer": self._buffer.state_dict(), "out": out}

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Restore a `state_dict`. Earlier versions saved a list: the buffer, and the states at which rollouts had begun."""
        if isinstance(state, list):
            state = {"buffer": state, "out": {}}
        self._buffer.load_state_dict(state["buffer"])
        self._out = {prompt_id: (entry["row"], _plan(entry["plan"])) for prompt_id, entry in state["out"].items()}


def _plan(values: dict[str, Any]) -> RCPlan:
    restored: dict[str, Any] = {"start": ReachedState(**values["start"]), "states": tuple(values["states"])}
    return RCPlan(**(values | restored))
