"""Corrections for tokens that were sampled by another policy than the policy before the step (`--use_rho_correction`)."""

import math
from dataclasses import dataclass

import torch

from open_instruct.algorithms.sequences import number_sequences, sequence_means


@dataclass(frozen=True)
class RhoOptions:
    """Bounds of the off-policy correction. An upper bound of 0 means no bound, and so does a lower mask bound of 0."""

    clamp_lower: float = 0.0
    clamp_upper: float = 2.0
    mask_lower: float = 0.0
    mask_upper: float = 0.0
    sequence_level: bool = False
    """Mask whole sequences, by the geometric mean of rho over the sequence."""
    tv_divergence: bool = False
    """Mask a sequence whose mean |rho - 1| / 2 is above `mask_upper`."""


def compute_rho_correction(
    old_logprobs: torch.Tensor,
    vllm_logprobs: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    options: RhoOptions,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights of tokens that another policy sampled: rho = old policy / engine, truncated, with outliers masked.

    In the decoupled objective (AReaL, arXiv:2505.24298) the old policy is the newest policy before the step and bounds the ratio,
    while rho corrects for the policy of the engine, which has older weights or other kernels. Truncation is that of TIS (IMPALA,
    arXiv:1802.01561), masking that of IcePop. Example: log-probs -1 (old) and -2 (engine) give rho = e = 2.72, truncated to 2.

    Args:
        old_logprobs, vllm_logprobs: (B, T), without a gradient.
        mask: (B, T) bool, True on trained tokens. Elsewhere the inputs may hold anything.
        position_ids: (B, T) positions of the log-probs' tokens. Where they do not increase, another sequence begins.

    Returns:
        (B, T) float weights, 0 on masked tokens; and by metric name the float32 sums over trained tokens: the weights, and how
        many tokens were truncated, masked, masked for a low and for a high rho. A NaN on a trained token stays NaN.
        (open-instruct averages sequence-level quantities over a packed row; here they are averaged over each sequence in it.)
    """
    log_rho = torch.where(mask, old_logprobs.detach() - vllm_logprobs, 0).clamp(-10, 10)
    rho = log_rho.exp()
    lower = options.mask_lower
    judged = rho
    if options.sequence_level:
        judged = sequence_means(log_rho, mask, number_sequences(position_ids)).exp()
    elif options.tv_divergence:
        lower, judged = 0.0, sequence_means((rho - 1).abs() / 2, mask, number_sequences(position_ids))
    too_low, too_high = judged < lower, judged > (options.mask_upper or math.inf)
    clamped = rho.clamp(options.clamp_lower, options.clamp_upper or math.inf)
    weights = torch.where(mask & ~too_low & ~too_high, clamped, 0)
    per_token = {
        "val/rho_weight": weights,
        "val/rho_clipfrac": clamped != rho,
        "val/rho_drop_frac": too_low | too_high,
        "val/rho_drop_low_frac": too_low,
        "val/rho_drop_high_frac": too_high,
    }
    return weights, {name: (values * mask).sum(dtype=torch.float32) for name, values in per_token.items()}
