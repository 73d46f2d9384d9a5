"""The learning rate: a function of the run's options and of the number of optimizer steps before the current one.

The number is counted from the training step, not from the optimizer steps that were made. So an optimizer step that was left out
moves no later rate, and a resumed run has at each training step the rate that its options give to a run from the start. Example:
100 training steps, linear, resumed after 50: the rate is half the peak, whether a training step has one optimizer step or four.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.optimizer_step import torch_optimizer


def make_schedule(args: GRPOConfig, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of `--lr_scheduler_type` over all optimizer steps of the run, with its warm-up."""
    from transformers import get_scheduler

    num_updates = args.num_training_steps * num_updates_per_step(args)
    num_warmup_updates = int(args.warmup_ratio * num_updates)
    name = args.lr_scheduler_type
    schedule = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,  # plain "constant" skips the warm-up
        optimizer=optimizer,
        num_warmup_steps=num_warmup_updates,
        num_training_steps=num_updates,
    )
    factors = [partial(_factor, factor, num_warmup_updates) for factor in schedule.lr_lambdas]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def _factor(after_warmup: Callable[[int], float], num_warmup_updates: int, number: int) -> float:
    """The share of the peak rate for optimizer step `number`, counted from 0. With a warm-up of 4 steps it begins 0.25, 0.5,
    0.75, 1. Transformers begins 0, 0.25, 0.5, 0.75: its first step changes no weight, and here a step costs a generation."""
    return (number + 1) / num_warmup_updates if number < num_warmup_updates else after_warmup(number)


def num_updates_per_step(args: GRPOConfig) -> int:
    """Optimizer steps of a training step."""
    return args.num_epochs * args.num_mini_batches


def set_rate(engine: Any, args: GRPOConfig, num_updates: int) -> float:
    """Set the learning rate of the optimizer step that comes after `num_updates` optimizer steps of the run. Returns the rate."""
    schedule = engine.lr_scheduler
    schedule.last_epoch = num_updates
    rates = [args.learning_rate * factor(num_updates) for factor in schedule.lr_lambdas]
    for group, rate in zip(torch_optimizer(engine).param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    return rates[0]


def take_rates(engine: Any, args: GRPOConfig, *, training_step: int) -> None:
    """Go on after `training_step` training steps with the learning rate, weight decay and gradient limit of `args`.

    Call it after a checkpoint was loaded, because loading sets the values of the run that wrote the checkpoint, with a learning
    rate of 0 if that run was complete.
    """
    groups = torch_optimizer(engine).param_groups
    for group in groups:
        group |= {"initial_lr": args.learning_rate, "weight_decay": args.weight_decay}
    engine.lr_scheduler.base_lrs = [args.learning_rate] * len(groups)
    set_rate(engine, args, training_step * num_updates_per_step(args))
    if hasattr(engine.optimizer, "clip_grad"):  # ZeRO's own; stages 1 and 2 keep it in the checkpoint
        engine.optimizer.clip_grad = args.max_grad_norm
