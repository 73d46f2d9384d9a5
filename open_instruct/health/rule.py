"""What a rule of health is: a function that reads rows of `metrics.jsonl` and says in a sentence what is wrong.

To add one, write a file like this and name it with `--health_modules my_rules.py`:

    from open_instruct.health import RULES

    @RULES.register("long_prompts", metrics=["batch/prompt_lengths_mean"], cure="Lower --max_prompt_token_length.")
    def long_prompts(rows):
        mean = rows[-1]["batch/prompt_lengths_mean"]
        return f"prompts have {mean:.0f} tokens on average" if mean > 1000 else None

A registration may also give `fires_when`, the condition with its limit, which the page of a run shows beside the rule.

The function gets the newest rows that have all of the rule's metrics as numbers, oldest first and never none, and only if the row
that has just been written or added to is the last of them. It returns a sentence, or None if nothing is wrong.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from open_instruct.registry import Registry

STEP = "training_step"
PAGE = "docs/start/what_to_watch.md"
"""The page of the documents that names every rule; a rule's `link` is a heading of it."""

Row = Mapping[str, Any]
"""A row of `metrics.jsonl`."""
Check = Callable[[Sequence[Row]], str | None]

RULES: Registry[Check] = Registry("rule of health", flag="health_modules")
"""Every rule, by name. A registration gives as facts `metrics` (names of a row), `cure` (a sentence), `fires_when` (the
condition with its limit) and `link`."""


@dataclass(frozen=True)
class Alarm:
    """What a rule has found."""

    rule: str
    step: int
    """The training step of the row that raised it."""
    text: str
    """What is wrong, as a sentence with numbers, without a full stop."""
    cure: str
    """What to do, as a sentence; "" if the rule names none."""
    link: str
    """Page and heading that say more; "" if the rule names none."""
    metrics: Mapping[str, float]
    """The rule's metrics in the row that raised it."""

    def __str__(self) -> str:
        """The sentence, the cure and the link in one line, for a log."""
        return " ".join(filter(None, [f"{self.text}.", self.cure, f"({self.link})" if self.link else ""]))


@dataclass(frozen=True)
class Rule:
    """A rule with what its registration says of it."""

    name: str
    function: Check
    metrics: tuple[str, ...]
    """Metrics that a row must have for the rule to look at it."""
    cure: str = ""
    link: str = ""
    fires_when: str = ""
    """The condition with its limit, without a full stop; "" if the rule names none."""

    def check(self, rows: Sequence[Row]) -> Alarm | None:
        """The alarm that the last of these rows raises; None if nothing is wrong or nothing is known.

        Args:
            rows: what `numbers_of` gives for rows of a run, oldest first.

        Raises:
            TypeError: the function returned neither a text nor None.
        """
        if not rows or not self.reads(rows[-1]):
            return None
        text = self.function([row for row in rows if self.reads(row)])
        if text is None:
            return None
        if not isinstance(text, str):
            raise TypeError(f"the rule {self.name} returned {text!r:.100}; it must return a sentence or None")
        values = {name: rows[-1][name] for name in self.metrics}
        return Alarm(self.name, int(rows[-1][STEP]), text, self.cure, self.link, values)

    def reads(self, row: Row) -> bool:
        """Whether the row has all of the rule's metrics."""
        return row.keys() >= set(self.metrics)


def numbers_of(row: Row) -> dict[str, float]:
    """The metrics of a row that are finite numbers: no histograms, which would take most of the memory, and nothing unknown."""
    return {name: float(value) for name, value in row.items() if isinstance(value, Real) and math.isfinite(value)}


def all_rules() -> list[Rule]:
    """Every rule that is registered in this process."""
    return [
        Rule(
            entry.name,
            entry.value,
            tuple(entry.facts.get("metrics", ())),
            entry.facts.get("cure", ""),
            entry.facts.get("link", ""),
            entry.facts.get("fires_when", ""),
        )
        for entry in RULES
    ]
