"""Small statistics of a metric over steps, for rules."""

import statistics
from collections.abc import Sequence

from open_instruct.health.rule import Row

REWARD = "all_groups/scores"
"""The mean reward of all answers of a step."""


def column(rows: Sequence[Row], name: str) -> list[float]:
    """A metric in these rows, oldest first."""
    return [float(row[name]) for row in rows]


def mean(rows: Sequence[Row], name: str) -> float:
    """Mean of a metric over these rows."""
    return statistics.fmean(column(rows, name))


def median(rows: Sequence[Row], name: str) -> float:
    """Median of a metric over these rows."""
    return statistics.median(column(rows, name))


def ratio(rows: Sequence[Row], part: str, whole: str) -> float:
    """Sum of one metric over these rows divided by the sum of another; 0 if that is 0."""
    total = sum(column(rows, whole))
    return sum(column(rows, part)) / total if total else 0.0


def rises(rows: Sequence[Row], name: str = REWARD) -> bool:
    """Whether the mean over the newer half of the rows is above that over the older half by a standard error or more.

    The standard error comes from the scatter of the values. 0.1 0.3 0.2, 0.6 0.8 0.7 rises: 0.2 to 0.7, and the standard error of
    the difference is 0.08. One standard error is weak evidence, and enough to keep a rule silent: of a flat metric one value in
    six comes so high by chance, and the rule looks again at the next step. Fewer than four rows never rise.
    """
    values = column(rows, name)
    half = len(values) // 2
    if half < 2:
        return False
    older, newer = values[:half], values[-half:]
    error = ((statistics.variance(older) + statistics.variance(newer)) / half) ** 0.5
    difference = statistics.fmean(newer) - statistics.fmean(older)
    return difference > 0 and difference >= error
