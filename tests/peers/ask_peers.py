"""Asks TRL, verl and Liger for what `peer_cases.py` describes. Runs in `.venv-peers`: `python ask_peers.py answers.npz`.

The answers are named `peer/quantity/case`. A loss comes with `…/gradient`, its derivative by the new log-probs.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from peer_cases import (
    BETA,
    CASES,
    CLIP_HIGHER,
    CLIP_LOWER,
    DUAL_CLIP,
    FURTHER_CASES,
    HEADS,
    MAX_LENGTH,
    OFF_POLICY_THRESHOLD,
    REWARDS,
    RHO_LOWER,
    RHO_UPPER,
    TEACHERS,
    TEMPERATURE,
    TOP_KS,
    Case,
    lengths_of,
    with_engine_as_old_policy,
)
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

rollout_corr_helper.compute_is_metrics = lambda **_: {}  # its effective sample size divides by 0 if all weights are 0

Answers = Iterator[tuple[str, np.ndarray]]


def tensors(case: Case) -> SimpleNamespace:
    """The arrays as tensors; log-probs that the policy gives have a gradient."""
    values = {name: torch.from_numpy(array.copy()) for name, array in vars(case).items()}
    values["new"].requires_grad_()
    return SimpleNamespace(**values)


def with_gradient(name: str, case: Case, loss_of: Callable[[SimpleNamespace], torch.Tensor]) -> Answers:
    inputs = tensors(case)
    loss = loss_of(inputs)
    loss.backward()
    yield name, loss.detach().numpy()
    yield f"{name}/gradient", inputs.new.grad.numpy()


# --- TRL ----------------------------------------------------------------------------------------------------------------


class Trainer(GRPOTrainer):
    """TRL's trainer with the parts that its loss needs, without a model."""

    def __init__(self, inputs: SimpleNamespace, options: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "epsilon_low": CLIP_LOWER,
            "epsilon_high": CLIP_HIGHER,
            "beta": 0.0,
            "off_policy_mask_threshold": None,
            "delta": None,
            "use_bias_correction_kl": False,
        }
        options = {**defaults, **options}
        self.args = SimpleNamespace(
            delta=options.pop("delta"),
            use_bias_correction_kl=options.pop("use_bias_correction_kl"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        self.__dict__.update(options)
        self.top_entropy_quantile, self.max_completion_length = 1.0, MAX_LENGTH
        self.current_gradient_accumulation_steps = 1
        self.use_vllm = self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.model = SimpleNamespace(training=True)
        same: Callable[..., Any] = lambda value, **_: value  # noqa: E731
        self.accelerator = SimpleNamespace(num_processes=1, gather=same, reduce=same)
        self._metrics = defaultdict(lambda: defaultdict(list))
        self._inputs = inputs

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self._inputs.new, torch.zeros_like(self._inputs.new), None

    def loss(self) -> torch.Tensor:
        inputs = self._inputs
        nothing = torch.zeros(len(inputs.new), 0)
        return self._compute_loss(
            None,
            {
                "prompt_ids": nothing,
                "prompt_mask": nothing,
                "completion_ids": torch.zeros_like(inputs.new),
                "completion_mask": inputs.mask.float(),
                "advantages": inputs.advantages[:, 0],
                "old_per_token_logps": inputs.old,
                "sampling_per_token_logps": inputs.behaviour,
                "ref_per_token_logps": inputs.ref,
                "num_items_in_batch": inputs.mask.sum(),
            },
        )


TRL: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dual_clip": {"delta": DUAL_CLIP},
    "grpo": {"loss_type": "grpo", "epsilon_high": CLIP_LOWER},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": CLIP_LOWER},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CLIP_HIGHER},
    "sapo": {"loss_type": "sapo"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "k3": {"beta": BETA},
    "unbiased_kl": {"beta": BETA, "use_bias_correction_kl": True},
    "off_policy_mask": {"off_policy_mask_threshold": OFF_POLICY_THRESHOLD},
}


def trl_loss(inputs: SimpleNamespace, options: dict[str, Any]) -> torch.Tensor:
    return Trainer(inputs, options).loss()


def ask_trl() -> Answers:
    for case_name, case in {**CASES, **FURTHER_CASES}.items():
        for name, options in TRL.items():
            yield from with_gradient(f"trl/{name}/{case_name}", case, functools.partial(trl_loss, options=options))


# --- Liger --------------------------------------------------------------------------------------------------------------


def ask_liger() -> Answers:
    """Losses as Liger computes them from hidden states, with their derivatives by hidden states (`…/hidden`) and by the head's
    weight (`…/weight`). Liger's options have TRL's names."""
    defaults = {"epsilon_low": CLIP_LOWER, "epsilon_high": CLIP_HIGHER, "beta": 0.0, "compiled": False}
    for head_name, head in HEADS.items():
        for name, options in TRL.items():
            if "off_policy_mask_threshold" in options:  # Liger's caller has to mask
                continue
            hidden, weight = (torch.from_numpy(array.copy()).requires_grad_() for array in (head.hidden, head.weight))
            loss_of = LigerFusedLinearGRPOLoss(
                **{**defaults, **options}, temperature=TEMPERATURE, max_completion_length=MAX_LENGTH
            )
            inputs = tensors(head.case)
            loss, _ = loss_of(
                hidden,
                weight,
                torch.from_numpy(head.tokens),
                inputs.mask.float(),
                inputs.advantages[:, 0],
                ref_per_token_logps=inputs.ref,
                old_per_token_logps=inputs.old,
            )
            loss.backward()
            assert hidden.grad is not None
            assert weight.grad is not None
            yield f"liger/{name}/{head_name}", loss.detach().numpy()
            yield f"liger/{name}/{head_name}/hidden", hidden.grad.numpy()
            yield f"liger/{name}/{head_name}/weight", weight.grad.numpy()


# --- verl ---------------------------------------------------------------------------------------------------------------


def actor_config(**options: Any) -> ActorConfig:
    defaults = {"clip_ratio_low": CLIP_LOWER, "clip_ratio_high": CLIP_HIGHER, "clip_ratio_c": 1e30}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **{**defaults, **options})
    config.global_batch_info.update(dp_size=1)
    return config


VERL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dapo": ("vanilla", "token-mean", {}),
    "dual_clip": ("vanilla", "token-mean", {"clip_ratio_c": DUAL_CLIP}),
    "grpo": ("vanilla", "seq-mean-token-mean", {"clip_ratio_high": CLIP_LOWER}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"clip_ratio_high": CLIP_LOWER}),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0}),
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "sapo": ("sapo", "seq-mean-token-mean", {}),
    "gmpo": ("geo_mean", "", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "dppo_tv": ("dppo_tv", "token-mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 20.0}),
}


def verl_loss(inputs: SimpleNamespace, name: str, mode: str, options: dict[str, Any]) -> torch.Tensor:
    config = actor_config(**options)
    if mode.endswith("norm"):
        config.global_batch_info["loss_scale_factor"] = MAX_LENGTH
    mask = inputs.mask.float()
    advantages = inputs.advantages.expand_as(inputs.new)
    policy_loss = core_algos.get_policy_loss_fn(name)
    return policy_loss(inputs.old, inputs.new, advantages, mask, loss_agg_mode=mode, config=config)[0]


def ask_verl() -> Answers:
    for case_name, case in CASES.items():
        for name, (loss, mode, options) in VERL.items():
            asked = with_engine_as_old_policy(case) if name == "dppo_tv" else case
            yield from with_gradient(
                f"verl/{name}/{case_name}", asked, functools.partial(verl_loss, name=loss, mode=mode, options=options)
            )
        inputs = tensors(case)
        mask = inputs.mask.float()
        for kind in ("k1", "k2", "k3"):
            estimate = core_algos.kl_penalty(inputs.new, inputs.ref, kind)
            yield f"verl/{kind}/{case_name}", (estimate * mask).detach().numpy()
        for level in ("token", "sequence"):
            for name, threshold in {"truncated": RHO_UPPER, "masked": f"{RHO_LOWER}_{RHO_UPPER}"}.items():
                weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
                    inputs.old - inputs.behaviour, mask, rollout_is=level, rollout_is_threshold=threshold
                )
                yield f"verl/{name}_{level}/{case_name}", weights.numpy()


ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"norm_adv_by_std_in_grpo": True},
    "rloo": {},
    "opo": {},
    "reinforce_plus_plus": {"config": SimpleNamespace(gamma=1.0)},
    "reinforce_plus_plus_baseline": {},
}


