"""Losses that clip the ratio of each token: `dapo`, `grpo` and `dr_grpo`, with a dual clip on request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.option_limits import NOT_NEGATIVE, SHARE, Limits, limited

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class ClipOptions:
    """Algorithm"""

    clip_lower: float = limited(0.2, SHARE)
    """The ratio is clipped at 1 - clip_lower."""
    clip_higher: float = limited(0.272, NOT_NEGATIVE)
    """The ratio is clipped at 1 + clip_higher. The losses grpo and dr_grpo clip at 1 + clip_lower instead."""
    clip_ratio_c: float | None = limited(None, Limits(1, low_itself=False))
    """With a negative advantage the ratio counts as this value at most (dual clip), so that a bad token which became much
    likelier cannot dominate a step. A number above 1, such as 3; by default there is no such limit."""


@LOSSES.register("dapo", options=ClipOptions)
def dapo_loss(inputs: LossInputs, options: ClipOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """PPO's clipped objective (arXiv:1707.06347) with separate bounds below and above (DAPO, arXiv:2503.14476), as a mean over
    tokens. `max(-A r, -A clip(r, 1 - clip_lower, 1 + clip_higher))` for the advantage A and the ratio r; with a dual clip
    (arXiv:1912.09729) at most `-A clip_ratio_c` where A < 0.

    `policy/clipfrac_avg` is the share of tokens whose clipped term is the larger term, so that these tokens have no gradient;
    `policy/dual_clipfrac_avg` is the share of tokens that the dual clip leaves without a gradient.
    """
    return _clipped(inputs, options.clip_lower, options.clip_higher, options.clip_ratio_c)


@LOSSES.register("grpo", options=ClipOptions, denominator="sequence", ignores=("clip_higher",))
def grpo_loss(inputs: LossInputs, options: ClipOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """The loss of GRPO (arXiv:2402.03300): clipped at 1 ± clip_lower, averaged over the tokens of each response, then over
    responses."""
    return _clipped(inputs, options.clip_lower, options.clip_lower, options.clip_ratio_c)


@LOSSES.register("dr_grpo", options=ClipOptions, denominator="constant", ignores=("clip_higher",))
def dr_grpo_loss(inputs: LossInputs, options: ClipOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """The loss of Dr. GRPO (arXiv:2503.20783): `grpo`, divided by the length of the longest possible response instead of each
    response's own length, so a long wrong answer is not punished less per token than a short one. Use centered advantages."""
    return _clipped(inputs, options.clip_lower, options.clip_lower, options.clip_ratio_c)


def _clipped(
    inputs: LossInputs, lower: float, higher: float, dual: float | None
) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    plain_loss = -inputs.advantages * inputs.ratio
    clipped_loss = -inputs.advantages * inputs.ratio.clamp(1 - lower, 1 + higher)
    loss = plain_loss.maximum(clipped_loss)
    metrics = {"policy/clipfrac_avg": clipped_loss > plain_loss}
    if dual is not None:
        exceeds = (inputs.advantages < 0) & (inputs.ratio > dual)
        loss = loss.where(~exceeds, -inputs.advantages * dual)
        metrics["policy/dual_clipfrac_avg"] = exceeds
    return loss, metrics
