"""Makes the reward of a response from the verifier's score and from the response's form, its end and its length."""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class RewardShaping:
    """Changes rewards by the form of a response, by how it ended and by its length."""

    counts_score: bool = True
    """Whether the verifier's reward counts (`--apply_verifiable_reward`)."""
    form: Literal["ignored", "needed", "rewarded"] = "ignored"
    """Whether a response must be `is_well_formed` to get the verifier's reward, or gets `form_reward` for being well formed."""
    form_reward: float = 0.0

    non_stop_reward: float | None = None
    """Replaces the reward of a response that did not end by itself; None: such a response keeps its own reward."""
    max_length: int = 0
    """Tokens of the longest possible response."""
    overlong_buffer: int = 0
    """Tokens before `max_length` over which the penalty grows from 0 to its full size; 0: there is no penalty."""
    overlong_penalty: float = 1.0
    """The penalty at `max_length`."""

    @property
    def is_on(self) -> bool:
        is_by_form = self.form != "ignored" or not self.counts_score
        return is_by_form or self.non_stop_reward is not None or self.overlong_buffer > 0

    def highest(self, reward: float) -> float:
        """The highest reward that a response can get if a right answer is worth `reward`."""
        base = reward if self.counts_score else 0.0
        return base + (max(self.form_reward, 0.0) if self._rewards_form else 0.0)

    def apply(
        self,
        rewards_G: np.ndarray,
        lengths_G: np.ndarray,
        stopped_G: np.ndarray,
        well_formed_G: np.ndarray | None = None,
        judged_G: np.ndarray | bool = True,
        environment_G: np.ndarray | float = 0.0,
    ) -> np.ndarray:
        """(G,) float64: the shaped rewards.

        The soft overlong punishment is that of DAPO (arXiv:2503.14476, eq. 13). Example: with a maximum of 100 tokens and a
        buffer of 20, a response of 80 tokens loses nothing, one of 90 tokens half the penalty, and one of 100 tokens all of it.

        Args:
            rewards_G: (G,) rewards of the verifier. `counts_score` and `form` apply only to these.
            lengths_G: (G,) tokens of each response.
            stopped_G: (G,) bool, whether the response ended by itself.
            well_formed_G: (G,) bool, whether the response is well formed; needed if `form` is not `ignored`.
            judged_G: (G,) bool, whether a verifier scores the response. `form` applies only to such responses: a summary of the
                reasoning cache, for instance, is not an answer.
            environment_G: (G,) rewards of the environment, in addition to the verifier's.
        """
        rewards_G = self._by_form(np.asarray(rewards_G, dtype=np.float64), well_formed_G, judged_G) + environment_G
        if self.non_stop_reward is not None:
            rewards_G = np.where(stopped_G, rewards_G, self.non_stop_reward)
        if self.overlong_buffer:
            exceeded_G = np.asarray(lengths_G) - (self.max_length - self.overlong_buffer)
            rewards_G = rewards_G - self.overlong_penalty * np.clip(exceeded_G / self.overlong_buffer, 0, 1)
        return rewards_G

    def _by_form(
        self, rewards_G: np.ndarray, well_formed_G: np.ndarray | None, judged_G: np.ndarray | bool
    ) -> np.ndarray:
        if not self.counts_score:
            rewards_G = np.zeros_like(rewards_G)
        if self.form == "ignored":
            return rewards_G
        assert well_formed_G is not None
        if self._rewards_form:
            return rewards_G + self.form_reward * (well_formed_G & judged_G)
        return np.where(well_formed_G | np.logical_not(judged_G), rewards_G, 0.0)

    @property
    def _rewards_form(self) -> bool:
        """Whether good form earns `form_reward`. If the score does not count, good form cannot be a condition for the score."""
        return self.form == "rewarded" or (self.form == "needed" and not self.counts_score)


_FORM_BEGINS = re.compile(r"</think>\s*<answer>")


def is_well_formed(text: str) -> bool:
    """Whether a response has the form `…</think> <answer>…</answer>`: thoughts, then an answer, with only whitespace between the
    two (DeepSeek-R1-Zero, arXiv:2501.12948). The prompt may have opened `<think>` already."""
    begins = _FORM_BEGINS.search(text)
    return begins is not None and text.find("</answer>", begins.end()) >= 0
