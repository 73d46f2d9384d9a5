"""Runs all rules of health on the newest rows, after each row. Memory and time are bounded, however long the run is.

row of a step, or metrics of an evaluation ──► window: newest rows, and older rows with an evaluation
                                                 └─► each rule ──► alarm, told once
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.health.rule import STEP, Alarm, Row, Rule, all_rules, numbers_of

logger = logging.getLogger(__name__)

WINDOW = 100
"""Newest rows that rules see."""
EVALUATIONS = 50
"""Further rows that rules see: the newest of the older rows that have an evaluation."""
QUIET = 50
"""An alarm is told again only if its rule was checked so often without raising it."""
EVALUATION = "eval/"
"""How the names of an evaluation's metrics begin."""


@dataclass
class RuleState:
    """What is known of a rule in a run."""

    rule: Rule
    num_quiet: int = QUIET
    """Checks since it last raised its alarm."""
    is_off: bool = False
    """Whether the rule failed, and is not checked any more."""


class Monitor:
    """Looks at a run row by row. Not thread-safe: whoever writes the rows calls it."""

    def __init__(self, rules: Iterable[Rule] | None = None) -> None:
        """`rules`: by default all that are registered."""
        self._states = [RuleState(rule) for rule in (all_rules() if rules is None else rules)]
        self._rows: list[dict[str, Any]] = []
        """By training step, only the numbers of each row."""

    @property
    def raised(self) -> list[str]:
        """The rules whose last check raised an alarm."""
        return [state.rule.name for state in self._states if state.num_quiet == 0]

    def remember(self, rows: Iterable[Row]) -> None:
        """Put rows that an earlier process wrote into the window, without checking them."""
        for row in rows:
            self._add(row[STEP], row)

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Check the row of a step, or metrics that are added to it. Returns the alarms that are to be told now."""
        self._add(step, metrics)
        rows = [row for row in self._rows if row[STEP] <= step]  # the evaluation of a step may end steps later
        alarms = [self._check(state, rows, metrics) for state in self._states if not state.is_off]
        return [alarm for alarm in alarms if alarm is not None]

    def _check(self, state: RuleState, rows: Sequence[Row], metrics: Mapping[str, Any]) -> Alarm | None:
        is_new = any(name in metrics for name in state.rule.metrics)
        if not is_new or not state.rule.reads(rows[-1]):
            return None
        try:
            alarm = state.rule.check(rows)
        except Exception as error:  # a user's rule may raise anything, and must not end the run
            state.is_off = True
            logger.warning(
                "the rule of health %s failed and is switched off: %s: %s",
                state.rule.name,
                type(error).__name__,
                error,
            )
            return None
        num_quiet, state.num_quiet = state.num_quiet, 0 if alarm is not None else state.num_quiet + 1
        return alarm if num_quiet >= QUIET else None

    def _add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of the step, or a new row in its place among the others; then forget the oldest rows."""
        values = numbers_of(metrics)
        place = len(self._rows)
        while place > 0 and self._rows[place - 1][STEP] > step:
            place -= 1
        if place > 0 and self._rows[place - 1][STEP] == step:
            self._rows[place - 1] |= values
        else:
            self._rows.insert(place, {STEP: step, **values})
        evaluated, newest = self._rows[:-WINDOW], self._rows[-WINDOW:]
        if evaluated and not any(name.startswith(EVALUATION) for name in evaluated[-1]):
            evaluated.pop()  # it has just left the newest rows
        self._rows = evaluated[-EVALUATIONS:] + newest


def assess(rows: Iterable[Row], rules: Iterable[Rule] | None = None) -> list[Alarm]:
    """The first alarm of each rule in the rows of a run, by training step. The rows may be those of a run that is under way."""
    monitor = Monitor(rules)
    first: dict[str, Alarm] = {}
    for row in rows:
        for alarm in monitor.look(row[STEP], row):
            first.setdefault(alarm.rule, alarm)
    return sorted(first.values(), key=lambda alarm: alarm.step)
