"""Equal rewards that are no whole numbers get advantages."""

from collections.abc import Callable

import numpy as np
import pytest
from exhibit import Exhibit

from open_instruct.algorithms.advantages import group_advantages

EXHIBIT = Exhibit(
    reports=("verl-project/verl #4598",),
    subject="loss and advantages",
    happened="All responses of a group had the same reward, such as 0.1, and yet advantages other than 0: the rounding of "
    "the mean in float32, divided by a standard deviation that was itself nothing but rounding.",
    here="Advantages are computed in float64 (`algorithms/advantages/`), and a group whose rewards differ by rounding "
    "alone counts as one without a signal.",
)
Advantages = Callable[[np.ndarray], np.ndarray]


def check(advantages: Advantages) -> None:
    for reward in (0.1, 0.3, 0.7, 2 / 3, 1e-3):
        for size in range(2, 17):
            assert np.abs(advantages(np.full(size, reward, np.float32))).max() < 1e-6, (reward, size)


def theirs(rewards_G: np.ndarray) -> np.ndarray:
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + np.float32(1e-8))


def ours(rewards_G: np.ndarray) -> np.ndarray:
    return group_advantages(rewards_G, "standard")


def test_rounding_that_is_scaled_up_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_equal_rewards_teach_nothing_here() -> None:
    check(ours)
