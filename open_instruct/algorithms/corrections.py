"""Corrections for tokens that were not sampled by the policy before the step, but by another policy (`--use_rho_correction`)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from open_instruct.algorithms.sequences import number_sequences, sequence_means, sequence_sums

MAX_LOG_RHO = 10.0
"""The logarithm of rho is clamped to ± this value before it is exponentiated, as in open-instruct."""
MAX_SEQUENCE_LOG_RHO = 20.0
"""The same for the product over a sequence, as in verl."""


@dataclass(frozen=True)
class RhoOptions:
    """Bounds of the off-policy correction. An upper bound of 0 means no bound, and so does a lower mask bound of 0."""

    clamp_lower: float = 0.0
    clamp_upper: float = 2.0
    mask_lower: float = 0.0
    mask_upper: float = 0.0
    level: Literal["token", "sequence", "geometric"] = "token"
    """What rho is: the ratio of each token; the product of the ratios of a sequence, which is the exact importance weight of the
    sequence; or their geometric mean."""
    sequence_level: bool = False
    """Mask whole sequences, by the geometric mean of rho over the sequence. The other tokens are weighted as `level` says."""
    tv_divergence: bool = False
    """Mask a sequence whose mean |rho - 1| / 2 is above `mask_upper`."""
    as_in_open_instruct: bool = False
    """`sequence_level` and `tv_divergence` as open-instruct defines them: the sequence is a whole row, even where the row is
    packed; with `sequence_level` its geometric mean is also the weight; with `tv_divergence` the bounds apply to the mean of
    |rho - 1|, and only those tokens are masked that the advantage would push further away."""


def compute_rho_correction(
    old_logprobs: torch.Tensor,
    vllm_logprobs: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    options: RhoOptions,
    advantages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weights of tokens that another policy sampled: rho = old policy / engine, truncated, with outliers masked.

    In the decoupled objective (AReaL, arXiv:2505.24298) the old policy is the newest policy before the step and bounds the ratio,
    while rho corrects for the policy of the engine, which has older weights or other kernels. Truncation follows TIS (IMPALA,
    arXiv:1802.01561), masking follows IcePop. Example: log-probs -1 (old) and -2 (engine) give rho = e = 2.72, truncated to 2.

    Args:
        old_logprobs, vllm_logprobs: (B, T), without a gradient.
        mask: (B, T) bool, True on trained tokens. Elsewhere the inputs may hold anything.
        position_ids: (B, T) positions of the log-probs' tokens. Where they do not increase, another sequence begins.
        advantages: (B, T), needed for the mask by total variation as open-instruct defines it.

    Returns:
        (B, T) float weights, 0 on masked tokens; and by metric name the float32 sums over trained tokens: the weights, and how
        many tokens were truncated, masked, masked for a low and for a high rho. A NaN on a trained token stays NaN.
    """
    log_rho = torch.where(mask, old_logprobs.detach() - vllm_logprobs, 0)
    sequences = _rows(position_ids) if options.as_in_open_instruct else number_sequences(position_ids)
    rho = _rho(log_rho, mask, sequences, options)
    too_low, too_high = _masked(rho, log_rho.clamp(-MAX_LOG_RHO, MAX_LOG_RHO), mask, sequences, options, advantages)
    clamped_rho = rho.clamp(options.clamp_lower, options.clamp_upper or math.inf)
    weights = torch.where(mask & ~too_low & ~too_high, clamped_rho, 0)
    per_token = {
        "val/rho_weight": weights,
        "val/rho_clipfrac": clamped_rho != rho,
        "val/rho_drop_frac": too_low | too_high,
        "val/rho_drop_low_frac": too_low,
        "val/rho_drop_high_frac": too_high,
    }
    return weights, {name: (values * mask).sum(dtype=torch.float32) for name, values in per_token.items()}


def _rho(log_rho: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor, options: RhoOptions) -> torch.Tensor:
    """(B, T): at each token its own rho, or the rho of its sequence."""
    if options.level == "sequence":
        return sequence_sums(log_rho, sequences).clamp(-MAX_SEQUENCE_LOG_RHO, MAX_SEQUENCE_LOG_RHO).exp()
    log_rho = log_rho.clamp(-MAX_LOG_RHO, MAX_LOG_RHO)
    if options.level == "geometric" or (options.sequence_level and options.as_in_open_instruct):
        log_rho = sequence_means(log_rho, mask, sequences)
    return log_rho.exp()


def _masked(
    rho: torch.Tensor,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor,
    options: RhoOptions,
    advantages: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two (B, T) bool masks: tokens whose rho (their own or their sequence's) is too low, and tokens whose rho is too high."""
    upper = options.mask_upper or math.inf
    if options.tv_divergence:
        deviation = sequence_means((log_rho.exp() - 1).abs(), mask, sequences)
        if not options.as_in_open_instruct:
            return torch.zeros_like(mask), deviation / 2 > upper
        assert advantages is not None
        widens = log_rho.sign() * advantages > 0
        return widens & (deviation < options.mask_lower), widens & (deviation > upper)
    if options.sequence_level:
        rho = sequence_means(log_rho, mask, sequences).exp()
    return rho < options.mask_lower, rho > upper


def off_policy_sequence_mask(
    new_logprobs: torch.Tensor,
    vllm_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """(B, T) bool: False on tokens with a negative advantage in a sequence whose mean `engine's log-prob - policy's log-prob` is
    above `threshold` (DeepSeek-V3.2, arXiv:2512.02556). The policy would hardly give such a bad response any more, so it teaches
    nothing, but it would change the weights a lot.

    Args:
        new_logprobs, vllm_logprobs, advantages: (B, T). Outside the mask they may hold anything.
        threshold: in nats per token.
    """
    difference = torch.where(mask, vllm_logprobs - new_logprobs.detach(), 0)
    divergence = sequence_means(difference, mask, number_sequences(position_ids))
    return (advantages >= 0) | (divergence <= threshold)


def _rows(position_ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(position_ids), device=position_ids.device)[:, None].expand_as(position_ids)
