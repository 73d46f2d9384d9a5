"""Advantages of a group's responses by name (`--advantage_normalization_type`).

An advantage is a function of the rewards of one group. To add one, write a file like this and name it with
`--algorithm_modules my_advantage.py --advantage_normalization_type median`:

    from open_instruct.algorithms.advantages import ADVANTAGES

    @ADVANTAGES.register("median")
    def median(rewards_G, options):
        return rewards_G - np.median(rewards_G)

If an advantage is registered with `over_step=f`, then `f(advantages_N, num_tokens_N)` makes the final advantages of all N
responses of a training step, where `num_tokens_N` are their numbers of trained tokens.
"""

from open_instruct.algorithms.advantages.base import ADVANTAGES, Advantage, group_advantages
from open_instruct.algorithms.advantages.centered import centered, rloo, standard
from open_instruct.algorithms.advantages.maxrl import maxrl
from open_instruct.algorithms.advantages.opo import opo
from open_instruct.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten_over_tokens,
)

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "centered",
    "group_advantages",
    "maxrl",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "standard",
    "whiten_over_tokens",
]
