"""The loss `dppo_tv`: a trust region on the shift of a token's probability."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.option_limits import POSITIVE, limited

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class DppoTvOptions:
    """Algorithm"""

    dppo_delta_lower: float = limited(0.2, POSITIVE)
    """A token with a negative advantage has no gradient once its probability fell by more than this since it was sampled."""
    dppo_delta_higher: float = limited(0.2, POSITIVE)
    """A token with a positive advantage has no gradient once its probability rose by more than this since it was sampled."""
    dppo_ratio_cap: float = limited(20.0, POSITIVE)
    """Most that a token's ratio counts for."""


@LOSSES.register("dppo_tv", options=DppoTvOptions)
def dppo_tv_loss(inputs: LossInputs, options: DppoTvOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """DPPO with the binary total variation (arXiv:2602.04879): `-sg(min(r, cap)) A log p`, without tokens whose probability has
    moved too far in the direction of the advantage. With the policy's probability p and the engine's probability m at sampling,
    these are tokens with p - m above `dppo_delta_higher` where A > 0, below `-dppo_delta_lower` otherwise. A ratio cannot tell
    1e-5 -> 1e-4 from 0.1 -> 1; a shift can.

    `policy/clipfrac_avg` is the share of tokens outside the trust region.
    """
    shift = inputs.new_logprobs.detach().exp() - inputs.behaviour_logprobs.exp()
    is_outside = (shift > options.dppo_delta_higher).where(inputs.advantages > 0, shift < -options.dppo_delta_lower)
    weight = inputs.ratio.detach().clamp(max=options.dppo_ratio_cap) * ~is_outside
    return -weight * inputs.advantages * inputs.new_logprobs, {"policy/clipfrac_avg": is_outside}
