"""The learning rate over the steps of a run."""

from typing import get_args, get_type_hints

import pytest
import torch
from conftest import make_args

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.models import _make_scheduler

NAMES = get_args(get_type_hints(GRPOConfig)["lr_scheduler_type"])


def rates(name: str, *, warmup_ratio: float = 0.2, num_steps: int = 10) -> list[float]:
    """The learning rate of each step, where 1 is the peak."""
    args = make_args(
        lr_scheduler_type=name,
        warmup_ratio=warmup_ratio,
        total_episodes=num_steps * 4,
        num_unique_prompts_rollout=2,
        num_samples_per_prompt_rollout=2,
        num_mini_batches=1,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = _make_scheduler(args, optimizer)
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_warms_up(name: str) -> None:
    assert rates(name)[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert rates(name, warmup_ratio=0.0)[0] == 1.0


CASES = [
    ("linear", 5 / 8, 1 / 8),
    ("constant", 1.0, 1.0),
    ("constant_with_warmup", 1.0, 1.0),
    ("cosine", 0.691342, 0.038060),
    ("cosine_with_restarts", 0.691342, 0.038060),
    ("polynomial", 5 / 8, 1 / 8),
    ("inverse_sqrt", (2 / 5) ** 0.5, (2 / 9) ** 0.5),
]


@pytest.mark.parametrize(("name", "at_5", "at_9"), CASES)
def test_schedules(name: str, at_5: float, at_9: float) -> None:
    found = rates(name)
    assert (found[5], found[9]) == pytest.approx((at_5, at_9), abs=1e-5)


def test_each_schedule_is_tested() -> None:
    assert {name for name, _, _ in CASES} == set(NAMES)
