"""The loss `sapo`: a soft gate in place of a clip."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.option_limits import POSITIVE, limited

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class SapoOptions:
    """Algorithm"""

    sapo_tau_pos: float = limited(1.0, POSITIVE)
    """How fast the gate closes as the ratio of a token with a positive advantage leaves 1."""
    sapo_tau_neg: float = limited(1.05, POSITIVE)
    """The same for a token with a negative advantage."""


@LOSSES.register("sapo", options=SapoOptions, denominator="sequence")
def sapo_loss(inputs: LossInputs, options: SapoOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """SAPO (arXiv:2511.20347): `-A (4 / tau) sigmoid(tau (r - 1))`. At r = 1 it has the slope of `-A r`; on both sides the slope
    falls off smoothly."""
    tau = inputs.ratio.new_full((), options.sapo_tau_neg).where(inputs.advantages <= 0, options.sapo_tau_pos)
    gate = (tau * (inputs.ratio - 1)).sigmoid() * 4 / tau
    return -inputs.advantages * gate, {}
