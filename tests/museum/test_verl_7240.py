"""pass@k is estimated by drawing with replacement."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.rollouts.evaluation_metrics import pass_at_k_metrics

EXHIBIT = Exhibit(
    reports=("verl-project/verl #7240",),
    subject="evaluation and metrics",
    happened="best@k drew k of the n responses with replacement, so a prompt whose only right response was not drawn "
    "counted as failed: 0.68 in place of 1 for one right response of four at k = 4.",
    here="`eval/pass_at_<k>_unbiased` is the share of all subsets of k responses that hold a right one "
    "(`rollouts/evaluation_metrics.py`).",
)


def check(pass_at: Callable[[np.ndarray, int], float]) -> None:
    for num_right in range(5):
        right = np.arange(4) < num_right
        for k in (1, 2, 4):
            share = np.mean([any(subset) for subset in combinations(right, k)])
            assert pass_at(right, k) == pytest.approx(share), (num_right, k)


def theirs(right: np.ndarray, k: int) -> float:
    return 1 - (1 - right.mean()) ** k  # the mean over all draws with replacement


def ours(right: np.ndarray, k: int) -> float:
    return pass_at_k_metrics([right])[f"eval/pass_at_{k}_unbiased"]


def test_draws_with_replacement_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_pass_at_k_counts_subsets_here() -> None:
    check(ours)
