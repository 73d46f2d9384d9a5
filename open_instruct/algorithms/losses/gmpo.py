"""The loss `gmpo`: the geometric mean of ratios that are clipped token by token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.option_limits import POSITIVE, limited

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class GmpoOptions:
    """Algorithm"""

    gmpo_clip: float = limited(0.4, POSITIVE)
    """The logarithm of each token's ratio is clipped at -gmpo_clip and gmpo_clip."""


@LOSSES.register("gmpo", options=GmpoOptions, denominator="sequence")
def gmpo_loss(inputs: LossInputs, options: GmpoOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """GMPO (arXiv:2507.20673): `-A exp(mean of clipped log r)` for a response. As in PPO, only the side that the advantage would
    push further is clipped: above where A > 0, below where A < 0. Each token has this value as its loss and its own part of the
    response's gradient as its gradient, so that a correction can weight tokens or leave them out.

    `policy/clipfrac_avg` is the share of tokens whose ratio is clipped.
    """
    log_ratio = inputs.log_ratio
    upper, lower = log_ratio.clamp(max=options.gmpo_clip), log_ratio.clamp(min=-options.gmpo_clip)
    clipped_log_ratio = upper.where(inputs.advantages > 0, lower)
    log_s = inputs.sequence_mean(clipped_log_ratio.detach())
    loss = -inputs.advantages * (log_s + clipped_log_ratio - clipped_log_ratio.detach()).exp()
    return loss, {"policy/clipfrac_avg": clipped_log_ratio != log_ratio}
