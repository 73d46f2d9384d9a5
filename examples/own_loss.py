r"""A loss of your own: TOPR, tapered off-policy REINFORCE (arXiv:2503.14286).

    python open_instruct/grpo_fast.py --config conf/tiny_sums.yaml --output_dir out/own_loss \
        --algorithm_modules examples/own_loss.py --loss_fn topr --topr_cap 1.0 --use_rho_correction False --async_steps 2

Good answers are imitated at full weight however old they are. Bad answers are pushed away only as far as the policy would still
give them: by their importance weight, at most `--topr_cap`. So an answer that the policy has given up costs nothing any more, and
cannot drive the log-probs to minus infinity.

The weight corrects for samples of older policies, so `--use_rho_correction False` turns the usual correction off.
All about losses, and about advantages of your own: docs/guides/algorithms.md.
"""

import math
from dataclasses import dataclass

import torch

from open_instruct.algorithms.losses import LOSSES, LossInputs
from open_instruct.algorithms.sequences import sequence_sums
from open_instruct.option_limits import POSITIVE, limited


@dataclass(kw_only=True)
class ToprOptions:
    """TOPR"""  # the heading of these options in --help

    topr_cap: float = limited(1.0, POSITIVE)
    """Most that the importance weight of an answer with a negative advantage counts for."""


@LOSSES.register("topr", options=ToprOptions)
def topr_loss(inputs: LossInputs, options: ToprOptions) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`-sg(w) A log p`, w = 1 where A > 0, else the ratio of the whole answer's probabilities p / m, at most `topr_cap`.

    Args:
        inputs: (B, T) tensors of a micro-batch, 0 on tokens that are not trained on. A row may hold several answers, which
            `inputs.sequence_ids` tells apart; p is the policy, m the engine that has sampled the tokens, A the advantage.

    Returns:
        The loss of each token, (B, T): neither summed nor averaged, because the division is by all tokens of the step, on all
        ranks (`--loss_denominator`). And metrics: a value of each token, whose mean over the step is reported.
    """
    log_ratio = sequence_sums(inputs.new_logprobs.detach() - inputs.behaviour_logprobs, inputs.sequence_ids)
    tapered = log_ratio.clamp(max=math.log(options.topr_cap)).exp()  # bounded before exp, which could be infinite
    weight = torch.where(inputs.advantages > 0, torch.ones_like(tapered), tapered)
    return -weight * inputs.advantages * inputs.new_logprobs, {"policy/topr_weight_avg": weight}
