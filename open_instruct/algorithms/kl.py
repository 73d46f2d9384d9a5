"""Estimates of the KL divergence from the reference policy (`--kl_estimator`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 40.0
"""Log-prob differences are clamped to this size before they are exponentiated: e^40 still squares in float32."""


def estimate_kl(ref_logprobs_diff: "torch.Tensor", ratio: "torch.Tensor") -> "torch.Tensor":
    """Five estimates per token of KL(policy ‖ reference), from tokens that the policy sampled.

    Args:
        ref_logprobs_diff: (B, T) `d = logprob - ref_logprob`, clamped to ±40.
        ratio: (B, T) policy over the old policy, which sampled the tokens if the run is on-policy.

    Returns:
        (5, B, T): 0 `d` (k1); 1 `d² / 2` (k2); 2 `exp(-d) - 1 + d` (k3), unbiased and never negative; 3 `ratio * d`; 4 `ratio *
        k3`, whose gradient is unbiased too if the old policy sampled (DeepSeek-V3.2, arXiv:2512.02556). The first three are from
        http://joschu.net/blog/kl-approx.html.
    """
    import torch

    d = ref_logprobs_diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(-d) + d
    return torch.stack([d, d.square() / 2, k3, ratio * d, ratio * k3])
