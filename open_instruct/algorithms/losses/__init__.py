"""Policy losses by name (`--loss_fn`).

A loss is a function of `LossInputs` and of its own options. To add one, write a file like this and name it with
`--algorithm_modules my_loss.py --loss_fn reinforce`:

    from open_instruct.algorithms.losses import LOSSES

    @LOSSES.register("reinforce")
    def reinforce(inputs, options):
        return -inputs.advantages * inputs.new_logprobs, {}

`denominator="sequence"` in the registration sets the loss's default for `--loss_denominator`. Otherwise the loss is by default
divided by the number of tokens.
"""

from open_instruct.algorithms.losses.base import LOSSES, Loss, LossInputs, check_shape, losses_of_tokens
from open_instruct.algorithms.losses.cispo import cispo_loss
from open_instruct.algorithms.losses.clipped_ratio import ClipOptions, dapo_loss, dr_grpo_loss, grpo_loss
from open_instruct.algorithms.losses.dppo_tv import DppoTvOptions, dppo_tv_loss
from open_instruct.algorithms.losses.gmpo import GmpoOptions, gmpo_loss
from open_instruct.algorithms.losses.gspo import GspoOptions, gspo_loss
from open_instruct.algorithms.losses.sapo import SapoOptions, sapo_loss

__all__ = [
    "LOSSES",
    "ClipOptions",
    "DppoTvOptions",
    "GmpoOptions",
    "GspoOptions",
    "Loss",
    "LossInputs",
    "SapoOptions",
    "check_shape",
    "cispo_loss",
    "dapo_loss",
    "dppo_tv_loss",
    "dr_grpo_loss",
    "gmpo_loss",
    "grpo_loss",
    "gspo_loss",
    "losses_of_tokens",
    "sapo_loss",
]
