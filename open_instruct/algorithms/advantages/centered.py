"""Advantages that compare a reward with the mean of its group: `centered`, `standard` and `rloo`."""

import numpy as np

from open_instruct.algorithms.advantages.base import ADVANTAGES
from open_instruct.registry import NoOptions
from open_instruct.scored_groups import are_alike


@ADVANTAGES.register("centered")
def centered(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """Reward minus the group's mean. Leaves out GRPO's division by the standard deviation, which would favour prompts that are
    nearly solved or nearly hopeless (Dr. GRPO, arXiv:2503.20783). Rewards 1, 0, 0, 0 give 0.75, -0.25, -0.25, -0.25."""
    del options
    return rewards_G - rewards_G.mean()


@ADVANTAGES.register("standard")
def standard(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """`(reward - mean) / (std + 1e-8)`, as in GRPO (arXiv:2402.03300), with the standard deviation of the population of G. If all
    rewards are the same up to rounding, the advantages are 0."""
    if are_alike(rewards_G):
        return np.zeros_like(rewards_G)
    return centered(rewards_G, options) / (rewards_G.std() + 1e-8)


@ADVANTAGES.register("rloo")
def rloo(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """Reward minus the mean reward of the *other* responses (leave-one-out, arXiv:2402.14740): `centered` times G / (G - 1),
    which is unbiased for every G. Rewards 1, 0, 0, 0 give 1, -1/3, -1/3, -1/3; a group of one gives 0."""
    return centered(rewards_G, options) * len(rewards_G) / max(len(rewards_G) - 1, 1)
