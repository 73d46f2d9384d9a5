"""The learning rate over the steps of a run."""

from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from conftest import make_args

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.learning_rate import make_schedule, take_rates

NAMES = get_args(get_type_hints(GRPOConfig)["lr_scheduler_type"])


def args_of_run(num_steps: int, **options: Any) -> GRPOConfig:
    """Options of a run with one update a step."""
    of_step = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2, "num_mini_batches": 1}
    return make_args(total_episodes=num_steps * 4, **of_step, **options)


def rates(name: str, *, warmup_ratio: float = 0.2, num_steps: int = 10) -> list[float]:
    """The learning rate of each step, where 1 is the peak."""
    args = args_of_run(num_steps, lr_scheduler_type=name, warmup_ratio=warmup_ratio)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(args, optimizer)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_with_the_rate_of_its_options(name: str) -> None:
    """The first was complete after 10 steps; the second is longer, with another rate and weight decay."""

    def start(num_steps: int, rate: float, weight_decay: float) -> tuple[Any, GRPOConfig]:
        args = args_of_run(
            num_steps, lr_scheduler_type=name, warmup_ratio=0.0, learning_rate=rate, weight_decay=weight_decay
        )
        weights = [torch.nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=weight_decay)
        return SimpleNamespace(optimizer=optimizer, lr_scheduler=make_schedule(args, optimizer)), args

    def train(engine: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            found.append(engine.optimizer.param_groups[0]["lr"])
            engine.optimizer.step()
            engine.lr_scheduler.step()
        return found

    saved, _ = start(10, 1e-3, 0.0)
    train(saved, 10)
    resumed, args = start(20, 1e-5, 0.5)
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    resumed.lr_scheduler.load_state_dict(saved.lr_scheduler.state_dict())
    take_rates(resumed, args)
    assert resumed.lr_scheduler.get_last_lr() == [resumed.optimizer.param_groups[0]["lr"]]
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert train(resumed, 10) == train(start(20, 1e-5, 0.5)[0], 20)[10:]


def test_a_resumed_run_clips_at_the_limit_of_its_options() -> None:
    """At stage 2 DeepSpeed's optimizer brings the limit of the run that wrote the checkpoint."""
    args = args_of_run(10, max_grad_norm=0.1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    zero = SimpleNamespace(optimizer=optimizer, clip_grad=1.0)
    take_rates(SimpleNamespace(optimizer=zero, lr_scheduler=make_schedule(args, optimizer)), args)
    assert zero.clip_grad == 0.1
