"""The evaluation that is under way, if any: started, waited for, turned into `eval/*` metrics."""

import logging
from collections.abc import Sequence

from open_instruct.config.options import GRPOConfig
from open_instruct.data_types import GenerationResult
from open_instruct.rollouts import batch_building
from open_instruct.rollouts.evaluation import Evaluation
from open_instruct.scored_groups import ScoredGroup
from open_instruct.system.work_threads import WorkThreads
from open_instruct.workflows.base import Workflow

logger = logging.getLogger(__name__)


class Evaluations:
    """At most one evaluation at a time. `num_rows` is the size of the evaluation data, 0 where there are none."""

    def __init__(self, args: GRPOConfig, threads: WorkThreads, workflow: Workflow, num_rows: int) -> None:
        self.current: Evaluation | None = None
        self._args = args
        self._threads = threads
        self._workflow = workflow
        self._num_rows = num_rows

    def start(self, version: int) -> None:
        """Let the evaluation prompts be issued. The engines must keep `version` until the evaluation is collected."""
        assert self._num_rows, "there is no evaluation dataset"
        with self._threads.lock:
            self._threads.raise_error()
            assert self.current is None, f"the evaluation of version {self.current.version} is not collected"
            self.current = Evaluation(version, self._num_rows, max_attempts=self._args.max_generation_attempts)
            self._threads.lock.notify_all()

    def collect(self, timeout_s: float) -> dict[str, float]:
        """`eval/*` metrics of the evaluation under way. Waits for its last result, and raises `TimeoutError` after
        `timeout_s`."""
        evaluation = self.current
        assert evaluation is not None, "no evaluation was started"
        with self._threads.lock:
            if not self._threads.wait_for(lambda: evaluation.is_complete, timeout_s):
                raise TimeoutError(
                    f"evaluation: {evaluation.num_done} of {evaluation.num_rows} results after {timeout_s:g} s; "
                    f"{evaluation.describe_missing()}"
                )
            self.current = None
        if evaluation.num_given_up:
            logger.warning("%s", evaluation.why_given_up())
        metrics = self._metrics(evaluation.groups) if evaluation.groups else {}
        metrics["eval/num_not_scored"] = evaluation.num_left_out
        metrics["time/eval"] = evaluation.began.elapsed_s()
        return metrics

    def _metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        answers = self._workflow.evaluated(groups)
        metrics = batch_building.evaluation_metrics(answers, verification_reward=self._args.verification_reward)
        return metrics | self._workflow.evaluation_metrics(groups)

    def give_up(self) -> None:
        """Forget the evaluation under way."""
        with self._threads.lock:
            self.current = None

    def measured_by(self, result: GenerationResult) -> Evaluation | None:
        """The evaluation under way, if the result is part of it."""
        return self.current if self.current is not None and self.current.measures(result) else None

    def recover(self, present: set[str]) -> int:
        """Issue again what was lost with an engine; how many prompts. See `Evaluation.recover`."""
        return self.current.recover(present) if self.current is not None else 0
