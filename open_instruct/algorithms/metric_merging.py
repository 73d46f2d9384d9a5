"""Merges the sums of micro-batches and ranks into metrics, exactly. Does not use torch, because the driver has no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RATIO_SPREAD = "val/ratio_spread"
"""Sum of (ratio - 1)^2, which `finish_ratio_variance` turns into a variance. The sum is taken about 1, because at a small
learning rate a ratio differs from 1 by 1e-4 or less, and a difference of mean squares would lose that in float32."""


def merge_logprob_differences(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Merge the sums of several micro-batches or ranks. The result can be merged again. A NaN anywhere stays NaN."""
    columns = {name: np.array([float(part[name]) for part in parts]) for name in parts[0]}
    return {name: float(column.max() if name == "max" else column.sum()) for name, column in columns.items()}


def finish_logprob_difference(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics over all tokens of all parts; 0 when no token was trained on.

    `debug/vllm_vs_local_logprob_diff_mean|max|std` are over the absolute difference (std of the population).
    `debug/vllm_local_reverse_kl` is the mean of `log vllm - log local`. The engine sampled the tokens, so this mean is an
    unbiased estimate of KL(vllm ‖ local) without a further weight; it may fall a little below 0.
    """
    sums = merge_logprob_differences(parts)
    count = max(sums["count"], 1.0)
    mean = sums["sum"] / count
    return {
        "debug/vllm_vs_local_logprob_diff_mean": mean,
        "debug/vllm_vs_local_logprob_diff_max": sums["max"],
        "debug/vllm_vs_local_logprob_diff_std": math.sqrt(max(sums["sum_of_squares"] / count - mean**2, 0.0)),
        "debug/vllm_local_reverse_kl": sums["signed_sum"] / count,
    }


def finish_ratio_variance(metrics: dict[str, float]) -> dict[str, float]:
    """`val/ratio_var`, the variance over all trained tokens, in place of `RATIO_SPREAD`. Takes the means of a whole step."""
    metrics = dict(metrics)
    spread = metrics.pop(RATIO_SPREAD, None)
    if spread is not None:
        metrics["val/ratio_var"] = max(spread - (metrics["val/ratio"] - 1) ** 2, 0.0)
    return metrics
