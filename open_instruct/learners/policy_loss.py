"""The loss of a micro-batch: forward passes, the algorithm's loss per token, corrections, KL penalty, metric sums."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from open_instruct.algorithms.corrections import RhoOptions, compute_rho_correction, off_policy_sequence_mask
from open_instruct.algorithms.denominators import SEQUENCE, Scales
from open_instruct.algorithms.distillation import (
    DISTILLATION_LOSSES,
    TeacherInputs,
    distillation_of_tokens,
    importance_weights,
)
from open_instruct.algorithms.losses import LOSSES, LossInputs, losses_of_tokens
from open_instruct.algorithms.mismatch import logprob_difference_sums
from open_instruct.algorithms.objective import compute_objective, make_loss_inputs, weights_of_sequences
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import CollatedBatchData, MiniBatch
from open_instruct.registry import options_of

UNSCALED = Scales()
"""All parts of the loss have one denominator."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of a micro-batch."""

    loss: torch.Tensor
    """Summed over trained tokens, with its gradient."""
    sums: dict[str, torch.Tensor]
    """Metrics, summed over trained tokens."""
    mismatch: dict[str, torch.Tensor]
    """Sums of the differences between the learner's log-probs and the engine's."""
    logprobs: torch.Tensor
    """(trained tokens,) float32, without gradient, row by row: before the first update of the step. With `use_vllm_logprobs` that
    is not computed, and they are those before the update itself."""
    correction: torch.Tensor | None  # (trained tokens,) float32: importance weights; None without a correction

    def without_graph(self) -> "MicroBatchLoss":
        """The same numbers without the graph of the backward pass, and so without its memory."""
        return replace(self, loss=self.loss.detach())


