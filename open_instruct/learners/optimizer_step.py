"""Makes or skips the optimizer step of a DeepSpeed engine. All code that depends on how DeepSpeed 0.19.8 steps at each stage is
in this module.

If the gradient is not finite, or nothing was trained on, no weight and no moment changes and no weight decay is applied. At
stages 2 and 3 DeepSpeed itself skips a step when the norm is not finite. At stage 0 it would clip by a norm of NaN, and every
weight would become NaN, so the norm is checked before the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def apply_gradient(engine: Any, *, denominator: float | None = None) -> float | None:
    """Clip the gradient and make the optimizer step. All ranks call it together, after the backward pass that ended with a
    boundary.

    Args:
        denominator: the number that the gradient is divided by first; None if the backward pass has already divided.

    Returns:
        The gradient's norm before clipping, or None if it is not finite. With None, the gradient was discarded and nothing else
        has changed. Every rank returns the same value.
    """
    if engine.zero_optimization_stage() == 0:
        return _apply_at_stage_0(engine, denominator)
    if denominator is not None:
        # ZeRO holds the gradients in its own partitions and divides them by the loss scale; `backward` multiplies by this scale.
        engine.optimizer.override_loss_scale(denominator)
    engine.step()
    if denominator is not None:
        engine.optimizer.override_loss_scale(1.0)
    return float(engine.get_global_grad_norm()) if engine.was_step_applied() else None


def discard_gradient(engine: Any) -> None:
    """Discard the gradient, as DeepSpeed does after a step, and change nothing else. All ranks call it together."""
    optimizer = torch_optimizer(engine)
    with _replaced(optimizer, "step", lambda *_args, **_kwargs: None), _replaced(engine, "lr_scheduler", None):
        engine.step()


def torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that was given to DeepSpeed, which wraps it at stages 2 and 3."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _apply_at_stage_0(engine: Any, denominator: float | None) -> float | None:
    grads = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    if denominator is not None:
        for grad in grads:
            grad.div_(denominator)
    norm = float(torch.nn.utils.get_total_norm(grads))
    if not _is_finite_everywhere(norm, grads[0].device):
        discard_gradient(engine)
        return None
    engine.step()
    return norm


def _is_finite_everywhere(norm: float, device: torch.device) -> bool:
    """Whether the norm is finite on every rank. At stage 0 all ranks hold the same gradient. They still ask each other, because a
    rank that stepped by itself would have different weights."""
    is_finite = torch.tensor(norm, device=device).isfinite().to(torch.int32)
    torch.distributed.all_reduce(is_finite, torch.distributed.ReduceOp.MIN)
    return bool(is_finite)


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
