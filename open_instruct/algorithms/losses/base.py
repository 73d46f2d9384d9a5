"""The interface of a policy loss, and the table of losses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from open_instruct.algorithms.sequences import number_sequences, sequence_means
from open_instruct.registry import Entry, Registry

if TYPE_CHECKING:
    import torch


MAX_LOG_RATIO = 44.0
"""Beyond this log-ratio the square of the ratio is infinite in float32, and 0 times its gradient is NaN."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch. All tensors are (B, T), and 0 on tokens that are not trained on."""

    new_logprobs: "torch.Tensor"
    """Log-probs of the current policy; the only tensor with a gradient."""
    old_logprobs: "torch.Tensor"
    """Log-probs of the policy before the first update of the training step. They are the denominator of the ratio."""
    behaviour_logprobs: "torch.Tensor"
    """Log-probs of the engine that sampled the tokens, as the engine reported them."""
    advantages: "torch.Tensor"
    mask: "torch.Tensor"
    """Bool: True on tokens that are trained on."""
    position_ids: "torch.Tensor"
    """Positions within the sequence. Where they do not increase along a row, another sequence begins."""
    ref_logprobs: "torch.Tensor | None" = None
    """Log-probs of the reference policy; None without a reference policy."""

    @cached_property
    def log_ratio(self) -> "torch.Tensor":
        """Log-prob under the new policy minus log-prob under the old policy, clamped to ±`MAX_LOG_RATIO`."""
        return (self.new_logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @cached_property
    def ratio(self) -> "torch.Tensor":
        """Probability under the new policy divided by probability under the old policy."""
        return self.log_ratio.exp()

    @cached_property
    def sequence_ids(self) -> "torch.Tensor":
        """(B, T) int64: the number of each token's sequence, counted from 0 over the whole micro-batch."""
        return number_sequences(self.position_ids)

    def sequence_mean(self, values: "torch.Tensor") -> "torch.Tensor":
        """(B, T): at each token the mean of `values` over the trained tokens of its sequence. `values` must be 0 elsewhere."""
        return sequence_means(values, self.mask, self.sequence_ids)


Loss = Callable[[LossInputs, Any], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""`(inputs, options) -> (loss, metrics)`: the loss of each token, (B, T), and by metric name a value of each token, (B, T), whose
mean over the trained tokens of the step is reported. Values outside the mask are not used, but must be finite."""

LOSSES: Registry[Loss] = Registry("loss", flag="loss_fn")


def losses_of_tokens(
    entry: "Entry[Loss]", inputs: LossInputs, options: Any
) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """The result of a registered loss.

    Raises:
        ValueError: the result is not one number for each token. Without this check torch would broadcast it silently.
    """
    result = entry.value(inputs, options)
    subject = f"the loss {entry.name!r}"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise ValueError(f"{subject} must give a pair: the loss of each token, and metrics by name, {{}} for none")
    loss, metrics = result
    check_shape(loss, inputs, subject)
    for name, values in metrics.items():
        check_shape(values, inputs, f"{subject}: the metric {name!r}")
    return loss, metrics


def check_shape(values: Any, inputs: Any, subject: str) -> None:
    """Raises `ValueError` unless `values` is a tensor with a number for each token. `inputs` have a `mask`, (B, T)."""
    import torch

    shape = tuple(inputs.mask.shape)
    if not isinstance(values, torch.Tensor):
        raise ValueError(
            f"{subject} must be a tensor with a number for each token, here {shape}, got {type(values).__name__}"
        )
    if tuple(values.shape) != shape:
        values_shape = tuple(values.shape) if values.shape else "one number"
        raise ValueError(
            f"{subject} must be a tensor with a number for each token, here {shape}, got {values_shape}. Take no sum or mean"
        )
