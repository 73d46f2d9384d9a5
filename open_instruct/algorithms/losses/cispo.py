"""The loss `cispo`: importance weights are bounded, and no token loses its gradient."""

from typing import TYPE_CHECKING

from open_instruct.algorithms.losses.base import LOSSES, LossInputs
from open_instruct.algorithms.losses.clipped_ratio import ClipOptions

if TYPE_CHECKING:
    import torch


@LOSSES.register("cispo", options=ClipOptions, ignores=("clip_lower", "clip_ratio_c"))
def cispo_loss(inputs: LossInputs, options: ClipOptions) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """CISPO (MiniMax-M1, arXiv:2506.13585): `-sg(min(r, 1 + clip_higher)) A log p`. Every token keeps a gradient. Its weight, a
    constant (sg), is bounded from above. There is no lower bound, as in the paper.

    `policy/clipfrac_avg` is the share of tokens whose weight was reduced to the bound.
    """
    weight = inputs.ratio.detach().clamp(max=1 + options.clip_higher)
    return -weight * inputs.advantages * inputs.new_logprobs, {"policy/clipfrac_avg": weight < inputs.ratio}
