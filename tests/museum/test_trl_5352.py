"""The logged reward leaves the weights of the reward functions out."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from exhibit import Exhibit
from group_fakes import make_group

from open_instruct.rollouts.batch_metrics import response_metrics
from open_instruct.scored_groups import ScorePart
from open_instruct.verifiers.row_verifiers import combined
from open_instruct.verifiers.scoring_processes import Scored

EXHIBIT = Exhibit(
    reports=("huggingface/trl #5352",),
    subject="evaluation and metrics",
    happened="Advantages were made from the weighted sum of several reward functions, and the logged reward was their "
    "plain sum: the curve was not that of what the run maximised.",
    here="`scores` is the mean of the very rewards that advantages are made from, and each verifier's part is logged "
    "with its weight (`rollouts/batch_metrics.py`).",
)
WEIGHTS = (0.7, 0.3)
PARTS = ([1.0, 1.0], [0.0, 1.0])
"""Scores of two verifiers for two responses."""


def check(logged: Callable[[], float]) -> None:
    rewards = [0.7 * 1 + 0.3 * 0, 0.7 * 1 + 0.3 * 1]
    assert logged() == pytest.approx(sum(rewards) / 2)


def theirs() -> float:
    return float(np.sum(PARTS, axis=0).mean())


def ours() -> float:
    scored = combined([[Scored(score) for score in scores] for scores in PARTS], WEIGHTS)
    columns = zip(("right", "short"), WEIGHTS, PARTS, strict=True)
    parts = tuple(ScorePart(name, weight, np.array(scores, np.float32)) for name, weight, scores in columns)
    group = make_group([one.score or 0.0 for one in scored])
    metrics = response_metrics([replace(group, reward_weight=sum(WEIGHTS), parts=parts)], verification_reward=1.0)
    assert metrics["objective/short_reward"] == pytest.approx(0.3 * 0.5)
    return metrics["scores"]


def test_reward_without_weights_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_logged_reward_is_that_of_the_advantages_here() -> None:
    check(ours)
