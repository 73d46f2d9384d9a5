"""pass@k depends on the order of the responses."""

from collections.abc import Callable
from itertools import combinations, permutations

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.rollouts.evaluation_metrics import pass_at_k_metrics

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/prime-rl #809",),
    subject="evaluation and metrics",
    happened="pass@k asked whether one of the first k responses was right, and threw the others away, so the number jumped"
    " between evaluations of the same model.",
    here="All responses count: `eval/pass_at_<k>_unbiased` is the mean over all choices of k of them "
    "(`rollouts/evaluation_metrics.py`).",
)
Pass = Callable[[tuple[bool, ...]], float]
K = 2
"""The number of responses of which one must be right."""


def check(pass_at_2: Pass) -> None:
    for num_right in range(5):
        responses = (True,) * num_right + (False,) * (4 - num_right)
        choices = list(combinations(responses, K))
        expected = sum(map(any, choices)) / len(choices)
        for order in permutations(responses):
            assert pass_at_2(order) == pytest.approx(expected), order


def theirs(responses: tuple[bool, ...]) -> float:
    return float(any(responses[:K]))


def ours(responses: tuple[bool, ...]) -> float:
    return pass_at_k_metrics([np.array(responses)])[f"eval/pass_at_{K}_unbiased"]


def test_first_k_responses_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_all_choices_of_responses_count_here() -> None:
    check(ours)
