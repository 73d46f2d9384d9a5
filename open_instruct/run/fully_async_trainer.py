"""Passes the batches of a step from the message queue to the learners: the trainer's side of the step loop.

    MessageQueue ─► load_data_from_packing_thread ─► train: RayTrainGroup.async_train(batch) … the last batch makes the step
                          waits for the next batch, while the learners work on the batches before it

The trainer handles only references to the data. A step has one batch. With `--streaming` it has several partial batches, and the
first of them are trained while the rest of the step is still being generated.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import RolloutBatch
from open_instruct.learners.step_sums import TOKENS, NonfiniteWatch, merge_step_metrics
from open_instruct.report.component_log import component_logger, processing_batch
from open_instruct.rollouts.batch_progress import BatchProgress
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.components import Components
from open_instruct.system.timer import Timer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedStep:
    """The result of one training step."""

    training_step: int
    num_tokens: int
    """Number of response tokens in the groups that were trained on."""
    num_prompt_tokens: int
    """Number of prompt tokens in these groups."""
    metrics: dict[str, Any]
    tokens: Sequence[Any] = ()
    """For the record: for each share of the data a reference to its `StepSums.token_values`. Empty without a record."""


class StepHooks(Protocol):
    """What the step loop does while the trainer waits."""

    def describe_progress(self) -> BatchProgress:
        """For a message: what the step is waiting for."""
        ...

    def tell_news(self) -> None:
        """Called now and then, while the learners compute."""
        ...

    def on_idle(self) -> None:
        """Called now and then, while the learners still have the weights of the step before."""
        ...

    def before_training(self) -> None:
        """Called once the first data of a step has arrived."""
        ...


@dataclass
class StepUnderWay:
    """A training step whose batches are still arriving."""

    training_step: int
    hooks: StepHooks
    batches: list[RolloutBatch] = field(default_factory=list)
    """The batches that the learners have been given."""
    refs: list[Any] = field(default_factory=list)
    """The learners' answers to all of them."""
    last_refs: list[Any] = field(default_factory=list)
    """The learners' answers to the last of them, one for each learner."""
    began_at: float = field(default_factory=time.perf_counter)

    @property
    def has_all_batches(self) -> bool:
        return bool(self.batches) and self.batches[-1].is_last


class FullyAsyncTrainer:
    """Takes finished batches from the rollout side, and has the learners train on them.

    Subclasses may override `_compute_custom_metrics`; name them with `trainer.cls`.
    """

    def __init__(self, args: GRPOConfig, components: Components, message_queue: MessageQueue, timer: Timer) -> None:
        self._args = args
        self._components = components
        self._queue = message_queue
        self._timer = timer
        self._nonfinite = NonfiniteWatch(args.max_nonfinite_steps)
        self.global_steps = 0
        self.processed_samples = 0

    def begin_step(self, training_step: int, hooks: StepHooks) -> StepUnderWay:
        return StepUnderWay(training_step, hooks)

    def train(self, step: StepUnderWay, batch: RolloutBatch) -> None:
        """Let the learners begin to train on a batch of the step."""
        if not step.batches:
            step.hooks.before_training()
        step.last_refs = self._components.learners.async_train(step.training_step - 1, batch)
        step.refs += step.last_refs
        step.batches.append(batch)

    def end_step(self, step: StepUnderWay) -> TrainedStep:
        """Wait until the optimizer step is done."""
        with self._timer("learners"):
            # Wait for all partial batches: if one of them failed, the step lacks a part of its gradient.
            answers = self._components.wait(
                step.refs,
                subject=f"training step {step.training_step}",
                timeout_s=self._args.progress_timeout_s,
                limit="progress_timeout_s",
                on_poll=step.hooks.tell_news,
            )
            reports = answers[-len(step.last_refs) :]
        last = step.batches[-1]
        num_samples = sum(batch.num_samples for batch in step.batches)
        self.global_steps = step.training_step
        self.processed_samples += num_samples
        self._log_batch(last.metrics, num_samples)
        metrics = {
            **last.metrics,
            **merge_step_metrics(reports),
            "time/training": time.perf_counter() - step.began_at,
            **self._compute_custom_metrics(last),
        }
        num_tokens = int(last.metrics["val/num_step_tokens"])
        num_response_tokens = int(last.metrics["val/num_step_response_tokens"])
        tokens = [report[TOKENS] for report in reports if TOKENS in report]
        return TrainedStep(step.training_step, num_response_tokens, num_tokens - num_response_tokens, metrics, tokens)

    def check_finite(self, step: TrainedStep) -> None:
        """Log a step whose gradient was not finite. Raises `NonfiniteSteps` after too many such steps in a row."""
        self._nonfinite.check(step.training_step, step.metrics)

    def load_data_from_packing_thread(self, step: StepUnderWay) -> RolloutBatch:
        """The next batch of the step. After every `batch_timeout` seconds of waiting the log says what came back so far. It is a
        warning if something may be wrong (`BatchProgress.needs_a_warning`).

        Raises `TimeoutError` when no batch arrived for `progress_timeout_s`, and `Interrupted` if a signal comes. After either
        error the learners hold the weights of the step before.
        """
        training_step, number, hooks = step.training_step, len(step.batches), step.hooks
        deadline = time.monotonic() + self._args.progress_timeout_s
        num_results, unchanged_since = 0, time.monotonic()
        with self._timer("trainer_waiting_for_data"):
            while True:
                slice_s = max(0.0, min(self._args.batch_timeout, deadline - time.monotonic()))
                received = self._components.wait(
                    self._queue.get_ref(timeout=slice_s, max_batch_count=1),
                    subject=f"the batch of step {training_step}",
                    timeout_s=slice_s + 30.0,
                    interruptible=True,
                    watched=step.refs,
                    on_poll=hooks.on_idle,
                )
                if received:
                    break
                progress = hooks.describe_progress()
                if slice_s == 0:  # only after one more look, because the driver may have been stopped (SIGSTOP)
                    limit_s = self._args.progress_timeout_s
                    raise TimeoutError(
                        f"batch {training_step} is not ready: {progress}. Nothing came for {limit_s:g} s"
                    )
                if progress.num_results != num_results:
                    num_results, unchanged_since = progress.num_results, time.monotonic()
                is_odd = progress.needs_a_warning(time.monotonic() - unchanged_since)
                level = logging.WARNING if is_odd else logging.INFO
                logger.log(level, "step %d is being put together: %s", training_step, progress.brief)
        [item] = received
        batch = item.payload
        assert (batch.training_step, batch.number) == (training_step, number), f"{batch} came for step {training_step}"
        return batch

    def _log_batch(self, metrics: dict[str, Any], num_samples: int) -> None:
        ages = {"avg_age": metrics["avg_sample_age"], "max_age": metrics["max_sample_age"]}
        component_logger.info(processing_batch(num_samples, **ages))

    def _compute_custom_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """For subclasses: further metrics of a step, from its last batch. `batch.metrics` holds the metrics of the whole
        step, and `ray.get(batch.rank_data[0])` is the data of the first learner."""
        return {}

    def get_statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy."""
        return {"global_steps": self.global_steps, "processed_samples": self.processed_samples}
