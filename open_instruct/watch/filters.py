"""Which samples of a step a view shows, and in which order."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from open_instruct.scored_groups import UNSCORED
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.samples import SampleRow

SORTS = ("issue", "best", "worst", "longest", "shortest", "random")

KNOWN = {
    "outcome": ("consumed", "zero_std", "masked", "too_old", UNSCORED),
    "finish_reason": ("stop", "length", "abort"),
}
"""Values that a filter may have although no sample of the step has them."""


@dataclass(frozen=True)
class Filters:
    """What a sample has to be; None: anything."""

    verifier: str | None = None
    """A verifier, or reward function, that scored it."""
    source: str | None = None
    outcome: str | None = None
    finish_reason: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: int | None = None
    min_length: int | None = None
    max_length: int | None = None

    def check(self, choices: Mapping[str, Sequence[str]], place: str) -> None:
        """Raises `Mistake` for a value that no sample of the place can have.

        Args:
            choices: the values that its samples have, by filter.
        """
        for name, values in choices.items():
            value = getattr(self, name)
            if value is not None and value not in (*values, *KNOWN.get(name, ())):
                some = dict.fromkeys([*values, *KNOWN.get(name, ())])
                raise Mistake(f"{place} has no {name} {value!r}. It has to be one of: {', '.join(some) or 'none'}.")

    def keep(self, rows: Iterable[SampleRow], *, by_reward: bool = True) -> list[SampleRow]:
        """The samples that pass; without `by_reward` of any reward."""
        return [row for row in rows if self._passes(row) and (not by_reward or self._has_reward(row))]

    def _passes(self, row: SampleRow) -> bool:
        return (
            all(own is None or own == row[name] for name, own in self._exact().items())
            and (self.verifier is None or self.verifier in (verdict["name"] for verdict in row["verdicts"] or ()))
            and (self.min_age is None or (row["age"] is not None and row["age"] >= self.min_age))
            and (self.min_length is None or row["num_tokens"] >= self.min_length)
            and (self.max_length is None or row["num_tokens"] <= self.max_length)
        )

    def _exact(self) -> dict[str, str | None]:
        return {"source": self.source, "outcome": self.outcome, "finish_reason": self.finish_reason}

    def _has_reward(self, row: SampleRow) -> bool:
        reward = row["reward"]
        if reward is None:
            return self.min_reward is None and self.max_reward is None
        return (self.min_reward is None or reward >= self.min_reward) and (
            self.max_reward is None or reward <= self.max_reward
        )


def in_order(rows: Sequence[SampleRow], sort: str, seed: int) -> list[SampleRow]:
    """The samples in this order; those that are alike in the order of issue, and those without a reward behind the best and the
    worst. Raises `Mistake` for an unknown order."""
    if sort == "random":
        return random.Random(seed).sample(list(rows), len(rows))
    keys = {
        "issue": lambda row: 0,
        "best": lambda row: math.inf if row["reward"] is None else -row["reward"],
        "worst": lambda row: math.inf if row["reward"] is None else row["reward"],
        "longest": lambda row: -row["num_tokens"],
        "shortest": lambda row: row["num_tokens"],
    }
    if sort not in keys:
        raise Mistake(f"there is no order {sort!r}. Sort by one of: {', '.join(SORTS)}.")
    return sorted(rows, key=keys[sort])
