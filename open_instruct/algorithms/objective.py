"""The objective of a micro-batch: a policy loss, its weights, and the KL to the reference policy.

All results are sums over trained tokens. The caller adds up the sums of micro-batches and ranks, and divides by the number of
tokens once. Shapes: B rows, T tokens.
"""

from collections.abc import Callable

import torch

from open_instruct.algorithms.kl import estimate_kl
from open_instruct.algorithms.losses import LossInputs
from open_instruct.algorithms.metric_merging import RATIO_SPREAD
from open_instruct.algorithms.sequences import sequence_sums


def make_loss_inputs(
    *,
    new_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
) -> LossInputs:
    """Inputs of a loss from (B, T) tensors, which may hold anything outside the mask, even inf and NaN. Only `new_logprobs` keeps
    its gradient."""

    def masked(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0)  # before exp, not after: the gradient of exp(inf) * 0 is NaN

    return LossInputs(
        new_logprobs=masked(new_logprobs),
        old_logprobs=masked(old_logprobs.detach()),
        behaviour_logprobs=masked(behaviour_logprobs.detach()),
        ref_logprobs=None if ref_logprobs is None else masked(ref_logprobs.detach()),
        advantages=masked(advantages),
        mask=mask,
        position_ids=position_ids,
    )


def compute_objective(
    inputs: LossInputs,
    loss: Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    *,
    beta: float,
    kl_estimator: int,
    weights: torch.Tensor | None = None,
    loss_weights: torch.Tensor | None = None,
    kl_weights: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    distillation: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy loss plus `beta` times the KL to the reference policy minus `entropy_coef` times the entropy plus `distillation`,
    summed over trained tokens.

    Args:
        loss: a `losses.Loss` with its options.
        kl_estimator: which of the estimates of `estimate_kl` enters the objective.
        weights: (B, T) factors of only the policy loss (see `compute_rho_correction`), without a gradient; None is 1 everywhere.
        loss_weights: (B, T) factors of all parts of the objective except the KL; None is 1 everywhere.
        kl_weights: (B, T) factors of the KL; None is 1 everywhere.
        entropy: (B, T) entropy of the policy at each token, with a gradient; needed if `entropy_coef` is not 0.
        distillation: (B, T) loss that pulls the policy towards a teacher, with a gradient; None without a teacher.

    Returns:
        The scalar objective, and detached float32 sums by metric name, which become means when divided by the token count: the
        parts of the objective (`loss/kl_avg` includes `beta`), the metrics of the loss, `val/ratio` and its spread, and with a
        reference the estimates `objective/kl0_avg` to `kl4_avg`.
    """
    mask, ratio = inputs.mask, inputs.ratio
    policy_loss, per_token = loss(inputs)
    if weights is not None:
        policy_loss = policy_loss * torch.where(mask, weights.detach(), 0)
    per_token = per_token | {"val/ratio": ratio, RATIO_SPREAD: (ratio - 1).square()}
    kl_loss = bonus = torch.zeros_like(policy_loss)
    if inputs.ref_logprobs is not None:
        kls = estimate_kl(inputs.new_logprobs - inputs.ref_logprobs, ratio)
        kl_loss = beta * kls[kl_estimator]
        per_token |= {f"objective/kl{i}_avg": kl for i, kl in enumerate(kls)}
    if entropy is not None:
        bonus = entropy_coef * torch.where(mask, entropy, 0)
    parts = [policy_loss, bonus, torch.zeros_like(policy_loss) if distillation is None else distillation]
    if loss_weights is not None:
        parts = [part * loss_weights for part in parts]
    policy_loss, bonus, distillation_loss = parts
    if kl_weights is not None:
        kl_loss = kl_loss * kl_weights
    total_loss = policy_loss + kl_loss - bonus + distillation_loss
    if distillation is not None:
        per_token["loss/distillation_avg"] = distillation_loss
    per_token |= {"loss/policy_avg": policy_loss, "loss/kl_avg": kl_loss, "loss/total_avg": total_loss}
    sums = {name: (values.detach() * mask).sum(dtype=torch.float32) for name, values in per_token.items()}
    return (total_loss * mask).sum(), sums


def weights_of_sequences(mask: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """(B, T) float: 1 / the number of trained tokens of a token's sequence. A sum with these weights is a sum of means."""
    return 1 / sequence_sums(mask.float(), sequence_ids).clamp(min=1)
