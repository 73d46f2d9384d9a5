"""The GRPO objective and the mismatch between engine and learner, as pure functions of tensors.

Everything comes out as sums over trained tokens: sums of micro-batches and ranks add up, and whoever adds them up
divides by the number of tokens once. Shapes: B rows, T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from open_instruct.model_utils import estimate_kl

LossFn = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# ------------------------------------------------------------------------------------------------------- losses


def dapo_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_lower: float,
    clip_higher: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's clipped objective with separate bounds below and above (DAPO, arXiv:2503.14476).

    Args:
        new_logprobs, old_logprobs, advantages: (B, T).
        clip_lower, clip_higher: the ratio earns nothing outside [1 - clip_lower, 1 + clip_higher].

    Returns:
        (B, T) loss; (B, T) bool, True where the clipped term is the larger, so that there is no gradient; (B, T) ratio.
    """
    ratio = torch.exp(new_logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_lower, 1 + clip_higher)
    return torch.maximum(unclipped, clipped), clipped > unclipped, ratio


RATIO_SPREAD = "val/ratio_spread"
"""Sum of (ratio - 1)^2, that `finish_ratio_variance` turns into a variance. About 1, because a ratio strays from it by 1e-4 or
less where the learning rate is small: as a difference of mean squares nothing would be left of that in float32."""
LOSS_FNS: dict[str, LossFn] = {"dapo": dapo_loss}
"""`--loss_fn`: `(new_logprobs, old_logprobs, advantages, *, clip_lower, clip_higher) -> (loss, clipped, ratio)`."""


