"""Takes results from the engines and has them scored.

inference_results_Q ─► take ─► verifiers ─► training groups ─► the teacher, if there is one ─► `scored` ─► batch_producer.py
                        │          └──────► evaluation
                        └─ an engine gave the group up, or too few responses were scored: its prompt is issued again
"""

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ray.util.queue import Empty, Queue

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import GenerationResult
from open_instruct.rollouts.batch_metrics import scoring_metrics
from open_instruct.rollouts.failure_log import GenerationFailures, NothingAnswered
from open_instruct.rollouts.result_scoring import PendingScores, ResultScoring
from open_instruct.rollouts.rollout_record import RolloutRecord
from open_instruct.rollouts.rollout_state import FinishedGroup
from open_instruct.rollouts.running_evaluation import Evaluations
from open_instruct.rollouts.staleness import PromptFlow
from open_instruct.rollouts.teacher_scoring import TeacherScoring
from open_instruct.rollouts.unscored_share import TooFewScored, UnscoredShare
from open_instruct.scored_groups import UNSCORED, ScoredGroup, UnscoredGroup
from open_instruct.system.work_threads import POLL_S, WorkThreads
from open_instruct.workflows.base import Workflow

if TYPE_CHECKING:
    from ray.actor import ActorHandle

DROPS_IN_A_ROW = 16
"""At most this many prompts in a row may be dropped, or the prompts of two steps if that is more. One more ends the run."""
GATHER_S = 0.1
"""Longest time that a scored group waits for groups that are still being scored."""


