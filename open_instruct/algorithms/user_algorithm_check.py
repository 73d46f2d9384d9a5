"""Tries losses and advantages of a user's file on a few numbers, so that most mistakes are reported before a run starts."""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from open_instruct.algorithms.advantages import Advantage, group_advantages
from open_instruct.algorithms.distillation import DistillationLoss, TeacherInputs, distillation_of_tokens
from open_instruct.algorithms.losses import Loss, LossInputs, losses_of_tokens
from open_instruct.registry import Entry

if TYPE_CHECKING:
    import torch

ROWS, TOKENS, TOP_K = 2, 6, 3
"""Sizes of the batch that a loss is tried on. Its first row holds two sequences; two tokens of the second are not trained on."""


def problem_with_loss(entry: Entry[Loss], options: Any, *, has_reference: bool) -> str:
    """What is wrong with a policy loss; "" if nothing is."""
    new_logprobs = _logprobs(0)

    def trial() -> None:
        loss, metrics = losses_of_tokens(entry, _loss_inputs(new_logprobs, has_reference), options)
        _check_numbers(loss, new_logprobs, f"the loss {entry.name!r}")
        for name, values in metrics.items():
            if not values.isfinite().all():
                raise ValueError(f"the metric {name!r} of the loss {entry.name!r} is not finite")

    return _problem(trial, entry.value)


def problem_with_distillation_loss(entry: Entry[DistillationLoss], options: Any) -> str:
    """What is wrong with a loss against a teacher; "" if nothing is."""
    import torch

    new_logprobs = _logprobs(0)
    top = torch.stack([new_logprobs - 0.5 * place for place in range(TOP_K)], -1)
    inputs = TeacherInputs(
        new_top_logprobs=top,
        teacher_top_logprobs=top.detach() - 0.25,
        new_logprobs=new_logprobs,
        teacher_logprobs=_logprobs(1).detach(),
        is_in_top=_mask().roll(1, dims=1),
        tail_weights=torch.ones(ROWS, TOKENS),
        mask=_mask(),
    )

    def trial() -> None:
        loss, _ = distillation_of_tokens(entry, inputs, options)
        _check_numbers(loss, new_logprobs, f"the distillation loss {entry.name!r}")

    return _problem(trial, entry.value)


def problem_with_advantage(entry: Entry[Advantage], options: Any, *, group_size: int, equal_rewards: bool) -> str:
    """What is wrong with an advantage; "" if nothing is. `equal_rewards`: groups in which all rewards are equal occur too."""
    different = np.arange(group_size, dtype=np.float64)

    @np.errstate(all="ignore")  # values that are not finite are reported once
    def trial() -> None:
        for rewards_G in [different, np.ones(group_size)] if equal_rewards else [different]:
            group_advantages(rewards_G, entry.name, options, lengths_G=different + 1)

    return _problem(trial, entry.value)


def _problem(trial: Callable[[], None], function: Callable[..., Any]) -> str:
    try:
        trial()
    except Exception as error:  # whatever a user's function raises
        file = function.__code__.co_filename if hasattr(function, "__code__") else None
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        failure = ": ".join(filter(None, [f"it fails: {type(error).__name__}", str(error)]))
        if lines:
            return f"{failure} ({file}, line {lines[-1]})"
        return str(error) if isinstance(error, ValueError) else failure
    return ""


def _check_numbers(loss: "torch.Tensor", new_logprobs: "torch.Tensor", subject: str) -> None:
    """Raises `ValueError` unless loss and gradient are finite, and there is a gradient."""
    if not loss.isfinite().all():
        raise ValueError(f"{subject} is not finite")
    if not loss.requires_grad:
        raise ValueError(f"{subject} has no gradient. Compute it from inputs.new_logprobs, without detach or no_grad")
    loss.sum().backward()
    if new_logprobs.grad is None or not new_logprobs.grad.isfinite().all():
        raise ValueError(f"the gradient of {subject} is not finite")


def _loss_inputs(new_logprobs: "torch.Tensor", has_reference: bool) -> LossInputs:
    import torch

    mask = _mask()

    def masked(values: "torch.Tensor") -> "torch.Tensor":
        return torch.where(mask, values, 0)

    old_logprobs = _logprobs(1).detach()
    return LossInputs(
        new_logprobs=masked(new_logprobs),
        old_logprobs=masked(old_logprobs),
        behaviour_logprobs=masked(old_logprobs - 0.01),
        ref_logprobs=masked(_logprobs(2).detach()) if has_reference else None,
        advantages=masked(torch.linspace(-1, 1, ROWS * TOKENS).view(ROWS, TOKENS)),
        mask=mask,
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]),
    )


def _mask() -> "torch.Tensor":
    import torch

    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, :2] = False
    return mask


def _logprobs(seed: int) -> "torch.Tensor":
    """(ROWS, TOKENS), all near -1: numbers of one seed differ a little from those of another."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (-1 - 0.1 * torch.rand(ROWS, TOKENS, generator=generator)).requires_grad_()
