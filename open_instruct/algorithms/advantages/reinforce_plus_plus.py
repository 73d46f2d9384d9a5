"""REINFORCE++ (arXiv:2501.03262): advantages that are normalised over all tokens of a training step."""

import numpy as np

from open_instruct.algorithms.advantages.base import ADVANTAGES
from open_instruct.algorithms.advantages.centered import centered
from open_instruct.registry import NoOptions


def whiten_over_tokens(advantages_N: np.ndarray, num_tokens_N: np.ndarray) -> np.ndarray:
    """(N,) float64: advantages minus their mean, divided by their standard deviation. Both are taken over the trained tokens of a
    step: response n has `num_tokens_N[n]` tokens with the advantage `advantages_N[n]`. The variance is the sample variance; 1e-8
    is added to it."""
    total = num_tokens_N.sum()
    centered_N = advantages_N - (advantages_N * num_tokens_N).sum() / total
    variance = (centered_N**2 * num_tokens_N).sum() / max(total - 1, 1)
    return centered_N / np.sqrt(variance + 1e-8)


@ADVANTAGES.register("reinforce_plus_plus", over_step=whiten_over_tokens, needs_group=False)
def reinforce_plus_plus(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """The reward, normalised over the step (`whiten_over_tokens`). It compares no responses within a group. So groups with equal
    rewards are not left out, and one response per prompt is enough."""
    del options
    return rewards_G


@ADVANTAGES.register("reinforce_plus_plus_baseline", over_step=whiten_over_tokens)
def reinforce_plus_plus_baseline(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """`centered`, normalised over the step (`whiten_over_tokens`)."""
    return centered(rewards_G, options)