class DataPreparation:
    """Has every expected result scored once, and puts the scored training groups into the queue `scored`."""

    def __init__(
        self,
        args: GRPOConfig,
        threads: WorkThreads,
        flow: PromptFlow,
        workflow: Workflow,
        scoring: ResultScoring,
        evaluations: Evaluations,
        results_queue: Queue,
        record: RolloutRecord,
        teachers: "Sequence[ActorHandle]" = (),
    ) -> None:
        self._args = args
        self._threads = threads
        self._flow = flow
        self._workflow = workflow
        self.scoring = scoring
        self._evaluations = evaluations
        self._results_queue = results_queue
        self._record = record
        self.scored: queue.SimpleQueue[ScoredGroup] = queue.SimpleQueue()
        self.being_scored: dict[str, GenerationResult] = {}
        """Results of training prompts that have arrived, until `PromptFlow` has their groups."""
        self.unread: set[str] = set()
        """Prompt ids of the results that have left the results queue and were not taken yet; one bundle at most."""
        self._teacher = None
        if teachers:
            self._teacher = TeacherScoring(teachers, threads, self.scored.put, timeout_s=args.teacher_timeout_s)
        self.failures = GenerationFailures(max(DROPS_IN_A_ROW, 2 * args.num_unique_prompts_rollout))
        self._unscored = UnscoredShare(args.max_unscored_share)
        self._left_out: defaultdict[str, float] = defaultdict(float)
        """`scoring_metrics` of the training groups that were scored and that no step will take, since the last row of metrics."""
        self._left_out_results: list[GenerationResult] = []
        """The results of these groups, without samples."""
        self.num_samples = 0
        self.num_response_tokens = 0

    @property
    def threads(self) -> list[Callable[[], None]]:
        """The functions of the background threads."""
        teacher_threads = [] if self._teacher is None else [self._teacher.teaching_thread]
        return [self.data_preparation_thread, *teacher_threads]

    def data_preparation_thread(self) -> None:
        """The thread. It takes results from the results queue until the run ends."""
        while not self._threads.stopping.is_set():
            try:
                results = self._results_queue.get(timeout=POLL_S)
            except Empty:
                continue
            with self._threads.lock:
                self.unread = {result.prompt_id for result in results}
            for result in results:
                self.take(result)
                with self._threads.lock:
                    self.unread.discard(result.prompt_id)

    def next_scored(self) -> list[ScoredGroup]:
        """Scored training groups, as soon as there is at least one; empty if none arrives within `POLL_S`.

        Waits up to `GATHER_S` for groups that are still being scored, because packing one group would take the interpreter from
        the threads that score the others. With `--streaming` each group is returned at once, because learners may begin with the
        first group.
        """
        try:
            groups = [self.scored.get(timeout=POLL_S)]
        except queue.Empty:
            return []
        if self._args.streaming:
            return groups
        ends_at = time.monotonic() + GATHER_S
        while len(groups) + self.scored.qsize() < len(self.being_scored) and time.monotonic() < ends_at:
            time.sleep(GATHER_S / 100)
        while not self.scored.empty():
            groups.append(self.scored.get())
        return groups

    def take(self, result: GenerationResult) -> None:
        """Have a result scored, unless the result is not expected (any more)."""
        with self._threads.lock:
            if result.is_eval and self._evaluations.measured_by(result) is None:
                return
            if result.error:
                self._give_up(result)
                return
            if not self._is_waited_for(result):
                return
            if not result.is_eval:
                self.failures.answered()
                self.being_scored[result.prompt_id] = result
                self.num_samples += len(result.samples)
                self.num_response_tokens += result.token_statistics.num_response_tokens
        self.scoring.submit(result, lambda scores, score_s: self._scored(result, scores, score_s))

    def _is_waited_for(self, result: GenerationResult) -> bool:
        if (evaluation := self._evaluations.measured_by(result)) is not None:
            return evaluation.begin_scoring(result)
        return self._flow.waits_for(result.prompt_id, self.being_scored)

    def _give_up(self, result: GenerationResult, unscored: ScoredGroup | None = None) -> None:
        """An engine gave a group up, or too few of its responses were scored, and `unscored` has them: issue its prompt again, or
        drop it after `max_generation_attempts` failures."""
        is_tried_again = None
        if (evaluation := self._evaluations.measured_by(result)) is not None:
            is_tried_again = evaluation.fail(self.scoring.all_wrong(result))
        elif self._flow.waits_for(result.prompt_id, self.being_scored):  # else another copy of the result came
            if unscored is not None:
                self._record.took(self._flow.assembling, unscored, self._flow.ledger[result.prompt_id], UNSCORED)
            is_tried_again = self._flow.give_up(result.prompt_id, max_attempts=self._args.max_generation_attempts)
            self._record.given_up(result, is_tried_again=is_tried_again)
            if not is_tried_again:
                self._workflow.dropped(result.prompt_id)
        try:
            self.failures.record(result, is_tried_again=is_tried_again)
        except NothingAnswered as error:
            self._threads.fail(error)
        self._threads.lock.notify_all()

    def _scored(self, result: GenerationResult, scores: PendingScores, score_s: float) -> None:
        """Called by the verifiers' threads. Evaluation results are added to their evaluation in this call, because
        `packing_thread` may be waiting for room in the message queue while the driver waits for the evaluation."""
        if self._threads.stopping.is_set():
            return
        try:
            scored_by, functions = scores.results()
            with self._threads.lock:
                self._unscored.record(self.scoring.together(result, scored_by, functions))
            group = self.scoring.scored_group(result, scored_by, score_s, functions=functions)
            if isinstance(group, UnscoredGroup):
                self._leave_out(result, group)
            elif result.is_eval:
                self._take_into_evaluation(group)
            else:
                self._record.scored(result, score_s)
                if not self.ask_teacher(group):
                    self.scored.put(group)
        except TooFewScored as error:
            self._threads.fail(error)
        except Exception as error:  # an exception of a callback would be lost
            failure = RuntimeError(f"verification of {result.prompt_id} failed: {error!r}")
            failure.__cause__ = error
            self._threads.fail(failure)

    def ask_teacher(self, group: ScoredGroup) -> bool:
        """Have the teacher score a training group, which then goes into `scored`. False if there is no teacher, or if a step has
        left the group out."""
        if self._teacher is None or group.left_out_as:
            return False
        with self._threads.lock:
            self.being_scored[group.result.prompt_id] = group.result
        self._teacher.submit(group)
        return True

    @property
    def teacher_progress(self) -> str:
        """For a message: how many groups the teacher has."""
        return "" if self._teacher is None else f" ({self._teacher.num_asked} of them by the teacher)"

    def leave_out(self, group: ScoredGroup | UnscoredGroup) -> None:
        """No step will take this training group. What scoring it cost, what was not scored and what its workflow noted count in
        the next row."""
        if group.result is not None:
            self._left_out_results.append(replace(group.result, samples=[]))
        for name, number in scoring_metrics([group]).items():
            self._left_out[name] += number

    def take_left_out(self) -> tuple[dict[str, float], list[GenerationResult]]:
        """`scoring_metrics` of the training groups that were left out since the last call, and their results without samples."""
        with self._threads.lock:
            counts, self._left_out = self._left_out, defaultdict(float)
            results, self._left_out_results = self._left_out_results, []
            return counts, results

    def _take_into_evaluation(self, group: ScoredGroup) -> None:
        with self._threads.lock:
            if (evaluation := self._evaluations.measured_by(group.result)) is not None:
                evaluation.add(group)
                self._threads.lock.notify_all()

    def _leave_out(self, result: GenerationResult, group: UnscoredGroup) -> None:
        """Too few responses of this group were scored. A training prompt is therefore issued again, and an evaluation leaves the
        prompt out."""
        failed = replace(result, error=group.cause)
        with self._threads.lock:
            if not result.is_eval:
                self.being_scored.pop(result.prompt_id, None)
                self.leave_out(group)
                self._give_up(failed, group.unscored)
            elif (evaluation := self._evaluations.measured_by(result)) is not None:
                evaluation.leave_out(result.index, group)
                self.failures.record(failed, is_tried_again=False)
                self._threads.lock.notify_all()

    def finished_groups(self) -> list[FinishedGroup]:
        """Groups that were generated and are not scored yet."""
        return [FinishedGroup(result) for result in self.being_scored.values()]
