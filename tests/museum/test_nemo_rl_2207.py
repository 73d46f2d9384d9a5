"""An answer whose scoring failed counts as wrong."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exhibit import Exhibit
from group_fakes import make_group

from open_instruct.algorithms.advantages import group_advantages
from open_instruct.rollouts.result_scoring import ResultScoring
from open_instruct.scored_groups import ScoredGroup, UnscoredGroup
from open_instruct.verifiers.scoring_processes import Scored

EXHIBIT = Exhibit(
    reports=("NVIDIA-NeMo/RL #2207", "NVIDIA-NeMo/RL #431"),
    subject="rewards",
    happened="Environments caught the errors of their verifiers and gave the reward 0, and nothing behind them could tell "
    "a wrong answer from one that nobody had scored: such answers entered the baseline and the loss.",
    here="A response without a score has the score None. It is left out of its group's baseline and of the loss, and "
    "counted in `objective/not_scored` (`rollouts/result_scoring.py`).",
)
FAILED = Scored(None, "error: ValueError: no")
Scores = list[Scored]


def check(advantages: Callable[[Scores], list[float]]) -> None:
    """Of four responses one could not be scored: the others are compared as if there had been three."""
    scores = [Scored(1.0), Scored(1.0), Scored(0.0), FAILED]
    assert advantages(scores) == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def theirs(scores: Scores) -> list[float]:
    rewards = np.array([scored.score or 0.0 for scored in scores])
    return (rewards - rewards.mean()).tolist()


def ours(scores: Scores) -> list[float]:
    result = make_group([0.0] * len(scores)).result
    workflow = SimpleNamespace(rewards=lambda samples, scores: scores)
    scoring = ResultScoring(SimpleNamespace(), workflow, SimpleNamespace(all_special_tokens=[]), SimpleNamespace())  # type: ignore[arg-type]
    dataset: Any = SimpleNamespace(dataset_of=lambda _: "gsm8k")
    scoring._rows_of = lambda _: dataset  # type: ignore[method-assign]
    group = scoring.scored_group(result, [scores], 0.0)
    assert isinstance(group, ScoredGroup)
    assert (group.num_not_scored, group.num_failures) == (1, 1)
    assert isinstance(scoring.scored_group(result, [[FAILED] * 3 + [Scored(1.0)]], 0.0), UnscoredGroup)
    return group_advantages(group.rewards(1.0), "centered").tolist()


def test_failure_that_counts_as_wrong_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_responses_without_a_score_are_left_out_here() -> None:
    check(ours)
