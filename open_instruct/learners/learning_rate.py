"""The learning rate: its schedule, and how a resumed run goes on with the options that it was started with."""

from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.optimizer_step import torch_optimizer


def make_schedule(args: GRPOConfig, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule of `--lr_scheduler_type` over all optimizer steps of the run, with its warm-up."""
    from transformers import get_scheduler

    num_updates = args.num_training_steps * args.num_epochs * args.num_mini_batches
    name = args.lr_scheduler_type
    return get_scheduler(
        "constant_with_warmup" if name == "constant" else name,  # plain "constant" skips the warm-up
        optimizer=optimizer,
        num_warmup_steps=int(args.warmup_ratio * num_updates),
        num_training_steps=num_updates,
    )


def take_rates(engine: Any, args: GRPOConfig) -> None:
    """Go on with the learning rate, weight decay and gradient limit of `args`, at the current step of the schedule.

    Call it after a checkpoint was loaded, because loading sets the values of the run that wrote the checkpoint, with a learning
    rate of 0 if that run was complete.
    """
    schedule = engine.lr_scheduler
    rates = [args.learning_rate * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    for group, rate in zip(torch_optimizer(engine).param_groups, rates, strict=True):
        group |= {"initial_lr": args.learning_rate, "lr": rate, "weight_decay": args.weight_decay}
    schedule.base_lrs, schedule._last_lr = [args.learning_rate] * len(rates), rates
    if hasattr(engine.optimizer, "clip_grad"):  # ZeRO's own; stages 1 and 2 keep it in the checkpoint
        engine.optimizer.clip_grad = args.max_grad_norm
