"""What a training step adds up on each rank, and the metrics that the sums of all ranks become."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from open_instruct.grpo_utils import finish_logprob_difference, finish_ratio_variance


@dataclass
class StepSums:
    """What a training step adds up on one rank."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    mismatches: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    lr: float = 0.0
    seconds: float = 0.0
    optimizer_s: float = 0.0

    def add(self, sums: Mapping[str, torch.Tensor], mismatch: Mapping[str, torch.Tensor] | None) -> None:
        for name, value in sums.items():
            self.sums[name] += float(value)
        if mismatch is not None:
            self.mismatches.append({name: float(value) for name, value in mismatch.items()})

    def report(self, *, num_epochs: int, memory_in_use_bytes: int) -> dict[str, Any]:
        """What `merge_step_metrics` takes from one rank."""
        return {
            "sums": dict(self.sums),
            "num_tokens": self.num_tokens * num_epochs,
            "mismatches": self.mismatches,
            "grad_norm": float(np.mean(self.grad_norms)) if self.grad_norms else 0.0,
            "lr": self.lr,
            "seconds": self.seconds,
            "optimizer_s": self.optimizer_s,
            "memory_in_use_bytes": memory_in_use_bytes,
        }


def merge_step_metrics(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One set of metrics from every rank's sums: each mean is over the trained tokens of all ranks."""
    num_tokens = max(sum(report["num_tokens"] for report in reports), 1)
    names = {name for report in reports for name in report["sums"]}
    metrics = {name: sum(report["sums"].get(name, 0.0) for report in reports) / num_tokens for name in sorted(names)}
    metrics = finish_ratio_variance(metrics)
    metrics |= finish_logprob_difference([mismatch for report in reports for mismatch in report["mismatches"]])
    metrics["optim/grad_norm"] = reports[0]["grad_norm"]
    metrics["lr"] = reports[0]["lr"]
    metrics["time/training"] = max(report["seconds"] for report in reports)
    metrics["time/optimizer"] = max(report["optimizer_s"] for report in reports)
    metrics["time/forward_backward"] = max(report["seconds"] - report["optimizer_s"] for report in reports)
    metrics["memory/learner_bytes_max"] = max(report["memory_in_use_bytes"] for report in reports)
    return metrics
