"""Rewards of responses that did not end, of long ones, and of a form."""

import time
from typing import Any

import numpy as np
import pytest

from open_instruct.algorithms.reward_shaping import RewardShaping, is_well_formed


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


WELL_FORMED = np.array([True, False, True])


def shaped(rewards: list[float], **options: Any) -> list[float]:
    shaping = RewardShaping(**options)
    assert shaping.is_on
    return shaping.apply(np.array(rewards), np.full(3, 5), np.array([True, True, False]), WELL_FORMED).tolist()


def test_a_reward_may_need_the_form() -> None:
    assert shaped([10.0, 10.0, 0.0], form="needed") == [10.0, 0.0, 0.0]


def test_the_form_may_be_rewarded_beside() -> None:
    assert shaped([10.0, 10.0, 0.0], form="rewarded", form_reward=2.0) == [12.0, 10.0, 2.0]


def test_without_the_verifiers_reward_the_form_alone_counts() -> None:
    assert shaped([10.0, 10.0, 0.0], counts_score=False, form="needed", form_reward=2.0) == [2.0, 0.0, 2.0]
    assert shaped([10.0, 10.0, 0.0], counts_score=False) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("counts_score", [True, False])
@pytest.mark.parametrize("form", ["ignored", "needed", "rewarded"])
@pytest.mark.parametrize("form_reward", [5.0, -5.0])
def test_the_highest_reward_is_that_of_the_best_response(counts_score: bool, form: Any, form_reward: float) -> None:
    shaping = RewardShaping(counts_score=counts_score, form=form, form_reward=form_reward)
    rewards = shaping.apply(np.full(2, 10.0), np.full(2, 5), np.array([True, True]), np.array([True, False]))
    assert shaping.highest(10.0) == rewards.max()


@pytest.mark.parametrize("options", [{"counts_score": False}, {"form": "needed"}])
def test_what_the_environment_gave_counts_whatever_becomes_of_the_score(options: dict[str, Any]) -> None:
    environment, stopped = np.array([0.5, 0.25]), np.array([True, False])
    formless = np.zeros(2, bool)
    for non_stop_reward, expected in ((None, [0.5, 0.25]), (-1.0, [0.5, -1.0])):
        shaping = RewardShaping(**options, non_stop_reward=non_stop_reward)
        rewards = shaping.apply(np.full(2, 10.0), np.full(2, 5), stopped, formless, environment_G=environment)
        assert rewards.tolist() == expected


@pytest.mark.parametrize(("form", "expected"), [("needed", [10.0, 0.0, 10.0]), ("rewarded", [15.0, 10.0, 10.0])])
def test_form_is_that_of_answers_alone(form: Any, expected: list[float]) -> None:
    """The last response is a summary, which no verifier scores."""
    well_formed, judged = np.array([True, False, False]), np.array([True, True, False])
    shaping = RewardShaping(form=form, form_reward=5.0)
    rewards = shaping.apply(np.full(3, 10.0), np.full(3, 5), np.full(3, True), well_formed, judged)
    assert rewards.tolist() == expected


def test_a_response_that_did_not_end_has_the_value_whatever_its_form() -> None:
    assert shaped([10.0, 10.0, 10.0], form="rewarded", form_reward=2.0, non_stop_reward=-1.0) == [12.0, 10.0, -1.0]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("<think>so</think> <answer>4</answer>", True),
        ("so</think>\n\n<answer>4\n</answer> and more", True),
        ("so</think><answer></answer>", True),
        ("so</think> it is <answer>4</answer>", False),
        ("so <answer>4</answer>", False),
        ("so</think> <answer>4", False),
        ("", False),
    ],
)
def test_the_form_of_deepseek_r1_zero(text: str, is_good: bool) -> None:
    assert is_well_formed(text) == is_good


def test_looking_for_the_form_takes_linear_time() -> None:
    started = time.monotonic()
    for text in ("</think>" * 20_000, "</think> <answer>" * 10_000, "<answer>" * 50_000, "</think>" + " " * 200_000):
        is_well_formed(text)
    assert time.monotonic() - started < 5
