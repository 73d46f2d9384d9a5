"""What is added to the rewards of responses beside the verifier's score (`--non_stop_penalty`, `--overlong_buffer_len`)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RewardShaping:
    """Changes rewards by how a response ended and by its length."""

    non_stop_reward: float | None = None
    """Reward of a response that did not end by itself, in place of its own; None: it keeps its own."""
    max_length: int = 0
    """Tokens of the longest possible response."""
    overlong_buffer: int = 0
    """Tokens before `max_length` over which the penalty grows from 0 to its full size; 0: there is no penalty."""
    overlong_penalty: float = 1.0
    """The penalty at `max_length`."""

    @property
    def is_on(self) -> bool:
        return self.non_stop_reward is not None or self.overlong_buffer > 0

    def apply(self, rewards_G: np.ndarray, lengths_G: np.ndarray, stopped_G: np.ndarray) -> np.ndarray:
        """(G,) float64: the shaped rewards.

        The soft overlong punishment is that of DAPO (arXiv:2503.14476, eq. 13): with a maximum of 100 tokens and a buffer of 20,
        a response of 80 tokens loses nothing, one of 90 half the penalty, one of 100 all of it.

        Args:
            lengths_G: (G,) tokens of each response.
            stopped_G: (G,) bool, whether the response ended by itself.
        """
        rewards_G = np.asarray(rewards_G, dtype=np.float64)
        if self.non_stop_reward is not None:
            rewards_G = np.where(stopped_G, rewards_G, self.non_stop_reward)
        if self.overlong_buffer:
            exceeded_G = np.asarray(lengths_G) - (self.max_length - self.overlong_buffer)
            rewards_G = rewards_G - self.overlong_penalty * np.clip(exceeded_G / self.overlong_buffer, 0, 1)
        return rewards_G
