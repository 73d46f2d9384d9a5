"""The loss `gspo`: one ratio per response."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.option_limits import POSITIVE, limited

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class GspoOptions:
    """Algorithm"""

    gspo_clip_lower: float = limited(3e-4, POSITIVE)
    """The ratio of a response is clipped at 1 - gspo_clip_lower."""
    gspo_clip_higher: float = limited(4e-4, POSITIVE)
    """The ratio of a response is clipped at 1 + gspo_clip_higher."""


@LOSSES.register("gspo", options=GspoOptions, denominator="sequence")
def gspo_loss(inputs: LossInputs, options: GspoOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """GSPO (arXiv:2507.18071): the clipped objective with s, the geometric mean of the ratios of a response, in place of each
    token's ratio. The gradient is that of GSPO-token, `sg(s) p / sg(p)`, which equals GSPO's if all tokens of a response have the
    same advantage.

    `policy/clipfrac_avg` is the share of tokens whose response is clipped.
    """
    log_s = inputs.sequence_mean(inputs.log_ratio.detach())
    ratio = (log_s + inputs.new_logprobs - inputs.new_logprobs.detach()).exp()
    plain_loss = -inputs.advantages * ratio
    clipped_loss = -inputs.advantages * ratio.clamp(1 - options.gspo_clip_lower, 1 + options.gspo_clip_higher)
    return plain_loss.maximum(clipped_loss), {"policy/clipfrac_avg": clipped_loss > plain_loss}
