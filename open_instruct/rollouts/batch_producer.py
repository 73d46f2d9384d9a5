"""Fills training steps with scored groups, and puts the batches into the message queue.

scored groups ─► PromptFlow says which step a group is for ─► StepAssembly ─► RolloutBatch ─► message queue

A group whose responses all have the same score is left out (`zero_std`), and so is a group whose responses were all cut off and
are masked (`masked`). If a step of 8 groups is left without a token to train on, it takes 8 further groups. With
`--active_sampling` it takes as many further groups as were left out, until 8 are trained on.
"""

import functools
import logging
import time
from dataclasses import fields
from typing import Any

import ray

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import RolloutBatch
from open_instruct.report.isolation import Isolation
from open_instruct.rollouts.batch_metrics import OverIssueBias
from open_instruct.rollouts.data_preparation import DataPreparation
from open_instruct.rollouts.likely_causes import Texts, likely_causes, scores_in_words
from open_instruct.rollouts.message_queue import MessageQueue, QueueFull, default_queue_size, num_array_bytes
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.rollout_record import RolloutRecord
from open_instruct.rollouts.rollout_state import FinishedGroup
from open_instruct.rollouts.sample_display import SampleDisplay
from open_instruct.rollouts.source_metrics import SourceMetrics
from open_instruct.rollouts.staleness import Assignment, PromptFlow
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly
from open_instruct.scored_groups import TOO_OLD, ScoredGroup, without_tokens
from open_instruct.system.work_threads import POLL_S, WorkThreads
from open_instruct.verifiers.registry import right_answers
from open_instruct.verifiers.row_verifiers import checks_of_row
from open_instruct.workflows.base import Workflow, metrics_of_results

logger = logging.getLogger(__name__)

EARLY = 8
"""Groups of which none can be trained on, before the first that can: then the log says so without waiting for a full step."""
FACTOR = 4
"""The log says it again when a step has this many times as many such groups."""


