"""What an evaluation has measured, of all prompts and of each set, read from its metrics."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACCURACY_KEY = "eval/pass_at_1"
"""Metric: share of right answers in an evaluation of all sets, 0 to 1."""
EVAL_REWARD_KEY = "eval/scores"
"""Metric: mean reward in an evaluation of all sets."""
_OF_SET = re.compile(r"eval/([^/]+)/(?:pass_at_1|scores)")


@dataclass(frozen=True)
class Measure:
    """Of some prompts."""

    share: float | None
    """Share of right answers, 0 to 1; None if only reward functions score, which do not say what is right."""
    reward: float | None
    """Mean reward; None: not known."""
    standard_error: float | None = None
    """Of the share; None: not known."""
    environment_reward: float | None = None
    """Mean of what environments gave, for which an answer is right only from 1 on; None: no environment gave anything."""

    def __str__(self) -> str:
        if self.share is None:
            return "not measured" if self.reward is None else f"reward {self.reward:.3f}"
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.1f}"
        is_graded = self.environment_reward is not None and abs(self.environment_reward - self.share) > 1e-6
        graded = f", environment reward {self.environment_reward:.3f}" if is_graded else ""
        return f"{100 * self.share:.1f}{error}% right{graded}"


@dataclass(frozen=True)
class Accuracies:
    """One evaluation."""

    whole: Measure | None
    """Over all sets; None if the evaluation measured only some of them."""
    of_sets: Mapping[str, Measure]
    """By set; empty if the run does not measure its sets apart."""

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> "Accuracies | None":
        """What is among the metrics of an evaluation, or of a row of `metrics.jsonl`; None if nothing is."""
        whole = _measure(metrics, ACCURACY_KEY, EVAL_REWARD_KEY)
        names = dict.fromkeys(match[1] for name in metrics if (match := _OF_SET.fullmatch(name)))
        measures = {name: _measure(metrics, f"eval/{name}/pass_at_1", f"eval/{name}/scores") for name in names}
        sets = {name: measure for name, measure in measures.items() if measure is not None}
        return None if whole is None and not sets else cls(whole, sets)

    @property
    def by_name(self) -> dict[str, Measure]:
        """Those of the sets; that of the whole under the name "" if there are no sets."""
        return dict(self.of_sets) or ({} if self.whole is None else {"": self.whole})

    def __str__(self) -> str:
        return ", ".join(f"{name} {measure}".lstrip() for name, measure in self.by_name.items())


def _measure(metrics: Mapping[str, Any], share_key: str, reward_key: str) -> Measure | None:
    share, reward = metrics.get(share_key), metrics.get(reward_key)
    if share is None and reward is None:
        return None
    graded = metrics.get(reward_key.replace("scores", "objective/environment_reward"))
    return Measure(share, reward, metrics.get(f"{share_key}_standard_error"), graded)
