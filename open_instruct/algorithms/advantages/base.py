"""The interface of an advantage function, and the table of advantages."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from open_instruct.registry import Registry

Advantage = Callable[..., np.ndarray]
"""`(rewards_G, options) -> advantages_G`, or `(rewards_G, options, *, lengths_G)`. All are (G,): the rewards float64, the lengths
the numbers of response tokens. The result is rounded to float32. A group may have any number of responses, even one."""

ADVANTAGES: Registry[Advantage] = Registry("advantage", flag="advantage_normalization_type")


def group_advantages(
    rewards_G: np.ndarray, name: str, options: Any = None, *, lengths_G: np.ndarray | None = None
) -> np.ndarray:
    """(G,) float32: the advantages of one group's responses, from the function that is registered under `name`.

    Args:
        lengths_G: (G,) numbers of response tokens, for functions that have this argument; by default 1 each.

    Raises:
        UnknownName: there is no such function.
        ValueError: the function did not give one finite number for each response.
    """
    entry = ADVANTAGES[name]
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    arguments = {}
    if _asks_for_lengths(entry.value):
        arguments["lengths_G"] = (
            np.ones(len(rewards_G)) if lengths_G is None else np.asarray(lengths_G, dtype=np.float64)
        )
    advantages_G = np.asarray(entry.value(rewards_G, options or entry.options(), **arguments), dtype=np.float32)
    if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
        raise ValueError(
            f"the advantage {name!r} gave {advantages_G!r:.200} for the rewards {rewards_G!r:.200}; it must give one finite "
            "number for each"
        )
    return advantages_G


@functools.cache
def _asks_for_lengths(advantage: Advantage) -> bool:
    return "lengths_G" in inspect.signature(advantage).parameters
