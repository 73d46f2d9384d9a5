"""The learning rate after a resume is that of another step."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from conftest import make_args
from exhibit import Exhibit

from open_instruct.learners.learning_rate import make_schedule, take_rates

EXHIBIT = Exhibit(
    reports=("THUDM/slime #1761", "THUDM/slime #1546"),
    subject="prompts and resuming",
    happened="After a resume the schedule was moved on by the number of rollouts, although a rollout may have several "
    "optimizer steps, and it was moved on twice, once by the checkpoint and once by the trainer.",
    here="The rate is a function of the options and of the number of optimizer steps before this one, which is counted"
    " from the training step; what the checkpoint says of the schedule is overwritten "
    "(`learners/learning_rate.py`).",
)
NUM_STEPS, PER_STEP, RATE = 10, 4, 1e-6
Resumed = Callable[[int], float]
"""The learning rate of the first optimizer step after so many training steps."""


def check(resumed: Resumed) -> None:
    for training_step in (0, 3, 9):
        assert resumed(training_step) == pytest.approx(RATE * (1 - training_step / NUM_STEPS)), training_step


def theirs_by_rollouts(training_step: int) -> float:
    return RATE * (1 - training_step / (NUM_STEPS * PER_STEP))


def theirs_twice(training_step: int) -> float:
    in_checkpoint = training_step * PER_STEP
    return RATE * max(0.0, 1 - (in_checkpoint + training_step * PER_STEP) / (NUM_STEPS * PER_STEP))


def ours(training_step: int) -> float:
    args = make_args(
        total_episodes=NUM_STEPS * 16,
        num_unique_prompts_rollout=4,
        num_samples_per_prompt_rollout=4,
        num_mini_batches=PER_STEP,
        lr_scheduler_type="linear",
        warmup_ratio=0.0,
        learning_rate=RATE,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = make_schedule(args, optimizer)
    schedule.last_epoch = 17  # what a checkpoint may say
    engine = SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule)
    take_rates(engine, args, training_step=training_step)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("theirs", [theirs_by_rollouts, theirs_twice])
def test_schedule_that_is_moved_on_is_caught(theirs: Resumed) -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_rate_is_that_of_the_training_step_here() -> None:
    check(ours)
