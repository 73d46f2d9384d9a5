"""Metrics are averaged on each rank before they are put together."""

from collections.abc import Callable, Sequence

import pytest
from exhibit import Exhibit

from open_instruct.learners.step_sums import StepSums, merge_step_metrics

EXHIBIT = Exhibit(
    reports=("huggingface/trl #7010", "huggingface/trl #7047"),
    subject="evaluation and metrics",
    happened="Each rank averaged a metric over its own examples, or each micro-batch over its own, and the averages were "
    "averaged. Where the shares differ in size, or one holds a repeated example, the logged value is none of the "
    "batch's.",
    here="Ranks and micro-batches report sums and counts, and the driver divides once (`learners/step_sums.py`).",
)
Ranks = Sequence[Sequence[Sequence[float]]]
"""By rank and micro-batch: the values of the trained tokens."""


def check(mean: Callable[[Ranks], float]) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    for ranks in ([[values]], [[values[:5]], [values[5:]]], [[values[:3], values[3:4]], [values[4:8], values[8:]]]):
        assert mean(ranks) == pytest.approx(5.0), ranks


def theirs(ranks: Ranks) -> float:
    means = [sum(values) / len(values) for rank in ranks for values in rank]
    return sum(means) / len(means)


def ours(ranks: Ranks) -> float:
    import torch

    reports = []
    for rank in ranks:
        step = StepSums(num_tokens=sum(map(len, rank)))
        for values in rank:
            step.add({"entropy": torch.tensor(values).sum()}, None)
        reports.append(step.report(num_epochs=1, memory_in_use_bytes=0, peak_memory_bytes=0))
    return merge_step_metrics(reports)["entropy"]


def test_mean_of_means_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_metrics_are_means_over_all_tokens_here() -> None:
    check(ours)
