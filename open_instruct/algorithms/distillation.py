"""Distillation from a teacher, on text that the policy sampled (`--distillation_loss`).

At each position the teacher gives the log-probs of its K likeliest tokens and of the sampled token. Both losses pull the policy's
distribution towards the teacher's. Shapes: B rows, T tokens, K tokens of the teacher.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from open_instruct.algorithms.kl import MAX_LOG_RATIO
from open_instruct.algorithms.losses.base import check_shape
from open_instruct.registry import Entry, Registry

if TYPE_CHECKING:
    import torch

MAX_TAIL_WEIGHT = 10.0
"""Largest importance weight of a sampled token outside the teacher's K tokens. Without it the weight would have no bound."""


@dataclass(frozen=True)
class TeacherInputs:
    """What a distillation loss sees of one micro-batch. Values outside `mask` may be anything."""

    new_top_logprobs: "torch.Tensor"
    """(B, T, K): the policy's log-probs of the teacher's K tokens, with a gradient."""
    teacher_top_logprobs: "torch.Tensor"
    """(B, T, K): the teacher's log-probs of these tokens; -inf where the teacher named fewer than K."""
    new_logprobs: "torch.Tensor"
    """(B, T): the policy's log-prob of the sampled token, with a gradient."""
    teacher_logprobs: "torch.Tensor"
    """(B, T): the teacher's log-prob of the sampled token."""
    is_in_top: "torch.Tensor"
    """(B, T) bool: whether the sampled token is one of the K."""
    tail_weights: "torch.Tensor"
    """(B, T): the result of `importance_weights`."""
    mask: "torch.Tensor"
    """(B, T) bool: True on tokens that are trained on."""


def importance_weights(new_logprobs: "torch.Tensor", behaviour_logprobs: "torch.Tensor") -> "torch.Tensor":
    """(B, T): the policy's probability of each sampled token divided by the probability under the engine that sampled it, at most
    `MAX_TAIL_WEIGHT`; without a gradient."""
    return (new_logprobs.detach() - behaviour_logprobs).clamp(max=math.log(MAX_TAIL_WEIGHT)).exp()


DistillationLoss = Callable[[TeacherInputs, Any], "tuple[torch.Tensor, torch.Tensor]"]
"""`(inputs, options) -> (loss, kl)`: the loss of each token, (B, T), with a gradient, and an estimate of the KL that the loss
minimises. Values outside the mask are not used, but must be finite."""

DISTILLATION_LOSSES: Registry[DistillationLoss] = Registry("distillation loss", flag="distillation_loss")


def distillation_of_tokens(
    entry: "Entry[DistillationLoss]", inputs: TeacherInputs, options: Any
) -> "tuple[torch.Tensor, torch.Tensor]":
    """The result of a registered distillation loss. Raises `ValueError` unless it is a loss and a KL for each token."""
    result = entry.value(inputs, options)
    subject = f"the distillation loss {entry.name!r}"
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{subject} must give a pair: the loss and the KL of each token")
    loss, kl = result
    check_shape(loss, inputs, subject)
    check_shape(kl, inputs, f"{subject}: the KL")
    return loss, kl


@DISTILLATION_LOSSES.register("reverse_kl")
def reverse_kl(inputs: TeacherInputs, options: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """KL(policy ‖ teacher): exact over the teacher's K tokens, and sampled for all others.

    With p the policy, q the teacher, a the sampled token and r its importance weight, the loss has the gradient

        sum over the K tokens k of  p(k) (log p(k) - log q(k)) grad log p(k)
        + r (log p(a) - log q(a)) grad log p(a)   if a is none of the K

    On average over a this is the gradient of the whole KL, for every K, as long as no r is cut (`MAX_TAIL_WEIGHT`). K = 0 is the
    policy gradient with the reward log q(a) - log p(a); if K is the whole vocabulary, nothing is sampled. The factors before
    `grad` carry no gradient. Their gradient would add terms `grad p(k)`, whose sum is 0 over the vocabulary but not over K tokens
    (arXiv:2605.11182).
    """
    import torch

    is_present = inputs.mask[..., None] & inputs.teacher_top_logprobs.isfinite()
    new_top = torch.where(is_present, inputs.new_top_logprobs, 0)
    difference = _difference(new_top, torch.where(is_present, inputs.teacher_top_logprobs, 0))
    top_kl = torch.where(is_present, new_top.detach().exp() * difference, 0)
    is_tail = inputs.mask & ~inputs.is_in_top
    new_tail = torch.where(is_tail, inputs.new_logprobs, 0)
    weights = torch.where(is_tail, inputs.tail_weights, 0)
    tail_kl = weights * _difference(new_tail, torch.where(is_tail, inputs.teacher_logprobs, 0))
    kl = top_kl.sum(-1) + tail_kl
    surrogate = (top_kl * new_top).sum(-1) + tail_kl * new_tail
    return kl + surrogate - surrogate.detach(), kl


@DISTILLATION_LOSSES.register("forward_kl", needs_top_k=True)
def forward_kl(inputs: TeacherInputs, options: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """KL(teacher ‖ policy) over the teacher's K tokens: the sum of q(k) (log q(k) - log p(k)). The policy learns to cover all
    tokens that the teacher might give. Tokens outside the K are not in the sum, so the estimate is biased if K is small."""
    import torch

    is_present = inputs.mask[..., None] & inputs.teacher_top_logprobs.isfinite()
    teacher_top = torch.where(is_present, inputs.teacher_top_logprobs, 0)
    new_top = torch.where(is_present, inputs.new_top_logprobs, 0)
    kl = torch.where(is_present, teacher_top.exp() * (teacher_top - new_top), 0).sum(-1)
    return kl, kl.detach()


def _difference(logprobs: "torch.Tensor", teacher_logprobs: "torch.Tensor") -> "torch.Tensor":
    """log p - log q without a gradient, clamped to ±`MAX_LOG_RATIO`."""
    return (logprobs - teacher_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
