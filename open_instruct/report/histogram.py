"""Metrics that consist of many numbers. They are written as counts between edges, and wandb shows them as histograms."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

NUM_BINS = 20


class Histogram(TypedDict):
    """`counts[i]` numbers are between `edges[i]` and `edges[i + 1]`. The last interval includes its upper edge."""

    edges: list[float]
    counts: list[int]


def histogram(values: Sequence[float] | np.ndarray) -> Histogram:
    """The histogram of at least one number, all finite: 20 bins of equal width, from the smallest number to the largest."""
    counts, edges = np.histogram(np.asarray(values, dtype=float), bins=NUM_BINS)
    return Histogram(edges=edges.tolist(), counts=counts.tolist())


def is_histogram(value: Any) -> bool:
    """Whether a metric is a histogram."""
    return isinstance(value, dict) and value.keys() == {"edges", "counts"}
