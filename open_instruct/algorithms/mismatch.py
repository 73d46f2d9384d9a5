"""Measures how far the learner's log-probs are from the engine's, in sums that `metric_merging.py` merges exactly."""

import torch


def logprob_difference_sums(
    new_logprobs: torch.Tensor, vllm_logprobs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the learner's log-probs are from the engine's on trained tokens, in a form that can be merged exactly.

    Args:
        new_logprobs, vllm_logprobs, mask: (B, T).

    Returns:
        Float64 scalars: `count` of trained tokens; `sum`, `sum_of_squares` and `max` of |vllm - learner|; `signed_sum`
        of vllm - learner.
    """
    # float64, because the variance will be a small difference of large numbers.
    difference = torch.where(mask, vllm_logprobs.double() - new_logprobs.detach().double(), 0)
    absolute = difference.abs()
    return {
        "count": mask.sum(dtype=torch.float64),
        "sum": absolute.sum(),
        "sum_of_squares": absolute.square().sum(),
        "max": absolute.amax(),
        "signed_sum": difference.sum(),
    }