class PolicyLoss:
    """Computes losses and log-probs of `engine`, the DeepSpeed engine of the policy.

    Args:
        engine: called as `LogProbModel.forward`.
        reference: the reference model, called in the same way; None without a KL penalty.
        device: the device for the tensors of a micro-batch.
    """

    def __init__(self, args: GRPOConfig, engine: Any, reference: Any | None, device: torch.device) -> None:
        self._args = args
        self._engine = engine
        self._reference = reference
        self._device = device
        self._loss_fn = LOSSES[args.loss_fn]
        self._loss_options = options_of(args, self._loss_fn.options)
        self._distillation_loss = DISTILLATION_LOSSES[args.distillation_loss]
        self._distillation_options = options_of(args, self._distillation_loss.options)

    def compute(
        self, micro_batch: CollatedBatchData, old_logprobs: torch.Tensor | None, *, scales: Scales = UNSCALED
    ) -> MicroBatchLoss:
        """The loss of a micro-batch and what is told of it.

        `old_logprobs`, (rows, tokens - 1), are the log-probs before the first update of the step. None means that no update was
        made yet, so the policy itself is the old policy.
        """
        args = self._args
        tensors = self._to_tensors(micro_batch)
        mask = tensors["response_masks"][:, 1:]
        vllm_logprobs = tensors["vllm_logprobs"][:, 1:]
        new_logprobs, entropy, top_logprobs = self._forward(self._engine, tensors, tensors.get("teacher_top_ids"))
        before_update = new_logprobs.detach() if old_logprobs is None else old_logprobs
        old_logprobs = vllm_logprobs if args.use_vllm_logprobs else before_update
        positions = tensors["position_ids"][:, 1:]
        weights, rho_sums = self._correction(tensors, new_logprobs, old_logprobs)
        inputs = make_loss_inputs(
            new_logprobs=new_logprobs,
            old_logprobs=old_logprobs,
            behaviour_logprobs=vllm_logprobs,
            ref_logprobs=self._ref_logprobs(tensors),
            advantages=tensors["advantages"][:, 1:],
            mask=mask,
            position_ids=positions,
        )
        distillation, teacher_sums = self._distillation(tensors, inputs, top_logprobs)
        loss, sums = compute_objective(
            inputs,
            lambda inputs: losses_of_tokens(self._loss_fn, inputs, self._loss_options),
            beta=args.beta * scales.kl,
            kl_estimator=args.kl_estimator,
            weights=weights,
            loss_weights=_weights(args.denominator, tensors, inputs),
            kl_weights=_weights(args.denominator_of_kl, tensors, inputs),
            entropy=entropy if args.entropy_coef else None,
            entropy_coef=args.entropy_coef,
            distillation=distillation,
        )
        sums |= rho_sums | teacher_sums
        if "ce_masks" in tensors:
            cross_entropies = -torch.where(tensors["ce_masks"][:, 1:], new_logprobs, 0)
            if "loss_weights" in tensors:
                cross_entropies = cross_entropies * tensors["loss_weights"][:, 1:]
            cross_entropy = scales.ce * cross_entropies.sum()
            loss = loss + cross_entropy
            sums["loss/ce_avg"] = cross_entropy.detach()
            sums["loss/total_avg"] = sums["loss/total_avg"] + cross_entropy.detach()
        sums["policy/entropy_avg"] = (entropy.detach() * mask).sum()
        mismatch = logprob_difference_sums(new_logprobs.detach(), vllm_logprobs, mask)
        correction = None if weights is None else weights.detach()[mask].float()
        return MicroBatchLoss(loss, sums, mismatch, before_update[mask].float(), correction)

    def old_logprobs(self, mini_batches: Sequence[MiniBatch]) -> list[list[torch.Tensor]] | None:
        """Log-probs before the first update of the step, per mini- and micro-batch. None where they are not needed.

        With a single update the policy itself is the old policy, so the ratio is 1 and nothing is clipped. With
        `use_vllm_logprobs` the engine's log-probs take their place.
        """
        if self._args.num_epochs * len(mini_batches) == 1 or self._args.use_vllm_logprobs:
            return None
        with torch.no_grad():
            return [
                [self._forward(self._engine, self._to_tensors(micro))[0] for micro in mini.micro_batches]
                for mini in mini_batches
            ]

    @torch.no_grad()
    def score(self, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        """(R,) float32 log-probs of a response of R tokens after its prompt."""
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None].to(self._device)
        positions = torch.arange(ids.shape[1], device=self._device)[None]
        logprobs, _, _ = self._engine(ids, positions, self._args.temperature)
        return logprobs[0, len(prompt) - 1 :].float().cpu().numpy()

    def _forward(
        self, model: Any, tensors: dict[str, torch.Tensor], other_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token_mask = tensors["response_masks"]
        if "ce_masks" in tensors:
            token_mask = token_mask | tensors["ce_masks"]
        return model(
            tensors["query_responses"],
            tensors["position_ids"],
            self._args.temperature,
            other_ids,
            token_mask,
            tensors.get("segments"),
            tensors.get("branches"),
            tensors.get("predictors"),
        )

    def _correction(
        self, tensors: dict[str, torch.Tensor], new_logprobs: torch.Tensor, old_logprobs: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Importance weights of tokens that another policy sampled, (rows, tokens - 1) or None, and metric sums."""
        args, weights, sums = self._args, None, {}
        mask, vllm_logprobs, advantages, positions = (
            tensors[name][:, 1:] for name in ("response_masks", "vllm_logprobs", "advantages", "position_ids")
        )
        if args.corrects_off_policy:
            options = _rho_options(args)
            weights, sums = compute_rho_correction(
                old_logprobs, vllm_logprobs, mask, positions, options, advantages=advantages
            )
        if (threshold := args.off_policy_mask_threshold) is not None:
            keep = off_policy_sequence_mask(new_logprobs, vllm_logprobs, advantages, mask, positions, threshold)
            sums["val/off_policy_drop_frac"] = (~keep & mask).sum(dtype=torch.float32)
            weights = keep.float() if weights is None else weights * keep
        return weights, sums

    def _distillation(
        self,
        tensors: dict[str, torch.Tensor],
        inputs: LossInputs,
        top_logprobs: torch.Tensor,
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Loss of each token against the teacher, (rows, tokens - 1), and metric sums; None without a teacher. The corrections of
        the policy loss do not apply to it.

        Args:
            top_logprobs: (rows, tokens - 1, K), the policy's log-probs of the teacher's tokens.
        """
        if "teacher_logprobs" not in tensors:
            return None, {}
        sampled, top_ids, teacher_top = (
            tensors[name][:, 1:] for name in ("query_responses", "teacher_top_ids", "teacher_top_logprobs")
        )
        loss, kl = distillation_of_tokens(
            self._distillation_loss,
            TeacherInputs(
                new_top_logprobs=top_logprobs,
                teacher_top_logprobs=teacher_top,
                new_logprobs=inputs.new_logprobs,
                teacher_logprobs=tensors["teacher_logprobs"][:, 1:],
                is_in_top=((top_ids == sampled[..., None]) & teacher_top.isfinite()).any(-1),
                tail_weights=importance_weights(inputs.new_logprobs, inputs.behaviour_logprobs),
                mask=inputs.mask,
            ),
            self._distillation_options,
        )
        per_token = {
            "objective/teacher_kl_avg": kl.detach(),
            "val/teacher_top_k_mass": teacher_top.exp().sum(-1),
        }
        sums = {
            name: torch.where(inputs.mask, values, 0).sum(dtype=torch.float32) for name, values in per_token.items()
        }
        return self._args.distillation_coef * loss, sums

    def _ref_logprobs(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._forward(self._reference, tensors)[0]

    def _to_tensors(self, micro_batch: CollatedBatchData) -> dict[str, torch.Tensor]:
        """Copy the arrays to tensors, because arrays from Ray are read-only. Ids become int64, other dtypes stay; None is left
        out."""
        arrays = {name: array for name, array in vars(micro_batch).items() if array is not None}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        for name in ("query_responses", "position_ids"):
            tensors[name] = tensors[name].long()
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def _rho_options(args: GRPOConfig) -> RhoOptions:
    """How to weight tokens that were sampled with other weights or other kernels."""
    return RhoOptions(
        clamp_lower=args.rho_clamp_lower_bound,
        clamp_upper=args.rho_clamp_upper_bound,
        mask_lower=args.rho_mask_lower_bound,
        mask_upper=args.rho_mask_upper_bound,
        level=args.rho_level,
        sequence_level=args.rho_mask_sequence_level,
        tv_divergence=args.rho_mask_tv_divergence,
        as_in_open_instruct=args.rho_as_in_open_instruct,
    )


def _weights(denominator: float | str, tensors: dict[str, torch.Tensor], inputs: LossInputs) -> torch.Tensor | None:
    """(B, T - 1) factors of each token's loss, from the weights of samples and the denominator; None is 1 everywhere."""
    weights = tensors["loss_weights"][:, 1:] if "loss_weights" in tensors else None
    if denominator != SEQUENCE:
        return weights
    if "conversation_tokens" in tensors:
        sequence_weights = 1 / tensors["conversation_tokens"][:, 1:].clamp(min=1)
    else:
        sequence_weights = weights_of_sequences(inputs.mask, inputs.sequence_ids)
    return sequence_weights if weights is None else weights * sequence_weights
