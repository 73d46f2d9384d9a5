"""How far the learner's log-probs lie from the engine's, in sums that are merged exactly over micro-batches and ranks."""

import math
from collections.abc import Mapping, Sequence

import torch


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
