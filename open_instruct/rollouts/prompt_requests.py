"""Makes the requests to the engines: a row of a dataset, a prompt id and a seed become a `PromptRequest`. Pure."""

import logging
from dataclasses import replace

import numpy as np

from open_instruct.config.evaluation_sets import EvaluationSet
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.prompt_order import PromptOrder
from open_instruct.data_types import EVAL, PromptRequest
from open_instruct.rollouts.prompt_ledger import IssuedPrompt
from open_instruct.rollouts.running_evaluation import Evaluation
from open_instruct.rollouts.step_assembly import pass_rate
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.base import Workflow

logger = logging.getLogger(__name__)

EVAL_STREAM = 1
"""Keeps the seeds of evaluation prompts apart from those of training prompts."""
RETRY_STREAM = 2
"""Keeps the seeds of training prompts that are tried again apart from both."""


def request_seed(*key: int) -> int:
    """The seed of one group. vLLM samples the group's n responses with this seed, this seed + 1, and so on."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(2))


class PromptRequests:
    """Makes the requests of a run. The same prompt gets the same request in every run with the same `--seed`."""

    def __init__(
        self, args: GRPOConfig, workflow: Workflow, train: PromptDataset, held_out: PromptDataset | None
    ) -> None:
        self.train = train
        self.held_out = held_out
        self._args = args
        self._evaluation_sets = args.evaluation_sets
        self._workflow = workflow
        self._order = PromptOrder(len(train), args.seed)
        self.solved_rows: set[int] = set()
        """Rows of the training data that are not sampled again (`--no_resampling_pass_rate`)."""

    def row_number(self, issue_number: int) -> int:
        """The row of the training data that is issued under this issue number."""
        return self._order[issue_number][1]

    def row_of(self, issue_number: int) -> dict[str, object]:
        """`row`, the place in the user's data of the row under this issue number, and its `index` in the training data."""
        index = self.row_number(issue_number)
        return {"row": self.train.places[index], "index": index}

    def is_skipped(self, issue_number: int) -> bool:
        """Whether the row of an issue number is skipped because it is solved. Once all rows are solved, none is skipped, and none
        in a run that was resumed without the option."""
        if self._args.no_resampling_pass_rate is None:
            return False
        return self.row_number(issue_number) in self.solved_rows and len(self.solved_rows) < len(self.train)

    def note_solved(self, rollout: ScoredGroup) -> None:
        """Remember the row of a rollout whose pass rate reached `--no_resampling_pass_rate`."""
        threshold, row_number = self._args.no_resampling_pass_rate, rollout.result.index
        if threshold is None or row_number in self.solved_rows or pass_rate(rollout, self._args) < threshold:
            return
        self.solved_rows.add(row_number)
        if len(self.solved_rows) == len(self.train):
            logger.warning(
                "all %d prompts were solved at a rate of %g or more (--no_resampling_pass_rate), so all are sampled again",
                len(self.train),
                threshold,
            )

    def for_training(self, prompt: IssuedPrompt, version: int) -> PromptRequest:
        """The request for a training prompt, which engines begin with `version` or newer.

        A prompt that was broken off gets another seed, because the same seed would take too long again.
        """
        number, failures = prompt.issue_number, prompt.num_failures
        first_seed = request_seed(self._args.seed, number)
        seed = request_seed(self._args.seed, number, RETRY_STREAM, failures) if failures else first_seed
        row_number = self.row_number(number)
        row = self.train[row_number]
        task = self._workflow.task(
            row, row_number, prompt_id=prompt.prompt_id, version=version, seed=first_seed, is_eval=False
        )
        config = replace(self._args.train_sampling, seed=seed)
        return PromptRequest(row.prompt, config, row_number, prompt.prompt_id, prompt.version, task=task)

    def evaluation_set(self, row_number: int) -> EvaluationSet:
        """The set of a row of the evaluation data."""
        assert self.held_out is not None
        return self._evaluation_sets[self.held_out.entry_of(row_number)]

    def for_evaluation(self, evaluation: Evaluation, row_number: int) -> PromptRequest:
        """The request for a row of the evaluation data. Its seed is the same at every version, so that two evaluations differ
        only by their weights."""
        assert self.held_out is not None
        row = self.held_out[row_number]
        seed = request_seed(self._args.seed, row_number, EVAL_STREAM)
        version, prompt_id = evaluation.version, evaluation.prompt_id(row_number)
        task = self._workflow.task(row, row_number, prompt_id=prompt_id, version=version, seed=seed, is_eval=True)
        config = replace(self.evaluation_set(row_number).sampling, seed=seed)
        return PromptRequest(row.prompt, config, row_number, prompt_id, version, marker=EVAL, task=task)
