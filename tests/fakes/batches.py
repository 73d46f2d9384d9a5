"""Micro-batches for tests of the objective."""

from dataclasses import asdict
from typing import Any

import torch

from open_instruct.algorithms.losses import ClipOptions, dapo_loss
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs

OPTIONS: dict[str, Any] = {"beta": 0.05, "kl_estimator": 2, **asdict(ClipOptions())}
SHAPE = (3, 6)


def make_batch(**replacements: Any) -> dict[str, Any]:
    """Log-probs that differ enough for every clipping case to occur."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64)

    new = normal() - 2
    return {
        "new_logprobs": new.clone().requires_grad_(),
        "old_logprobs": new + 0.4 * normal(),
        "ref_logprobs": new + 0.4 * normal(),
        "advantages": normal(),
        "mask": torch.rand(SHAPE, generator=generator) < 0.7,
        **replacements,
    }


def compute_grpo_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_lower: float,
    clip_higher: float,
    clip_ratio_c: float | None,
    **options: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective with dapo's loss, of rows that hold one sequence each."""
    inputs = make_loss_inputs(
        new_logprobs=new_logprobs,
        old_logprobs=old_logprobs,
        behaviour_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        mask=mask,
        position_ids=torch.arange(mask.shape[1]).expand(mask.shape),
    )
    clip = ClipOptions(clip_lower=clip_lower, clip_higher=clip_higher, clip_ratio_c=clip_ratio_c)
    return compute_objective(inputs, lambda inputs: dapo_loss(inputs, clip), **options)
