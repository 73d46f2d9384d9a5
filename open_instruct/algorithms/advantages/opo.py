"""The advantage `opo`: the baseline of least variance."""

import numpy as np

from open_instruct.algorithms.advantages.base import ADVANTAGES
from open_instruct.registry import NoOptions


@ADVANTAGES.register("opo")
def opo(rewards_G: np.ndarray, options: NoOptions, *, lengths_G: np.ndarray) -> np.ndarray:
    """Reward minus the group's length-weighted mean reward (OPO, arXiv:2505.23585). This baseline minimises the variance of the
    gradient, if the squared norm of a response's gradient grows with its length. Rewards 1, 0 with 30 and 10 tokens give 0.25,
    -0.75. If all responses are empty, the advantages are 0."""
    del options
    num_tokens = lengths_G.sum()
    return rewards_G - (rewards_G * lengths_G).sum() / num_tokens if num_tokens else np.zeros_like(rewards_G)
