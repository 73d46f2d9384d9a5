"""Advantages of a group's responses by name (`--advantage_normalization_type`).

An advantage is a function of the rewards of one group. To add one, write a file like this and name it with
`--algorithm_modules my_advantage.py --advantage_normalization_type leave_one_out`:

    from open_instruct.algorithms.advantages import ADVANTAGES

    @ADVANTAGES.register("leave_one_out")
    def leave_one_out(rewards_G, options):
        return (rewards_G - rewards_G.mean()) * len(rewards_G) / max(len(rewards_G) - 1, 1)
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from open_instruct.registry import NoOptions, Registry

Advantage = Callable[[np.ndarray, Any], np.ndarray]
"""`(rewards_G, options) -> advantages_G`: both (G,), the rewards float64; the result is rounded to float32."""

ADVANTAGES: Registry[Advantage] = Registry("advantage", flag="advantage_normalization_type")


@ADVANTAGES.register("centered")
def centered(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """Reward minus the group's mean. Leaves out GRPO's division by the standard deviation, which would favour prompts that are
    nearly solved or nearly hopeless (Dr. GRPO, arXiv:2503.20783). Rewards 1, 0, 0, 0 give 0.75, -0.25, -0.25, -0.25."""
    del options
    return rewards_G - rewards_G.mean()


@ADVANTAGES.register("standard")
def standard(rewards_G: np.ndarray, options: NoOptions) -> np.ndarray:
    """`(reward - mean) / (std + 1e-8)`, as in GRPO (arXiv:2402.03300), with the standard deviation of the population of G."""
    return centered(rewards_G, options) / (rewards_G.std() + 1e-8)


def group_advantages(rewards_G: np.ndarray, name: str, options: Any = None) -> np.ndarray:
    """(G,) float32: the advantages of one group's responses, from the function that is registered under `name`.

    Raises:
        UnknownName: there is no such function.
        ValueError: the function did not give one finite number for each response.
    """
    entry = ADVANTAGES[name]
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    advantages_G = np.asarray(entry.value(rewards_G, options or entry.options()), dtype=np.float32)
    if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
        raise ValueError(
            f"the advantage {name!r} gave {advantages_G!r:.200} for the rewards {rewards_G!r:.200}; it must give one finite "
            "number for each"
        )
    return advantages_G