class BatchProducer:
    """Holds the groups that wait for a step and the steps that are not trained yet, and sends batches to the learners."""

    def __init__(
        self,
        args: GRPOConfig,
        collation: CollationOptions,
        threads: WorkThreads,
        preparation: DataPreparation,
        flow: PromptFlow,
        workflow: Workflow,
        requests: PromptRequests,
        tokenizer: Any,
        message_queue: MessageQueue,
        record: RolloutRecord,
    ) -> None:
        self._args = args
        self._collation = collation
        self._threads = threads
        self._preparation = preparation
        self._flow = flow
        self._workflow = workflow
        self._requests = requests
        self._tokenizer = tokenizer
        self._message_queue = message_queue
        self._record = record
        self.groups: dict[str, ScoredGroup] = {}
        """Complete groups that no step has taken."""
        self.taken: dict[int, list[ScoredGroup]] = {}
        """The groups of each step that is not trained yet, by the number of the step."""
        self.assembly: StepAssembly | None = None
        """The step that is being put together."""
        self._isolation = Isolation("showing what was sampled")
        self._has_trained = False
        """Whether a group of this process could be trained on."""
        self._seen_by_cleanup = 0
        """`num_stale_discarded` when discarded groups were last removed from `groups`."""
        self._reported_stale = 0
        """`num_stale_discarded` when the metrics of the last step were made."""
        self._over_issue = OverIssueBias()

    @functools.cached_property
    def _by_source(self) -> SourceMetrics:
        return SourceMetrics(self._args, self._workflow, self._requests.train)

    @functools.cached_property
    def display(self) -> SampleDisplay:
        return SampleDisplay(self._args, self._requests.train, self._decode)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def packing_thread(self) -> None:
        """The thread. It takes scored groups and puts the training data of each step into the message queue, waiting for room."""
        self._assemble()  # the groups of a saved state
        while not self._threads.stopping.is_set():
            for group in self._preparation.next_scored():
                self.take(group)
            self._assemble()  # even if no group came, because a dropped prompt leaves its place to another prompt

    def take(self, group: ScoredGroup) -> None:
        """Let a scored group wait for its step, unless another copy of the group came first."""
        result = group.result
        with self._threads.lock:
            self._preparation.being_scored.pop(result.prompt_id, None)
            self._workflow.arrived(result.prompt_id, result.notes)
            versions = {"oldest_version": result.oldest_version, "newest_version": result.newest_version}
            if self._flow.arrive(result.prompt_id, **versions):
                self.groups[result.prompt_id] = group
            else:
                self._preparation.leave_out(group)

    def _assemble(self) -> None:
        """Fill steps with the groups that have arrived, and send the partial batches that are ready."""
        while True:
            with self._threads.lock:
                if self._flow.assembling > self._args.num_training_steps:
                    return
                assembly = self.assembly or StepAssembly(self._flow.assembling, self._args, self._collation)
                self.assembly = assembly
                assignments = self._flow.assign()
                self._forget_discarded(assembly.training_step)
                added = [self._add(assembly, assignment) for assignment in assignments]
                self.display.look_at(assembly.training_step, [rollout for rollout, _ in added])
                self._warn_without_gradient(assembly)
                complete = self._flow.step_is_full and assembly.has_gradient
                if self._flow.step_is_full and not complete:
                    self._extend(assembly)
                elif complete and self._args.active_sampling and assembly.num_missing:
                    complete = False
                    self._flow.extend_step(assembly.num_missing)
                if complete:
                    self._flow.close_step()
                    self.assembly = None
                self._threads.lock.notify_all()
            self._send(assembly, complete=complete)
            if not complete and not assignments:
                return

    def _add(self, assembly: StepAssembly, assignment: Assignment) -> tuple[ScoredGroup, str]:
        """Take a group into the step. Returns the rollout and its fate."""
        prompt_id = assignment.prompt.prompt_id
        group = self.groups.pop(prompt_id)
        groups = self.taken.setdefault(assembly.training_step, [])
        groups.append(group)
        fate = assembly.add(group, assignment)
        rollout = assembly.rollouts[-1]
        self._flow.ledger.stage(prompt_id, fate, assembly.training_step)
        oldest = assignment.oldest_trained_version
        self._record.took(assembly.training_step, rollout, assignment.prompt, fate, oldest_trained_version=oldest)
        self._over_issue.record(group, is_straggler=assignment.is_straggler)
        self._requests.note_solved(rollout)
        for position, fate_before in assembly.forget_tokens().items():
            groups[position] = without_tokens(groups[position], fate_before)
        return rollout, fate

    def _extend(self, assembly: StepAssembly) -> None:
        """Take more prompts into a step that has nothing to train on."""
        assembly.num_extended += 1
        self._flow.extend_step()

    def _warn_without_gradient(self, assembly: StepAssembly) -> None:
        """Say why no group of a step can be trained on, as soon as that is no chance: when the step is full, or at the beginning
        of a run after `EARLY` groups. Example: with 16 prompts in a step after 8, 32, 128 groups, later after 16, 64, 256."""
        self._has_trained |= assembly.num_usable > 0
        if assembly.num_usable:
            return
        num_prompts = self._args.num_unique_prompts_rollout
        enough = num_prompts if self._has_trained else min(num_prompts, EARLY)
        if len(assembly.rollouts) >= enough * FACTOR**assembly.num_warnings:
            assembly.num_warnings += 1
            logger.warning("%s", assembly.why_no_gradient + self._what_was_sampled(assembly))

    def _what_was_sampled(self, assembly: StepAssembly) -> str:
        """For the log: how the verifiers scored the step's responses, the likeliest causes, and the first time one of the
        responses."""
        with self._isolation:
            rollouts, train = assembly.rollouts, self._requests.train

            def answers_of(index: int) -> tuple[str, ...]:
                checks = checks_of_row(train[index].dataset, train[index].ground_truth)
                return tuple(answer for check in checks for answer in right_answers(*check))

            texts = Texts(self._preparation.scoring.texts, self._decode, answers_of)
            text = f" {scores_in_words(rollouts)} {likely_causes(rollouts, texts)}".rstrip()
            newest = rollouts[-1]
            is_shown = assembly.num_warnings == 1 and newest.samples and not newest.left_out_as
            return f"{text}\n{self.display.shown(newest, 1)}" if is_shown else text
        return ""

    def has_extended(self, training_step: int) -> bool:
        """Whether this step is being put together and had nothing to train on."""
        assembly = self.assembly
        return assembly is not None and assembly.training_step == training_step and assembly.num_extended > 0

    def _forget_discarded(self, training_step: int) -> None:
        """Forget groups that were discarded as too old. Their prompts are issued again."""
        if self._seen_by_cleanup == self._flow.num_stale_discarded:
            return  # looking at all groups for every result would cost more than the ledger does
        self._seen_by_cleanup = self._flow.num_stale_discarded
        for prompt_id in [prompt_id for prompt_id in self.groups if not self._flow.ledger[prompt_id].arrived]:
            group = self.groups.pop(prompt_id)
            self._record.took(training_step, group, self._flow.ledger[prompt_id], TOO_OLD)
            self._preparation.leave_out(group)
            if self._args.over_issued_prompts:
                self._over_issue.record(group, is_straggler=True)

    def _send(self, assembly: StepAssembly, *, complete: bool) -> None:
        partial = assembly.next_partial_batch(last=complete)
        if partial is None:
            return
        self._record.sent(assembly.training_step, partial)
        batch = RolloutBatch(
            training_step=assembly.training_step,
            rank_data=[ray.put(mini_batches) for mini_batches in partial.rank_batches],
            metrics=self._metrics(assembly) if complete else {},
            number=partial.number,
            is_last=complete,
            num_global_tokens=assembly.num_tokens,
            num_global_sequences=assembly.num_sequences,
            num_samples=partial.num_samples,
            min_version=partial.min_version,
        )
        self._put(batch, num_array_bytes(partial.rank_batches))

    def _metrics(self, assembly: StepAssembly) -> dict[str, Any]:
        num_stale = self._flow.num_stale_discarded - self._reported_stale
        self._reported_stale += num_stale
        metrics = assembly.metrics(time.time())
        counts, left_out = self._preparation.take_left_out()
        for name, number in counts.items():
            metrics[name] = metrics.get(name, 0.0) + number
        return {
            **metrics,
            **self._by_source.of_step(assembly.answers, [group for group, _ in assembly.trained]),
            **self._over_issue.metrics(),
            **self._workflow.metrics(assembly.rollouts, assembly.groups),
            **metrics_of_results(self._workflow, [*(rollout.result for rollout in assembly.rollouts), *left_out]),
            "stale_results_dropped": num_stale,
            "epoch": self._passes_over_data(assembly.training_step),
            **self._preparation.scoring.learn_rubrics(assembly.training_step, (group for group, _ in assembly.trained)),
        }

    def _passes_over_data(self, training_step: int) -> float:
        """Places of the prompt order that the steps up to this one have used, divided by the rows of the data."""
        with self._threads.lock:
            return self._flow.ledger.num_places_used(training_step) / len(self._requests.train)

    def _put(self, batch: RolloutBatch, num_bytes: int) -> None:
        """Put a batch with `num_bytes` of data into the message queue; waits for room.

        If the queue did not answer, the batch is put again under the same id; the queue takes it only once.
        """
        while not self._threads.stopping.is_set():
            try:
                self._message_queue.put(
                    batch,
                    version=batch.min_version,
                    # Rows may ask for more environment steps than the queue was sized for; then one batch fills the queue.
                    num_samples=min(max(batch.num_samples, 1), default_queue_size(self._args)),
                    timeout=10 * POLL_S,
                    message_id=f"step {batch.training_step}, partial batch {batch.number}",
                    num_bytes=num_bytes,
                )
                return
            except QueueFull:  # the learners are still busy with earlier batches
                continue
            except TimeoutError as error:
                logger.warning(
                    "partial batch %d of step %d: %s; it is put again", batch.number, batch.training_step, error
                )

    def forget_step(self, training_step: int) -> None:
        """Drop the groups of a step that has been trained."""
        self.taken.pop(training_step, None)

    def finished_groups(self) -> list[FinishedGroup]:
        """Groups that are scored and not trained on: first the groups of steps that are not trained yet, then the groups that
        wait for a step. A resumed run takes the groups in this order, so its steps get the same groups again."""
        assembled = (group for _, groups in sorted(self.taken.items()) for group in groups)
        scored = [*assembled, *self.groups.values()]
        names = [field.name for field in fields(FinishedGroup)]
        return [FinishedGroup(**{name: getattr(group, name) for name in names}) for group in scored]
