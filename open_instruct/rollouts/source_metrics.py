"""Metrics of a training step by where its prompts come from: `source/<name>/…` for each entry of the mixer list, and
`environment/<name>/…` for each environment that rows name. Pure."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from open_instruct.config.data_names import short_names
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.rollouts.batch_metrics import is_right
from open_instruct.scored_groups import ScoredGroup, last_samples
from open_instruct.workflows.base import Workflow

Labels = Callable[[int], Iterable[str]]
"""The names under which a row of the training data counts."""


class SourceMetrics:
    """Knows which names the rows of the training data have."""

    def __init__(self, args: GRPOConfig, workflow: Workflow, train: PromptDataset) -> None:
        self._workflow = workflow
        self._train = train
        self._reward = args.verification_reward
        self._sources = short_names(args.train_mixer.words[::2])

    def of_step(self, groups: Sequence[ScoredGroup], trained: Sequence[ScoredGroup]) -> dict[str, float]:
        """Metrics of a step. `groups` are all groups generated for it, `trained` those that it trains on.

        With one source there are no metrics of sources, because they would be those of all groups (`all_groups/…`). Without
        groups in the step a source has only its share and its number of groups, both 0.
        """
        metrics: dict[str, float] = {}
        if len(self._sources) > 1:
            for name in self._sources:
                metrics |= self._of_name(f"source/{name}", name, self._source_of, groups, trained)
        environments = {name for group in groups for name in self._environments_of(group.result.index)}
        for name in sorted(environments):
            metrics |= self._of_name(f"environment/{name}", name, self._environments_of, groups, trained)
        return metrics

    def _source_of(self, row: int) -> Iterable[str]:
        return (self._sources[self._train.entry_of(row)],)

    def _environments_of(self, row: int) -> Iterable[str]:
        fact = self._workflow.environments_fact
        facts = self._train[row].facts if fact else None
        return [entry["env_name"] for entry in (facts or {}).get(fact) or ()]

    def _of_name(
        self,
        prefix: str,
        name: str,
        labels: Labels,
        groups: Sequence[ScoredGroup],
        trained: Sequence[ScoredGroup],
    ) -> dict[str, float]:
        members = [group for group in groups if name in labels(group.result.index)]
        num_trained = sum(name in labels(group.result.index) for group in trained)
        metrics = {f"{prefix}/groups": float(len(members)), f"{prefix}/share": num_trained / max(len(trained), 1)}
        if members:
            metrics |= {f"{prefix}/{key}": value for key, value in _of_groups(members, self._reward).items()}
        return metrics


def _of_groups(groups: Sequence[ScoredGroup], verification_reward: float) -> dict[str, float]:
    """A conversation of several samples counts once, except in `length`, which is a mean over all samples."""
    answers = last_samples(groups)
    rewards = np.concatenate([group.rewards(verification_reward) for group in answers])
    lengths = [len(sample.response_ids) for group in groups for sample in group.samples]
    return {
        "scores": float(rewards.mean()),
        "solved": float(np.mean([is_right(group).all() for group in answers])),
        "zero": float(np.mean([not group.outcomes.any() and not group.environment_rewards.any() for group in answers])),
        "length": float(np.mean(lengths)),
    }