def compute_grpo_loss(
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_fn: str,
    clip_lower: float,
    clip_higher: float,
    beta: float,
    kl_estimator: int,
    weights: torch.Tensor | None = None,
    loss_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss plus `beta` times the KL to the reference policy, summed over trained tokens.

    Args:
        new_logprobs, old_logprobs, advantages: (B, T); only `new_logprobs` gets a gradient.
        ref_logprobs: (B, T), or None to leave the KL out.
        mask: (B, T) bool, True on trained tokens. Elsewhere the inputs may hold anything, inf and NaN too.
        loss_fn: a key of `LOSS_FNS`.
        kl_estimator: which of the four of `estimate_kl` enters the loss.
        weights: (B, T), of the policy loss alone (see `compute_rho_correction`), without a gradient; None is 1 everywhere.
        loss_weights: (B, T), of both parts of the loss; None is 1 everywhere.

    Returns:
        The scalar loss, and by metric name the detached float32 sums to divide by the token count for a mean: the parts
        of the loss (`loss/kl_avg` includes `beta`), `policy/clipfrac_avg`, `val/ratio` and its spread, and with a reference
        the four estimates `objective/kl0_avg` to `kl3_avg`.
    """
    # Before exp, not after: the gradient of exp(inf) * 0 is NaN.
    new_logprobs, old_logprobs, advantages = (
        torch.where(mask, x, 0) for x in (new_logprobs, old_logprobs.detach(), advantages)
    )
    policy_loss, clipped, ratio = LOSS_FNS[loss_fn](
        new_logprobs, old_logprobs, advantages, clip_lower=clip_lower, clip_higher=clip_higher
    )
    if weights is not None:
        policy_loss = policy_loss * torch.where(mask, weights.detach(), 0)
    per_token = {"policy/clipfrac_avg": clipped, "val/ratio": ratio, RATIO_SPREAD: (ratio - 1).square()}
    kl_loss = torch.zeros_like(policy_loss)
    if ref_logprobs is not None:
        kls = estimate_kl(new_logprobs - torch.where(mask, ref_logprobs.detach(), 0), ratio)
        kl_loss = beta * kls[kl_estimator]
        per_token |= {f"objective/kl{i}_avg": kl for i, kl in enumerate(kls)}
    if loss_weights is not None:
        policy_loss, kl_loss = policy_loss * loss_weights, kl_loss * loss_weights
    total_loss = policy_loss + kl_loss
    per_token |= {"loss/policy_avg": policy_loss, "loss/kl_avg": kl_loss, "loss/total_avg": total_loss}
    sums = {name: (values.detach() * mask).sum(dtype=torch.float32) for name, values in per_token.items()}
    return (total_loss * mask).sum(), sums


# --------------------------------------------------------------------------------------- off-policy correction


@dataclass(frozen=True)
class RhoOptions:
    """Bounds of the off-policy correction; an upper bound of 0, or a lower mask bound of 0, is none."""

    clamp_lower: float = 0.0
    clamp_upper: float = 2.0
    mask_lower: float = 0.0
    mask_upper: float = 0.0
    sequence_level: bool = False
    """Judge a sequence by the geometric mean of its rho."""
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

    In the decoupled objective (AReaL, arXiv:2505.24298) the old policy is the newest before the step and bounds the ratio, while
    rho corrects for the engine's: older weights, other kernels. Truncation is that of TIS (IMPALA, arXiv:1802.01561), masking
    that of IcePop.

    Args:
        old_logprobs, vllm_logprobs: (B, T), without a gradient.
        mask: (B, T) bool, True on trained tokens. Elsewhere the inputs may hold anything.
        position_ids: (B, T) of the tokens that the log-probs speak of. Where it does not increase, another sequence begins.

    Returns:
        (B, T) float weights, 0 on masked tokens; and by metric name the float32 sums over trained tokens: the weights, and how
        many tokens were truncated, masked, masked for a low and for a high rho. A NaN on a trained token stays one.
        (open-instruct averages sequence-level quantities over a packed row; here it is over each sequence in it.)
    """
    log_rho = torch.where(mask, old_logprobs.detach() - vllm_logprobs, 0).clamp(-10, 10)
    rho = log_rho.exp()
    lower = options.mask_lower
    judged = rho
    if options.sequence_level:
        judged = _sequence_means(log_rho, mask, position_ids).exp()
    elif options.tv_divergence:
        lower, judged = 0.0, _sequence_means((rho - 1).abs() / 2, mask, position_ids)
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


def _sequence_means(values: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """(B, T): at each token, the mean of `values` over the trained tokens of its sequence; elsewhere they are 0."""
    begins = torch.ones_like(mask)
    begins[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    sequence = begins.flatten().cumsum(0) - 1  # each row begins one
    sums = torch.zeros_like(values).flatten()  # there are no more sequences than tokens
    counts = torch.zeros_like(sums)
    sums.index_add_(0, sequence, values.flatten())
    counts.index_add_(0, sequence, mask.flatten().to(values.dtype))
    return (sums / counts.clamp(min=1))[sequence].view_as(values)


def finish_ratio_variance(metrics: dict[str, float]) -> dict[str, float]:
    """`val/ratio_var`, the variance over all trained tokens, in place of `RATIO_SPREAD`. Takes the means of a whole step."""
    metrics = dict(metrics)
    spread = metrics.pop(RATIO_SPREAD, None)
    if spread is not None:
        metrics["val/ratio_var"] = max(spread - (metrics["val/ratio"] - 1) ** 2, 0.0)
    return metrics


# ------------------------------------------------------------------------------------ engine against learner


def logprob_difference_sums(
    new_logprobs: torch.Tensor, vllm_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the learner's log-probs lie from the engine's on trained tokens, in a form that can be merged exactly.

    Args:
        new_logprobs, vllm_logprobs, mask: (B, T).

    Returns:
        Float64 scalars: `count` of trained tokens; `sum`, `sum_of_squares` and `max` of |vllm - learner|; `signed_sum`
        of vllm - learner.
    """
    # float64, because the variance comes out as a small difference of large numbers.
    difference = torch.where(mask, vllm_logprobs.double() - new_logprobs.detach().double(), 0)
    absolute = difference.abs()
    return {
        "count": mask.sum(dtype=torch.float64),
        "sum": absolute.sum(),
        "sum_of_squares": absolute.square().sum(),
        "max": absolute.amax(),
        "signed_sum": difference.sum(),
    }


def merge_logprob_differences(parts: Sequence[Mapping[str, torch.Tensor | float]]) -> dict[str, float]:
    """One of several micro-batches or ranks; the result can be merged again. A NaN anywhere stays one."""
    columns = {name: torch.tensor([float(part[name]) for part in parts], dtype=torch.float64) for name in parts[0]}
    return {name: float(column.max() if name == "max" else column.sum()) for name, column in columns.items()}


def finish_logprob_difference(parts: Sequence[Mapping[str, torch.Tensor | float]]) -> dict[str, float]:
    """The metrics over all tokens of all parts; 0 when none was trained on.

    `debug/vllm_vs_local_logprob_diff_mean|max|std` are those of the absolute difference (std of the population).
    `debug/vllm_local_reverse_kl` is the mean of `log vllm - log local`. The engine sampled the tokens, so this is an
    unbiased estimate of KL(vllm ‖ local) as it stands, without a further weight; it may fall a little below 0.
    """
    merged = merge_logprob_differences(parts)
    count = max(merged["count"], 1.0)
    mean = merged["sum"] / count
    return {
        "debug/vllm_vs_local_logprob_diff_mean": mean,
        "debug/vllm_vs_local_logprob_diff_max": merged["max"],
        "debug/vllm_vs_local_logprob_diff_std": math.sqrt(max(merged["sum_of_squares"] / count - mean**2, 0.0)),
        "debug/vllm_local_reverse_kl": merged["signed_sum"] / count,
    }
