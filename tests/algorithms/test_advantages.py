"""Advantages within a group."""

import numpy as np
import pytest

from open_instruct.algorithms.advantages import ADVANTAGES, group_advantages
from open_instruct.registry import UnknownName


def test_centered_and_standard_advantages() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 2.0])
    centered = group_advantages(rewards, "centered")
    assert centered.dtype == np.float32
    np.testing.assert_array_equal(centered, [-1, 0, 0, 1])
    np.testing.assert_allclose(group_advantages(rewards, "standard"), np.array([-1, 0, 0, 1]) / np.sqrt(0.5), rtol=1e-6)
    for name in ("centered", "standard"):
        np.testing.assert_array_equal(group_advantages(np.full(4, 5.0), name), 0)


@pytest.mark.parametrize(
    "rewards",
    [
        np.array([0.3, np.nextafter(np.float32(0.3), np.float32(1)), 0.3], np.float32),
        np.float32(10) * np.array([0.7, np.nextafter(np.float32(0.7), np.float32(0))], np.float32),
        np.array([0.0, 3e-8, 0.0, -1e-8]),
        np.array([-200.0, -200.00001]),
    ],
)
def test_standard_advantages_of_rewards_that_differ_by_rounding_are_0(rewards: np.ndarray) -> None:
    assert len(set(rewards.tolist())) > 1
    np.testing.assert_array_equal(group_advantages(rewards, "standard"), 0)


@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.5])
def test_standard_advantages_of_rewards_that_differ_little_are_not_0(step: float) -> None:
    np.testing.assert_allclose(group_advantages(np.array([1.0, 1.0 + step]), "standard"), [-1, 1], rtol=5e-3)


def test_advantages_of_an_unknown_name_are_refused() -> None:
    with pytest.raises(UnknownName, match="no advantage called 'zscore'; there are: centered, standard"):
        group_advantages(np.zeros(2), "zscore")


@pytest.mark.parametrize("wrong", [np.zeros(3), np.array([np.nan, 0.0]), np.zeros((2, 1))])
def test_advantages_that_are_no_number_for_each_response_are_refused(
    wrong: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ADVANTAGES, "_entries", dict(ADVANTAGES._entries))
    ADVANTAGES.register("wrong")(lambda rewards, options: wrong)
    with pytest.raises(ValueError, match="must give one finite number for each"):
        group_advantages(np.array([0.0, 1.0]), "wrong")


GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.25], [3.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("rewards", GROUPS)
def test_rloo_compares_with_the_others_alone(rewards: list[float]) -> None:
    rests = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    expected = [
        reward - (sum(rest) / len(rest) if rest else reward) for reward, rest in zip(rewards, rests, strict=True)
    ]
    np.testing.assert_allclose(group_advantages(np.array(rewards), "rloo"), expected, atol=1e-6)


@pytest.mark.parametrize("rewards", GROUPS)
def test_maxrl_divides_by_the_mean(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    expected = [(reward - mean) / mean if mean else 0.0 for reward in rewards]
    np.testing.assert_allclose(group_advantages(np.array(rewards), "maxrl"), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, -1.0], [1.0, -1.0]),
        ([1.0, -3.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([-1.0, -2.0, 0.0], [0.0, 0.0, 0.0]),
    ],
)
def test_maxrl_takes_a_negative_reward_for_a_failure(rewards: list[float], expected: list[float]) -> None:
    """An environment may give one in the middle of a run, and no option says so before."""
    np.testing.assert_allclose(group_advantages(np.array(rewards), "maxrl"), expected)


def test_opo_weighs_its_baseline_by_length() -> None:
    advantages = group_advantages(np.array([1.0, 0.0]), "opo", lengths_G=np.array([30, 10]))
    np.testing.assert_allclose(advantages, [0.25, -0.75])
    np.testing.assert_array_equal(group_advantages(np.array([1.0, 0.0]), "opo", lengths_G=np.zeros(2)), [0, 0])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_whitened_step_has_mean_0_and_variance_1_over_its_tokens(name: str) -> None:
    advantages = np.concatenate([group_advantages(np.array(group), name) for group in GROUPS]).astype(np.float64)
    num_tokens = np.arange(1, len(advantages) + 1)
    whitened = np.repeat(ADVANTAGES[name].facts["over_step"](advantages, num_tokens), num_tokens)
    assert whitened.mean() == pytest.approx(0, abs=1e-9)
    assert whitened.var(ddof=1) == pytest.approx(1, rel=1e-6)


def test_a_step_of_one_token_is_whitened_to_0() -> None:
    over_step = ADVANTAGES["reinforce_plus_plus"].facts["over_step"]
    np.testing.assert_array_equal(over_step(np.array([3.0]), np.array([1])), [0.0])