def ask_verl_for_advantages() -> Answers:
    for case_name, groups in REWARDS.items():
        lengths = np.concatenate(lengths_of(groups))
        index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        mask = torch.from_numpy(np.arange(MAX_LENGTH) < lengths[:, None]).float()
        rewards = torch.zeros(mask.shape)
        rewards[torch.arange(len(lengths)), torch.from_numpy(lengths) - 1] = torch.from_numpy(
            np.concatenate(groups)
        ).float()
        for name, options in {"centered": {"norm_adv_by_std_in_grpo": False}, **ESTIMATORS}.items():
            estimator = core_algos.get_adv_estimator_fn("grpo" if name == "centered" else name)
            advantages, _ = estimator(token_level_rewards=rewards.clone(), response_mask=mask, index=index, **options)
            yield f"verl/{name}/{case_name}", advantages[:, 0].numpy()


def ask_verl_for_distillation() -> Answers:
    config: Any = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    for name, (policy, teacher) in TEACHERS.items():
        for top_k in TOP_KS:
            logits = torch.from_numpy(policy.copy()).requires_grad_()
            top = torch.from_numpy(teacher.copy()).log_softmax(-1).topk(top_k)
            losses = compute_forward_kl_topk(
                student_logits=logits[None],
                teacher_topk_log_probs=torch.nested.nested_tensor([top.values], layout=torch.jagged),
                teacher_topk_ids=torch.nested.nested_tensor([top.indices], layout=torch.jagged),
                config=config,
                data_format="thd",
            )["distillation_losses"]
            losses.sum().backward()
            yield f"verl/forward_kl/{name}/{top_k}", losses[0].detach().numpy()
            assert logits.grad is not None
            yield f"verl/forward_kl/{name}/{top_k}/gradient", logits.grad.numpy()


if __name__ == "__main__":
    answers: dict[str, Any] = {}
    for ask in (ask_trl, ask_liger, ask_verl, ask_verl_for_advantages, ask_verl_for_distillation):
        answers.update(ask())
    np.savez(sys.argv[1], **answers)
