"""What an evaluation measures: `eval/…` over all of its prompts, and `eval/<set>/…` for each of its sets. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data_types import GenerationResult
from open_instruct.report.accuracies import ACCURACY_KEY
from open_instruct.report.histogram import is_histogram
from open_instruct.rollouts.batch_metrics import scoring_metrics
from open_instruct.rollouts.evaluation_metrics import evaluation_metrics, speed_metrics
from open_instruct.scored_groups import ScoredGroup, UnscoredGroup
from open_instruct.workflows.base import Workflow, metrics_of_results


def rows_of_sets(args: GRPOConfig, held_out: PromptDataset) -> dict[str, range]:
    """The rows of each evaluation set, by name, in the order of the data."""
    return {
        evaluation_set.name: held_out.rows_of_entry(entry) for entry, evaluation_set in enumerate(args.evaluation_sets)
    }


@dataclass(frozen=True)
class Outcomes:
    """What became of some of the prompts of an evaluation, in the order of the data."""

    groups: Sequence[ScoredGroup]
    """Groups that were given up have scores of 0 and no responses."""
    left_out: Sequence[UnscoredGroup]
    """Groups of which a response was not scored."""

    @property
    def scoring(self) -> dict[str, float]:
        """How many responses were not scored, and what scoring cost, including prompts that were left out."""
        return under_eval(scoring_metrics([*self.groups, *self.left_out]))

    @property
    def results(self) -> list[GenerationResult]:
        """The results of all prompts; those of prompts that were left out have no samples."""
        left_out = [group.result for group in self.left_out if group.result is not None]
        return [*(group.result for group in self.groups), *left_out]


def under_eval(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with `eval/` in front of each name, so that none replaces a metric of training in the same row."""
    return {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}


_PASS_AT_K = re.compile(r"eval/pass_at_\d+(_unbiased)?")


class EvaluationMeasures:
    """Computes the metrics of evaluations."""

    def __init__(self, args: GRPOConfig, workflow: Workflow) -> None:
        self._args = args
        self._workflow = workflow

    def answers(self, outcomes: Outcomes) -> Sequence[ScoredGroup]:
        """The responses that count, in the order of the data."""
        return self._workflow.evaluated(outcomes.groups) if outcomes.groups else ()

    def of_evaluation(self, outcomes: Outcomes, by_set: Mapping[str, Outcomes], *, is_whole: bool) -> dict[str, Any]:
        """All metrics of an evaluation. Those over all prompts are left out unless it `is_whole`, because over other sets a mean
        measures something else: a curve of it would jump with the sets."""
        metrics = self._of_all(outcomes) if is_whole else {}
        if self._args.measures_sets_apart:
            for name, set_outcomes in by_set.items():
                metrics |= self._of_set(name, set_outcomes)
        return metrics | under_eval(speed_metrics(outcomes.groups))

    def _of_all(self, outcomes: Outcomes) -> dict[str, Any]:
        """Where sets have different numbers of responses to a prompt, there is no pass@k over all of them but pass@1."""
        metrics = self._of_prompts(outcomes)
        if len({evaluation_set.sampling.n for evaluation_set in self._args.evaluation_sets}) == 1:
            return metrics
        return {
            name: value for name, value in metrics.items() if name == ACCURACY_KEY or not _PASS_AT_K.fullmatch(name)
        }

    def _of_prompts(self, outcomes: Outcomes) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        if outcomes.groups:
            reward, groups = self._args.verification_reward, outcomes.groups
            metrics = evaluation_metrics(self.answers(outcomes), verification_reward=reward, rollouts=groups)
            metrics |= under_eval(self._workflow.evaluation_metrics(groups))
        metrics |= outcomes.scoring
        metrics |= under_eval(metrics_of_results(self._workflow, outcomes.results))
        return metrics | {"eval/num_not_scored": len(outcomes.left_out)}

    def _of_set(self, name: str, outcomes: Outcomes) -> dict[str, Any]:
        metrics = self._of_prompts(outcomes) | {"num_prompts": len(outcomes.groups)}
        return {
            f"eval/{name}/{key.removeprefix('eval/')}": value
            for key, value in metrics.items()
            if not is_histogram(value)
        }
