"""The advantage `maxrl`: rare successes weigh more."""

import numpy as np

from open_instruct.algorithms.advantages.base import ADVANTAGES
from open_instruct.registry import NoOptions


@ADVANTAGES.register("maxrl")
def maxrl(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """`(reward - mean) / mean` (MaxRL, arXiv:2602.02710). The larger the group, the closer its expected gradient is to that of
    the log-likelihood of a right answer. Rewards 1, 0, 0, 0 give 3, -1, -1, -1. If all rewards are 0, the advantages are 0.

    A negative reward, which an environment may give, counts as 0, because here nothing is worse than a failure. Rewards 1, -1, 0,
    0 give 3, -1, -1, -1 too.
    """
    del options
    rewards_G = rewards_G.clip(min=0)
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else np.zeros_like(rewards_G)
