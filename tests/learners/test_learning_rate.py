"""The learning rate over the steps of a run."""

from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from conftest import make_args

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.learning_rate import make_schedule, set_rate, take_rates

NAMES = get_args(get_type_hints(GRPOConfig)["lr_scheduler_type"])


def args_of_run(num_steps: int, **options: Any) -> GRPOConfig:
    """Options of a run with one update a step."""
    of_step = {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2, "num_mini_batches": 1}
    return make_args(total_episodes=num_steps * 4, **{**of_step, **options})


def rates(name: str, *, warmup_ratio: float = 0.2, num_steps: int = 10) -> list[float]:
    """The learning rate of each step, where 1 is the peak."""
    args = args_of_run(num_steps, lr_scheduler_type=name, warmup_ratio=warmup_ratio)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(args, optimizer)
    found = []
    for _ in range(num_steps):
        found.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_warms_up_and_its_first_step_changes_the_weights(name: str) -> None:
    assert rates(name, warmup_ratio=0.4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates(name, warmup_ratio=0.1)[:2] == pytest.approx([1.0, 1.0])
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
    take_rates(resumed, args, training_step=10)
    assert resumed.lr_scheduler.get_last_lr() == [resumed.optimizer.param_groups[0]["lr"]]
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert train(resumed, 10) == train(start(20, 1e-5, 0.5)[0], 20)[10:]


def test_a_resumed_run_clips_at_the_limit_of_its_options() -> None:
    """At stage 2 DeepSpeed's optimizer brings the limit of the run that wrote the checkpoint."""
    args = args_of_run(10, max_grad_norm=0.1)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    zero = SimpleNamespace(optimizer=optimizer, clip_grad=1.0)
    take_rates(SimpleNamespace(optimizer=zero, lr_scheduler=make_schedule(args, optimizer)), args, training_step=5)
    assert zero.clip_grad == 0.1


HALF_WAY = {
    "linear": 0.5,
    "constant": 1.0,
    "constant_with_warmup": 1.0,
    "cosine": 0.5,
    "cosine_with_restarts": 0.5,
    "polynomial": 0.5,
}
"""The share of the peak after half of the training steps, by the definition of each schedule."""


def engine_of_run(name: str, **options: Any) -> tuple[Any, GRPOConfig]:
    """A played engine of a run of 100 training steps."""
    args = args_of_run(100, learning_rate=1.0, lr_scheduler_type=name, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=make_schedule(args, optimizer)), args


@pytest.mark.parametrize("name", HALF_WAY)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_mini_batches": 1}, {"num_mini_batches": 4}),
        ({"num_mini_batches": 4}, {"num_mini_batches": 1}),
        ({"num_epochs": 1}, {"num_epochs": 3}),
        ({"num_epochs": 3}, {"num_mini_batches": 2}),
    ],
)
def test_a_resume_with_another_number_of_updates_a_step_goes_on_half_way(
    name: str, before: dict[str, int], after: dict[str, int]
) -> None:
    """Stopped after 50 of 100 training steps."""
    stopped, args = engine_of_run(name, **before)
    for _ in range(50 * args.num_epochs * args.num_mini_batches):
        stopped.optimizer.step()
        stopped.lr_scheduler.step()
    assert stopped.optimizer.param_groups[0]["lr"] == pytest.approx(HALF_WAY[name], abs=1e-6)
    resumed, args = engine_of_run(name, **after)
    resumed.lr_scheduler.load_state_dict(stopped.lr_scheduler.state_dict())
    take_rates(resumed, args, training_step=50)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(HALF_WAY[name], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_depends_only_on_the_number_of_its_optimizer_step(name: str) -> None:
    """Steps that are left out, for instance because a gradient is not finite, move no later rate."""
    engine, args = engine_of_run(name, warmup_ratio=0.1)
    expected = rates(name, warmup_ratio=0.1, num_steps=100)
    for number in (0, 3, 9, 10, 57, 99):
        set_rate(engine, args, number)
        assert engine.optimizer.param_groups[0]["lr"] == engine.lr_scheduler.get_last_lr()[0] == expected[number]
