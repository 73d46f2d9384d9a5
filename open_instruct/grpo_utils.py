"""The GRPO objective and the mismatch between engine and learner, as pure functions of tensors.

Everything comes out as sums over trained tokens: sums of micro-batches and ranks add up, and whoever adds them up
divides by the number of tokens once. Shapes: B rows, T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence

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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss plus `beta` times the KL to the reference policy, summed over trained tokens.

    Args:
        new_logprobs, old_logprobs, advantages: (B, T); only `new_logprobs` gets a gradient.
        ref_logprobs: (B, T), or None to leave the KL out.
        mask: (B, T) bool, True on trained tokens. Elsewhere the inputs may hold anything, inf and NaN too.
        loss_fn: a key of `LOSS_FNS`.
        kl_estimator: which of the four of `estimate_kl` enters the loss.

    Returns:
        The scalar loss, and by metric name the detached float32 sums to divide by the token count for a mean: the parts
        of the loss (`loss/kl_avg` includes `beta`), `policy/clipfrac_avg`, `val/ratio`, and with a reference the four
        estimates `objective/kl0_avg` to `kl3_avg`.
    """
    # Before exp, not after: the gradient of exp(inf) * 0 is NaN.
    new_logprobs, old_logprobs, advantages = (
        torch.where(mask, x, 0) for x in (new_logprobs, old_logprobs.detach(), advantages)
    )
    policy_loss, clipped, ratio = LOSS_FNS[loss_fn](
        new_logprobs, old_logprobs, advantages, clip_lower=clip_lower, clip_higher=clip_higher
    )
    per_token = {"policy/clipfrac_avg": clipped, "val/ratio": ratio}
    kl_loss = torch.zeros_like(policy_loss)
    if ref_logprobs is not None:
        kls = estimate_kl(new_logprobs - torch.where(mask, ref_logprobs.detach(), 0), ratio)
        kl_loss = beta * kls[kl_estimator]
        per_token |= {f"objective/kl{i}_avg": kl for i, kl in enumerate(kls)}
    total_loss = policy_loss + kl_loss
    per_token |= {"loss/policy_avg": policy_loss, "loss/kl_avg": kl_loss, "loss/total_avg": total_loss}
    sums = {name: (values.detach() * mask).sum(dtype=torch.float32) for name, values in per_token.items()}
    return (total_loss * mask).sum(), sums


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
