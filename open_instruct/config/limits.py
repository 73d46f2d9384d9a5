"""The numbers that each option may have."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.options import NEVER
from open_instruct.option_text import shown


@dataclass(frozen=True)
class Limits:
    """The numbers from `low` to `high`. NaN and infinity are outside."""

    low: float
    high: float = math.inf
    low_itself: bool = True
    """Whether `low` itself is allowed."""
    never_means: str = ""
    """What `NEVER` means here, in a word; "" where it is not allowed."""

    def hold(self, value: float) -> bool:
        above = value >= self.low if self.low_itself else value > self.low
        is_finite = isinstance(value, int) or math.isfinite(value)  # an int of 400 digits is no float
        return (is_finite and above and value <= self.high) or (bool(self.never_means) and value == NEVER)

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "a finite number"
        low = f"{self.low} or more" if self.low_itself else f"more than {self.low}"
        high = "" if math.isinf(self.high) else f", at most {self.high}"
        return low + high + (f", or {NEVER} for {self.never_means}" if self.never_means else "")


MAX_TEMPERATURE = 2.0
"""vLLM refuses a higher temperature."""
_COUNT = Limits(1)
_NOT_NEGATIVE = Limits(0)
_ANY = Limits(-math.inf)
POSITIVE = Limits(0, low_itself=False)
_SHARE = Limits(0, 1)
_POSITIVE_SHARE = Limits(0, 1, low_itself=False)
_INTERVAL = Limits(1, never_means="never")

LIMITS: dict[str, Limits] = {
    "seed": Limits(0, 2**32 - 1),
    "max_prompt_token_length": _COUNT,
    "response_length": _COUNT,
    "pack_length": _COUNT,
    "temperature": Limits(0, MAX_TEMPERATURE, low_itself=False),
    "num_unique_prompts_rollout": _COUNT,
    "num_samples_per_prompt_rollout": _COUNT,
    "total_episodes": _COUNT,
    "async_steps": _NOT_NEGATIVE,
    "staleness_threshold": _NOT_NEGATIVE,
    "max_staleness_allowed": _NOT_NEGATIVE,
    "over_issued_prompts": _NOT_NEGATIVE,
    "trigger_parameter_sync_step": _COUNT,
    "max_queue_size": _COUNT,
    "min_batch_count": _COUNT,
    "batch_timeout": POSITIVE,
    "batch_generation_interval": _NOT_NEGATIVE,
    "generation_timeout": POSITIVE,
    "max_generation_attempts": _COUNT,
    "rho_clamp_lower_bound": _NOT_NEGATIVE,
    "no_resampling_pass_rate": _POSITIVE_SHARE,
    "ref_policy_update_freq": _COUNT,
    "alpha": _POSITIVE_SHARE,
    "clip_ratio_c": Limits(1, low_itself=False),
    "entropy_coef": _ANY,
    "ce_coef": _NOT_NEGATIVE,
    "distillation_top_k": _NOT_NEGATIVE,
    "distillation_coef": POSITIVE,
    "teacher_num_engines": _COUNT,
    "teacher_tensor_parallel_size": _COUNT,
    "teacher_timeout_s": POSITIVE,
    "non_stop_penalty_value": _ANY,
    "gspo_clip_lower": POSITIVE,
    "gspo_clip_higher": POSITIVE,
    "gmpo_clip": POSITIVE,
    "sapo_tau_pos": POSITIVE,
    "sapo_tau_neg": POSITIVE,
    "dppo_delta_lower": POSITIVE,
    "dppo_delta_higher": POSITIVE,
    "dppo_ratio_cap": POSITIVE,
    "overlong_buffer_len": _NOT_NEGATIVE,
    "sequence_parallel_size": _COUNT,
    "deepspeed_zpg": _COUNT,
    "lora_r": _COUNT,
    "lora_alpha": _COUNT,
    "overlong_penalty_factor": _NOT_NEGATIVE,
    "off_policy_mask_threshold": _NOT_NEGATIVE,
    "rho_clamp_upper_bound": _NOT_NEGATIVE,
    "rho_mask_lower_bound": _NOT_NEGATIVE,
    "rho_mask_upper_bound": _NOT_NEGATIVE,
    "engine_sleep_after_s": POSITIVE,
    "max_sync_retries": _NOT_NEGATIVE,
    "sync_retry_delay": _NOT_NEGATIVE,
    "logprob_mismatch_limit": POSITIVE,
    "engine_stall_timeout_s": POSITIVE,
    "stopped_timeout_s": POSITIVE,
    "max_engine_restarts": _NOT_NEGATIVE,
    "statistics_interval_s": POSITIVE,
    "num_epochs": _COUNT,
    "num_mini_batches": _COUNT,
    "beta": _NOT_NEGATIVE,
    "clip_lower": _SHARE,
    "clip_higher": _NOT_NEGATIVE,
    "verification_reward": POSITIVE,
    "r1_style_format_reward": _ANY,
    "max_unscored_share": _SHARE,
    "max_length_verifier_max_length": _COUNT,
    "code_max_execution_time": POSITIVE,
    "code_pass_rate_reward_threshold": _SHARE,
    "llm_judge_max_tokens": _COUNT,
    "llm_judge_max_context_length": _COUNT,
    "llm_judge_temperature": Limits(0, MAX_TEMPERATURE),
    "llm_judge_timeout": _COUNT,
    "llm_judge_max_concurrency": _COUNT,
    "max_active_rubrics": _COUNT,
    "vllm_top_p": _POSITIVE_SHARE,
    "eval_pass_at_k": _COUNT,
    "eval_completions": Limits(-1),
    "verifier_timeout_s": POSITIVE,
    "verifier_workers": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "warmup_ratio": _SHARE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "max_nonfinite_steps": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "backend_timeout": _COUNT,
    "vllm_num_engines": _COUNT,
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_gpu_memory_utilization": _POSITIVE_SHARE,
    "vllm_max_num_seqs": _COUNT,
    "local_eval_every": _INTERVAL,
    "eval_temperature": Limits(0, MAX_TEMPERATURE),
    "eval_top_p": _POSITIVE_SHARE,
    "max_steps": _COUNT,
    "per_turn_max_tokens": _COUNT,
    "tool_output_max_tokens": _COUNT,
    "pool_size": _COUNT,
    "environment_attempts": _COUNT,
    "environment_reset_timeout_s": POSITIVE,
    "environment_step_timeout_s": POSITIVE,
    "conversation_timeout_s": POSITIVE,
    "agent_timeout_s": POSITIVE,
    "agent_attempts": _COUNT,
    "agent_max_concurrent": _COUNT,
    "agent_max_samples": _COUNT,
    "rc_num_reasoning_steps": _COUNT,
    "rc_states_per_problem": _COUNT,
    "rc_max_summary_tokens": _COUNT,
    "rc_summary_samples": _COUNT,
    "rc_buffer_size": _NOT_NEGATIVE,
    "rc_buffer_states_per_problem": _COUNT,
    "rc_max_state_age": _NOT_NEGATIVE,
    "rc_eval_num_reasoning_steps": _COUNT,
    "eval_response_length": _COUNT,
    "save_freq": _INTERVAL,
    "checkpoint_state_freq": _INTERVAL,
    "keep_last_n_checkpoints": Limits(1, never_means="all"),
    "placement_timeout_s": POSITIVE,
    "init_timeout_s": POSITIVE,
    "progress_timeout_s": POSITIVE,
    "weight_sync_timeout_s": POSITIVE,
    "eval_timeout_s": POSITIVE,
}


def numbers_are_within_limits(args: GRPOConfig) -> Iterator[str]:
    for name, limits in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not limits.hold(value):
            yield f"{shown(args, name)}: out of range. Give {limits}."
