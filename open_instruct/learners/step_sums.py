"""The sums of a training step on each rank, and the metrics that are made from the sums of all ranks."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from open_instruct.algorithms.metric_merging import finish_logprob_difference, finish_ratio_variance

if TYPE_CHECKING:
    import torch

    from open_instruct.learners.policy_loss import MicroBatchLoss

logger = logging.getLogger(__name__)

TOKENS = "tokens"
"""Key of a rank's report: reference to what `StepSums.token_values` gives. Absent without a record."""
NONFINITE_STEPS = "optim/nonfinite_steps"
"""Metric: optimizer steps of a training step that were left out because the gradient was not finite."""


@dataclass
class StepSums:
    """The sums of one training step on one rank."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    mismatches: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the optimizer steps that were made."""
    num_nonfinite: int = 0
    """Optimizer steps that were left out because the gradient was not finite."""
    num_empty: int = 0
    """Optimizer steps that were left out because no token was trained on."""
    num_tokens: int = 0
    divisor: float = 0.0
    """The divisors of the summed loss, added up over optimizer steps; the same on every rank."""
    lr: float = 0.0
    seconds: float = 0.0
    optimizer_s: float = 0.0
    _tokens: "list[MicroBatchLoss]" = field(default_factory=list)

    def add(self, sums: "Mapping[str, torch.Tensor]", mismatch: "Mapping[str, torch.Tensor] | None") -> None:
        for name, value in sums.items():
            self.sums[name] += float(value)
        if mismatch is not None:
            self.mismatches.append({name: float(value) for name, value in mismatch.items()})

    def remember_tokens(self, losses: "Sequence[MicroBatchLoss]") -> None:
        """Keep the log-probs and importance weights of the trained tokens, for the record."""
        self._tokens += losses

    def token_values(self) -> dict[str, np.ndarray | None]:
        """`logprobs` and `correction`, (trained tokens,) float32 in the order of the micro-batches. The first are
        those of `MicroBatchLoss`, of the first epoch. None: the run has no correction."""
        corrections = [loss.correction for loss in self._tokens if loss.correction is not None]
        return {
            "logprobs": _joined([loss.logprobs for loss in self._tokens]),
            "correction": _joined(corrections) if corrections else None,
        }

    def note_update(self, grad_norm: float | None) -> None:
        """Count an optimizer step that was made. None: the step was left out, because the gradient was not finite."""
        if grad_norm is None:
            self.num_nonfinite += 1
        else:
            self.grad_norms.append(grad_norm)

    def report(
        self, num_epochs: int, *, memory_in_use_bytes: int, peak_memory_bytes: int, is_counted: bool = True
    ) -> dict[str, Any]:
        """The sums of one rank, in the form that `merge_step_metrics` takes. Without `is_counted` the sums over tokens are left
        out, because another rank has summed over the same tokens."""
        return {
            "sums": dict(self.sums) if is_counted else {},
            "num_tokens": self.num_tokens * num_epochs if is_counted else 0,
            "divisor": self.divisor,
            "mismatches": self.mismatches if is_counted else [],
            "grad_norm": float(np.mean(self.grad_norms)) if self.grad_norms else None,
            "num_nonfinite": self.num_nonfinite,
            "num_empty": self.num_empty,
            "lr": self.lr,
            "seconds": self.seconds,
            "optimizer_s": self.optimizer_s,
            "memory_in_use_bytes": memory_in_use_bytes,
            "peak_memory_bytes": peak_memory_bytes,
        }


def _joined(tensors: "Sequence[torch.Tensor]") -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *(tensor.cpu().numpy() for tensor in tensors)])


def merge_step_metrics(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics from every rank's sums. `loss/…` are the sums that were minimised, divided as `--loss_denominator` says, and
    averaged over the optimizer steps; every other mean is over the trained tokens of all ranks.

    Metrics that are not known are left out: means where no token was trained on, and the gradient's norm where no optimizer step
    was made.
    """
    metrics = _token_means(reports)
    first = reports[0]  # ranks make and leave out the same optimizer steps
    if first["grad_norm"] is not None:
        metrics["optim/grad_norm"] = first["grad_norm"]
    metrics[NONFINITE_STEPS] = first["num_nonfinite"]
    metrics["optim/skipped_steps"] = first["num_nonfinite"] + first["num_empty"]
    metrics["lr"] = first["lr"]
    metrics["time/learner_compute"] = max(report["seconds"] for report in reports)
    metrics["time/optimizer"] = max(report["optimizer_s"] for report in reports)
    metrics["time/forward_backward"] = max(report["seconds"] - report["optimizer_s"] for report in reports)
    metrics["memory/learner_bytes_max"] = max(report["memory_in_use_bytes"] for report in reports)
    metrics["memory/learner_peak_bytes"] = max(report["peak_memory_bytes"] for report in reports)
    return metrics


def _token_means(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    num_tokens = sum(report["num_tokens"] for report in reports)
    if num_tokens == 0:
        return {}
    names = {name for report in reports for name in report["sums"]}
    means = {}
    for name in sorted(names):
        divisor = reports[0]["divisor"] if name.startswith("loss/") else num_tokens
        means[name] = sum(report["sums"].get(name, 0.0) for report in reports) / divisor
    mismatches = [mismatch for report in reports for mismatch in report["mismatches"]]
    return finish_ratio_variance(means) | (finish_logprob_difference(mismatches) if mismatches else {})


class NonfiniteSteps(RuntimeError):
    """The gradient was not finite in too many training steps in a row."""


class NonfiniteWatch:
    """Logs an error when a step's gradient was not finite, and ends the run when this happens too often in a row.

    Args:
        max_steps: the run ends after this many training steps in a row with such an optimizer step: with 10, at the tenth.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._in_a_row = 0

    def check(self, training_step: int, metrics: Mapping[str, Any]) -> None:
        """Check the metrics of a training step. Raises `NonfiniteSteps` at the `max_steps`-th such step in a row."""
        num_left_out = metrics[NONFINITE_STEPS]
        self._in_a_row = self._in_a_row + 1 if num_left_out else 0
        if not num_left_out:
            return
        logger.error(
            "step %d: the gradient of %d optimizer steps was not finite, so they were left out and the weights stay as they "
            "are. Metrics that are not finite: %s",
            training_step,
            num_left_out,
            ", ".join(_not_finite(metrics)) or "none",
        )
        if self._in_a_row >= self._max_steps:
            raise NonfiniteSteps(
                f"the gradient was not finite in {self._in_a_row} training steps in a row, the last of them step {training_step} "
                "(--max_nonfinite_steps). The weights are those of the last step with a finite gradient. Metrics that are not "
                f"finite: {', '.join(_not_finite(metrics)) or 'none'}. Try a lower --learning_rate, or --model_dtype float32."
            )


def _not_finite(metrics: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value))
