"""Rewards of responses that did not end, and of long ones."""

import numpy as np
import pytest

from open_instruct.algorithms.reward_shaping import RewardShaping


def test_by_default_rewards_stay_what_they_are() -> None:
    shaping = RewardShaping(max_length=10)
    assert not shaping.is_on
    np.testing.assert_array_equal(shaping.apply(np.array([1, 0]), np.array([10, 3]), np.array([False, True])), [1, 0])


def test_a_response_that_did_not_end_gets_the_value_in_place_of_its_reward() -> None:
    shaping = RewardShaping(non_stop_reward=-2.0, max_length=10)
    rewards = shaping.apply(np.array([10.0, 10.0, 0.0]), np.array([10, 4, 10]), np.array([False, True, False]))
    np.testing.assert_array_equal(rewards, [-2, 10, -2])


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_the_soft_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    """The formula of DAPO, eq. 13: 0 up to L_max - L_cache, then linear, -1 from L_max on."""
    shaping = RewardShaping(max_length=100, overlong_buffer=20, overlong_penalty=3.0)
    [reward] = shaping.apply(np.array([1.0]), np.array([length]), np.array([True]))
    assert reward == pytest.approx(1 - 3 * penalty)


def test_both_at_once() -> None:
    shaping = RewardShaping(non_stop_reward=0.0, max_length=100, overlong_buffer=50, overlong_penalty=1.0)
    rewards = shaping.apply(np.array([10.0, 10.0]), np.array([100, 75]), np.array([False, True]))
    np.testing.assert_allclose(rewards, [-1.0, 9.5])
