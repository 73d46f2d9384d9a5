"""The loss is 0, and nobody can tell whether the run learns."""

from collections.abc import Callable, Sequence

import pytest
from exhibit import Exhibit
from group_fakes import make_group, samples_of

from open_instruct.report.live_line import Progress
from open_instruct.scored_groups import ScoredGroup

EXHIBIT = Exhibit(
    reports=("huggingface/trl #3452", "huggingface/trl #2703", "unslothai/unsloth #2291"),
    subject="evaluation and metrics",
    happened="The value of the loss is 0 at every on-policy step, because advantages are centered, and users took that for"
    " a broken run; others had groups without any signal, whose loss is 0 too, and could not tell the two apart.",
    here="The line of a run shows the reward and no loss. A group that cannot teach anything is told by its rewards, "
    "never by its loss: it is left out, counted, and replaced (`report/live_line.py`, "
    "`rollouts/step_assembly.py`).",
)
LEARNS, DOES_NOT = make_group([1.0, 0.0, 0.0, 1.0]), make_group([0.0, 0.0, 0.0, 0.0])


def check(teaches: Callable[[ScoredGroup], bool]) -> None:
    for group in (LEARNS, DOES_NOT):
        assert loss_of(group) == pytest.approx(0.0)
    assert teaches(LEARNS)
    assert not teaches(DOES_NOT)


def loss_of(group: ScoredGroup) -> float:
    """At a ratio of 1, over all tokens."""
    samples: Sequence = samples_of(group)
    return sum(-sample.advantage * sample.num_trained for sample in samples)


def theirs(group: ScoredGroup) -> bool:
    return abs(loss_of(group)) > 1e-6


def ours(group: ScoredGroup) -> bool:
    return not group.has_zero_std


def test_loss_as_a_sign_of_learning_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_groups_that_teach_nothing_are_told_by_their_rewards_here() -> None:
    check(ours)


def test_live_line_shows_the_reward_here() -> None:
    line = str(Progress(step=3, reward=0.25, tokens_per_second=1.0, prompt_queue=0, result_queue=0, age=0.0))
    assert "reward 0.250" in line
    assert "loss" not in line
