"""Tells the record what becomes of groups: the part of `record/` that knows the run's options and data."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data_types import GenerationResult
from open_instruct.record.places import RECORD
from open_instruct.record.samples import RecordedGroup
from open_instruct.record.writer import Exports, LearnerValues, RecordWriter
from open_instruct.rollouts.prompt_ledger import IssuedPrompt
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.prompt_traces import PromptTraces, open_traces
from open_instruct.rollouts.step_assembly import PartialBatch
from open_instruct.scored_groups import UNSCORED, ScoredGroup

logger = logging.getLogger(__name__)

FETCH_S = 10.0
"""Deadline for fetching what the learners say of a step's tokens."""
FLUSH_S = 20.0
"""Longest time that a checkpoint, or the end of a run, waits for what the record still has to write."""
CLOSE_S = 2.0
"""The same when the controller ends; by then the run has ended, or has failed."""


class RolloutRecord:
    """The record of a run's samples, from `start` on, and the traces of its prompts. Without `--record` nothing is written, and
    without `--otlp_traces_endpoint` nothing is sent.

    Args:
        exports: writes the files of `--save_traces`.
    """

    def __init__(self, args: GRPOConfig, requests: PromptRequests, exports: Exports | None = None) -> None:
        self._args = args
        self._requests = requests
        self._exports = exports
        self._writer: RecordWriter | None = None
        self._traces: PromptTraces | None = None

    def start(self, training_step: int) -> None:
        """The run goes on after `training_step`."""
        self._traces = open_traces(self._args)
        if self._args.record:
            keep = self._args.record_keep_steps
            directory = Path(self._args.output_dir) / RECORD
            keep_steps = keep if keep > 0 else None
            self._writer = RecordWriter(directory, training_step, keep_steps=keep_steps, exports=self._exports)

    def issued(self, prompt: IssuedPrompt) -> None:
        """A training prompt goes to the engines."""
        self._note("issued", prompt.prompt_id, attempt=prompt.num_issues - 1, version=prompt.version)
        if self._traces is not None:
            self._traces.issued(prompt)

    def scored(self, result: GenerationResult, score_s: float) -> None:
        """The responses to a training prompt have their scores."""
        if self._traces is not None:
            self._traces.scored(result, score_s)

    def given_up(self, result: GenerationResult, *, is_tried_again: bool) -> None:
        """An engine has given up a training prompt, or too few of its responses were scored."""
        self._note(
            "given_up",
            result.prompt_id,
            engine=result.engine_id,
            cause=result.error,
            is_tried_again=is_tried_again,
        )
        if self._traces is not None:
            self._traces.given_up(result)

    def lost(self, prompt_ids: Sequence[str]) -> None:
        """These prompts were lost with an engine, and are issued again."""
        for prompt_id in prompt_ids:
            self._note("lost", prompt_id)
        if self._traces is not None:
            self._traces.lost(prompt_ids)

    def _note(self, kind: str, prompt_id: str, **fields: object) -> None:
        if self._writer is not None:
            self._writer.note({"kind": kind, "prompt_id": prompt_id, "unix": time.time(), **fields})

    def took(
        self,
        training_step: int,
        group: ScoredGroup,
        prompt: IssuedPrompt,
        outcome: str,
        *,
        oldest_trained_version: int = 0,
    ) -> None:
        """A step has taken a group, or has left it out."""
        if self._traces is not None:
            self._traces.took(training_step, group.result, prompt, outcome)
        if self._writer is None:
            return
        if group.left_out_as:  # restored without its tokens
            self._writer.carry_over(training_step, prompt.prompt_id)
        elif group.samples:
            attempt = max(0, prompt.num_issues - 1)
            now = time.time()
            entry = self._entry(group, self._requests.train, training_step, outcome, attempt, now)
            self._writer.add(training_step, replace(entry, oldest_trained_version=oldest_trained_version))
            if group.unscored is not None:
                entry = self._entry(group.unscored, self._requests.train, training_step, UNSCORED, attempt, now)
                self._writer.add(training_step, replace(entry, first_sample=len(group.samples)))

    def sent(self, training_step: int, batch: PartialBatch) -> None:
        """The learners get a batch of the step, or a partial batch."""
        if self._writer is not None:
            self._writer.sent(training_step, batch.rank_batches, batch.samples)

    def commit(self, training_step: int, tokens: "Sequence[ray.ObjectRef]") -> None:
        """The step is trained. `tokens`: for each share of the data a reference to its `StepSums.token_values`."""
        if self._traces is not None:
            self._traces.trained(training_step)
        if self._writer is not None:
            self._writer.commit(training_step, _values_of_learners(training_step, tokens))

    def measured(self, version: int, groups: Sequence[ScoredGroup], unscored: Sequence[ScoredGroup] = ()) -> None:
        """An evaluation of `version` is complete. `unscored`: the groups that it leaves out."""
        if self._writer is None or self._requests.held_out is None:
            return
        now, by_set = time.time(), dict[str, list[RecordedGroup]]()
        fates = [*((group, "measured") for group in groups), *((group, UNSCORED) for group in unscored)]
        for group, outcome in fates:
            if group.samples:
                name = self._requests.evaluation_set(group.result.index).name
                entry = self._entry(group, self._requests.held_out, version, outcome, 0, now, set_name=name)
                by_set.setdefault(name, []).append(entry)
        for name, entries in by_set.items():
            self._writer.measured(version, name, entries)

    def flush(self) -> None:
        """Write what waits: before a checkpoint, so that the record never lacks a step that a resumed run counts as trained."""
        if self._writer is not None and not self._writer.flush(FLUSH_S):
            logger.warning("the record is still being written after %g s", FLUSH_S)

    def close(self) -> None:
        """Write and send what is left."""
        if self._traces is not None:
            self._traces.close()
        if self._writer is not None:
            self._writer.close(CLOSE_S)

    def _entry(
        self,
        group: ScoredGroup,
        rows: PromptDataset,
        step: int,
        outcome: str,
        attempt: int,
        now: float,
        *,
        set_name: str | None = None,
    ) -> RecordedGroup:
        row = rows[group.result.index]
        return RecordedGroup(
            group=group,
            rewards=group.rewards(self._args.verification_reward),
            row=row.place,
            source=rows.places.source_of(group.result.index),
            ground_truth=row.ground_truth,
            outcome=outcome,
            attempt=attempt,
            step=step,
            arrived=now,
            set=set_name,
            masks_cut_off=self._args.mask_truncated_completions,
        )


def _values_of_learners(training_step: int, tokens: "Sequence[ray.ObjectRef]") -> LearnerValues | None:
    """What the learners say of the tokens of a step; None if they say nothing, or cannot be asked any more. They are asked at
    once, because at the end of a run they do not live longer than this call."""
    if not tokens:
        return None
    try:
        return ray.get(list(tokens), timeout=FETCH_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("the record of step %d lacks the learners' log-probs: %s", training_step, error)
        return None
