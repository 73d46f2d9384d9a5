"""The advantage `maxrl`: rare successes weigh more."""

import numpy as np

from open_instruct.algorithms.advantages.base import ADVANTAGES
from open_instruct.registry import NoOptions


@ADVANTAGES.register("maxrl")
def maxrl(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """`(reward - mean) / mean` (MaxRL, arXiv:2602.02710), whose expected gradient comes closer to that of the log-likelihood of a
    right answer the larger the group is. Rewards 1, 0, 0, 0 give 3, -1, -1, -1. Without any reward it is 0.

    Raises:
        ValueError: a reward is negative, which has no meaning here.
    """
    del options
    if rewards_G.min() < 0:
        raise ValueError(f"the advantage 'maxrl' takes no negative reward, and there is {rewards_G.min():.6g}")
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else np.zeros_like(rewards_G)
