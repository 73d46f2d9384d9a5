"""Policy losses by name (`--loss_fn`).

A loss is a function of `LossInputs` and of its own options. To add one, write a file like this and name it with
`--algorithm_modules my_loss.py --loss_fn reinforce`:

    from open_instruct.algorithms.losses import LOSSES

    @LOSSES.register("reinforce")
    def reinforce(inputs, options):
        return -inputs.advantages * inputs.new_logprobs, {}
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from open_instruct.algorithms.sequences import number_sequences
from open_instruct.registry import Registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch. All tensors are (B, T), and 0 on tokens that are not trained on."""

    new_logprobs: "torch.Tensor"
    """Log-probs of the policy as it is; the only tensor with a gradient."""
    old_logprobs: "torch.Tensor"
    """Log-probs of the policy before the first update of the training step, the denominator of the ratio."""
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
    def ratio(self) -> "torch.Tensor":
        """Probability under the new policy divided by that under the old policy."""
        return (self.new_logprobs - self.old_logprobs).exp()

    @cached_property
    def sequence_ids(self) -> "torch.Tensor":
        """(B, T) int64: tokens of one sequence have one number, from 0 over the whole micro-batch."""
        return number_sequences(self.position_ids)


Loss = Callable[[LossInputs, Any], "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""`(inputs, options) -> (loss, metrics)`: the loss of each token, (B, T), and by metric name a value of each token, (B, T), whose
mean over the trained tokens of the step is reported. Values outside the mask are not used, but must be finite."""

LOSSES: Registry[Loss] = Registry("loss", flag="loss_fn")


@dataclass(kw_only=True)
class ClipOptions:
    """Algorithm"""

    clip_lower: float = 0.2
    """The ratio is clipped at 1 - clip_lower."""
    clip_higher: float = 0.272
    """The ratio is clipped at 1 + clip_higher."""


@LOSSES.register("dapo", options=ClipOptions)
def dapo_loss(inputs: LossInputs, options: ClipOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """PPO's clipped objective with separate bounds below and above (DAPO, arXiv:2503.14476).

    `policy/clipfrac_avg` is the share of tokens whose clipped term is the larger term, so that these tokens have no gradient.
    """
    unclipped = -inputs.advantages * inputs.ratio
    clipped = -inputs.advantages * inputs.ratio.clamp(1 - options.clip_lower, 1 + options.clip_higher)
    return unclipped.maximum(clipped), {"policy/clipfrac_avg": clipped > unclipped}
