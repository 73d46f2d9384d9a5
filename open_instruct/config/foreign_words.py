"""Options of TRL, verl and prime-rl, each with the options of this project that mean the same.

These names are not accepted. They are known so that a message names the option that means the same, and not one that is only
spelled alike.
`docs/guides/coming_from_trl_verl_prime_rl.md` holds the same tables; `python -m open_instruct.config.foreign_words` prints them.
(Options of open-instruct are accepted; see `open_instruct_options.py`.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Meaning(NamedTuple):
    """What a foreign option means here."""

    options: tuple[str, ...]
    """The options of this project; empty if there is none."""
    note: str = ""
    """How the options differ, or why there is none."""
    joiner: Literal["with", "or"] = "with"
    """Whether several options are given together, or one of them."""


def _is(*options: str, note: str = "") -> Meaning:
    return Meaning(options, note)


def _is_one_of(*options: str, note: str = "") -> Meaning:
    return Meaning(options, note, "or")


def _none(why: str) -> Meaning:
    return Meaning((), why)


STEPS = _is("total_episodes", note="steps × num_unique_prompts_rollout × num_samples_per_prompt_rollout")
EPOCHS = _is("total_episodes", note="epochs × rows × num_samples_per_prompt_rollout")
SAMPLES = _is("num_samples_per_prompt_rollout")
PROMPTS = _is("num_unique_prompts_rollout", note="prompts of a step, each with num_samples_per_prompt_rollout samples")
BATCH = _is(
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
    note="the samples of a step are the product of the two",
)
DATA = _is("dataset_mixer_list", note="a name and an amount, such as train.jsonl 1.0")
EVAL_DATA = _is_one_of(
    "dataset_mixer_eval_list",
    "eval_sets",
    note="a name and an amount, such as test.jsonl 1.0; or several sets, such as plus=plus.jsonl minus=minus.jsonl",
)
REWARDS = _is_one_of(
    "reward_funcs", "verifier_modules", note="a file of functions or of verifiers: docs/guides/verifiers.md"
)
MEMORY = _is("per_device_train_batch_size", "pack_length", note="rows of pack_length tokens in one pass")
RHO = _is("use_rho_correction", "rho_level", "rho_clamp_upper_bound")
TRACKING = _is("with_tracking", note="metrics go to wandb; metrics.jsonl has them always")
REPORT_TO = _is("report_to", note="wandb, tensorboard, trackio, mlflow, swanlab; for none leave it out")
AHEAD = _is_one_of("async_steps", "max_staleness_allowed")
ENGINES = _is("vllm_num_engines", "vllm_tensor_parallel_size", note="GPUs of all engines are the product of the two")
CHECKPOINTS = _is("checkpoint_state_freq", note="for resuming; save_freq saves models")
RESUMES = _none("the same command resumes its run from the newest checkpoint")
OWN_ENGINES = _none("a run starts its engines itself")
BETAS = _none("AdamW has PyTorch's betas, 0.9 and 0.999")
PACKED = _none("rows are packed up to pack_length")

TRL: Mapping[str, Meaning] = {
    "max_steps": STEPS,
    "num_train_epochs": EPOCHS,
    "num_generations": SAMPLES,
    "num_generations_eval": _is("eval_pass_at_k"),
    "max_completion_length": _is("response_length"),
    "max_prompt_length": _is("max_prompt_token_length"),
    "generation_batch_size": BATCH,
    "per_device_train_batch_size": MEMORY,
    "gradient_accumulation_steps": _none("all samples of a step are accumulated; num_mini_batches divides them"),
    "steps_per_generation": _is("num_mini_batches"),
    "num_iterations": _is("num_epochs"),
    "epsilon": _is("clip_lower"),
    "epsilon_high": _is("clip_higher"),
    "delta": _is("clip_ratio_c", note="bounds the ratio where the advantage is negative"),
    "importance_sampling_level": _is("loss_fn", note="gspo takes the ratio of a whole response"),
    "loss_type": _is("loss_fn", "loss_denominator"),
    "scale_rewards": _is("advantage_normalization_type", note="centered does not scale, standard does"),
    "reward_model_name_or_path": REWARDS,
    "top_p": _is("vllm_top_p"),
    "top_k": _none("sampling is not cut to the k likeliest tokens"),
    "top_entropy_quantile": _none("all tokens of the model are trained on, whatever their entropy"),
    "min_p": _none("sampling is cut by vllm_top_p alone"),
    "repetition_penalty": _none("samples follow the model's own distribution"),
    "vllm_mode": _is_one_of(
        "colocate",
        "single_gpu_mode",
        note="for colocate; without both, engines have devices of their own, as with server",
    ),
    "use_vllm": _none("vLLM always samples"),
    "vllm_max_model_length": _is("max_prompt_token_length", "response_length", note="the sum of the two"),
    "vllm_enable_sleep_mode": _is_one_of(
        "colocate", "engine_sleep_after_s", note="engines release memory while learners compute, or while they are idle"
    ),
    "vllm_server_base_url": OWN_ENGINES,
    "vllm_server_host": OWN_ENGINES,
    "vllm_server_port": OWN_ENGINES,
    "vllm_server_timeout": _is("init_timeout_s"),
    "vllm_group_port": OWN_ENGINES,
    "vllm_importance_sampling_correction": _is("use_rho_correction"),
    "vllm_importance_sampling_mode": _is("rho_level"),
    "vllm_importance_sampling_cap": _is("rho_clamp_upper_bound"),
    "vllm_importance_sampling_clip_max": _is("rho_clamp_upper_bound"),
    "vllm_importance_sampling_clip_min": _is("rho_clamp_lower_bound"),
    "sapo_temperature_pos": _is("sapo_tau_pos"),
    "sapo_temperature_neg": _is("sapo_tau_neg"),
    "use_bias_correction_kl": _is("kl_estimator", note="4"),
    "sync_ref_model": _is("ref_policy_update_freq"),
    "ref_model_sync_steps": _is("ref_policy_update_freq"),
    "ref_model_mixup_alpha": _is("alpha"),
    "max_tool_calling_iterations": _is("max_steps"),
    "rollout_func": _is(
        "rollout_workflow", "workflow_modules", note="a workflow of your own: docs/guides/workflows.md"
    ),
    "environment_factory": _is("tools", "environment_modules", note="docs/guides/environments.md"),
    "chat_template_kwargs": _is("chat_template_name", note="a file with a template of your own"),
    "log_completions": _is(
        "show_samples_every",
        "save_traces",
        note="1 for some of each step in the log; all go to files",
    ),
    "num_completions_to_print": _is("show_samples"),
    "report_to": REPORT_TO,
    "logging_steps": _none("metrics are written at every step"),
    "train_dataset": DATA,
    "dataset_name": DATA,
    "eval_dataset": EVAL_DATA,
    "dataset_config": _is("dataset_mixer_list", note="behind the name, such as openai/gsm8k?config=main 1.0"),
    "dataset_train_split": _is("dataset_mixer_list_splits"),
    "dataset_test_split": _is("dataset_mixer_eval_list_splits"),
    "eval_strategy": _is("local_eval_every", note="a number of steps; -1 for no"),
    "eval_steps": _is("local_eval_every"),
    "per_device_eval_batch_size": _none("engines batch the prompts of an evaluation themselves"),
    "eval_on_start": _is("eval_on_step_0"),
    "save_strategy": CHECKPOINTS,
    "save_steps": CHECKPOINTS,
    "save_total_limit": _is("keep_last_n_checkpoints"),
    "resume_from_checkpoint": RESUMES,
    "push_to_hub": _none("models are saved in output_dir; upload them afterwards"),
    "warmup_steps": _is("warmup_ratio", note="a share of all steps"),
    "lr_scheduler_kwargs": _none("the schedules have no further options"),
    "optim": _none("the optimizer is AdamW"),
    "adam_beta1": BETAS,
    "adam_beta2": BETAS,
    "bf16": _is("model_dtype", note="bfloat16"),
    "fp16": _is("model_dtype", note="bfloat16 or float32"),
    "torch_dtype": _is("model_dtype"),
    "max_length": _is("pack_length"),
    "lora_modules": _is("lora_target_modules"),
    "deepspeed": _is("deepspeed_stage"),
    "logging_dir": _is("output_dir"),
    "model_init_kwargs": _is_one_of("model_dtype", "attn_implementation", "trust_remote_code"),
}

VERL: Mapping[str, Meaning] = {
    "data.train_files": DATA,
    "data.val_files": EVAL_DATA,
    "data.prompt_key": _is("sft_messages_key"),
    "data.reward_fn_key": _is("default_verifier", note="a row's own verifier is in its column dataset"),
    "data.train_batch_size": PROMPTS,
    "data.gen_batch_size": PROMPTS,
    "data.max_prompt_length": _is("max_prompt_token_length"),
    "data.max_response_length": _is("response_length"),
    "data.filter_overlong_prompts": _is("overlong_prompts", note="drop"),
    "data.truncation": _is("overlong_prompts", note="prompts are dropped or refused, never cut"),
    "data.seed": _is("seed"),
    "data.trust_remote_code": _is("trust_remote_code"),
    "actor_rollout_ref.model.path": _is("model_name_or_path"),
    "actor_rollout_ref.model.trust_remote_code": _is("trust_remote_code"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _is("gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": PACKED,
    "actor_rollout_ref.model.lora_rank": _is("use_peft", "lora_r"),
    "actor_rollout_ref.model.lora_alpha": _is("lora_alpha"),
    "actor_rollout_ref.model.target_modules": _is("lora_target_modules"),
    "actor_rollout_ref.actor.optim.lr": _is("learning_rate"),
    "actor_rollout_ref.actor.optim.weight_decay": _is("weight_decay"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": _is("warmup_ratio", note="a share of all steps"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _is("warmup_ratio"),
    "actor_rollout_ref.actor.optim.warmup_style": _is("lr_scheduler_type"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": _is("lr_scheduler_type"),
    "actor_rollout_ref.actor.grad_clip": _is("max_grad_norm"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": _is(
        "num_mini_batches", note="the number of optimizer steps, not the prompts of one"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MEMORY,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _is("pack_length"),
    "actor_rollout_ref.actor.use_dynamic_bsz": PACKED,
    "actor_rollout_ref.actor.ppo_epochs": _is("num_epochs"),
    "actor_rollout_ref.actor.clip_ratio": _is("clip_lower", "clip_higher"),
    "actor_rollout_ref.actor.clip_ratio_low": _is("clip_lower"),
    "actor_rollout_ref.actor.clip_ratio_high": _is("clip_higher"),
    "actor_rollout_ref.actor.clip_ratio_c": _is("clip_ratio_c"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": _is("loss_fn"),
    "actor_rollout_ref.actor.loss_agg_mode": _is("loss_denominator"),
    "actor_rollout_ref.actor.entropy_coeff": _is("entropy_coef"),
    "actor_rollout_ref.actor.use_kl_loss": _is("beta", note="above 0"),
    "actor_rollout_ref.actor.kl_loss_coef": _is("beta"),
    "actor_rollout_ref.actor.kl_loss_type": _is("kl_estimator"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _is("sequence_parallel_size"),
    "actor_rollout_ref.actor.use_torch_compile": _is("compile_model"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": _is("deepspeed_offload_param"),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": _is("deepspeed_offload_optimizer"),
    "actor_rollout_ref.actor.strategy": _is("deepspeed_stage"),
    "actor_rollout_ref.ref.fsdp_config.param_offload": _is("deepspeed_offload_param"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": MEMORY,
    "actor_rollout_ref.hybrid_engine": _is("colocate"),
    "actor_rollout_ref.rollout.name": _none("vLLM always samples"),
    "actor_rollout_ref.rollout.mode": _none("engines always take requests as they come, as in the mode async"),
    "actor_rollout_ref.rollout.n": SAMPLES,
    "actor_rollout_ref.rollout.temperature": _is("temperature"),
    "actor_rollout_ref.rollout.top_p": _is("vllm_top_p"),
    "actor_rollout_ref.rollout.top_k": _none("sampling is not cut to the k likeliest tokens"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": _is("vllm_gpu_memory_utilization"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _is("vllm_tensor_parallel_size"),
    "actor_rollout_ref.rollout.enforce_eager": _is("vllm_enforce_eager"),
    "actor_rollout_ref.rollout.max_num_seqs": _is("vllm_max_num_seqs"),
    "actor_rollout_ref.rollout.max_model_len": _is("max_prompt_token_length", "response_length", note="their sum"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": MEMORY,
    "actor_rollout_ref.rollout.val_kwargs.n": _is("eval_pass_at_k"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": _is("eval_temperature"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": _is("eval_top_p"),
    "actor_rollout_ref.rollout.multi_turn.enable": _is("rollout_workflow", note="conversation"),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": _is("max_steps"),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": _is("tools", "tool_configs"),
    "actor_rollout_ref.rollout.multi_turn.format": _is("tool_parser_type"),
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": _is("tool_output_max_tokens"),
    "algorithm.adv_estimator": _is("advantage_normalization_type"),
    "algorithm.norm_adv_by_std_in_grpo": _is("advantage_normalization_type", note="standard or centered"),
    "algorithm.kl_ctrl.kl_coef": _is("beta", note="in the loss; the reward has no KL"),
    "algorithm.use_kl_in_reward": _is("beta", note="in the loss; the reward has no KL"),
    "algorithm.filter_groups.enable": _is("active_sampling", "filter_zero_std_samples"),
    "algorithm.rollout_correction.rollout_is": RHO,
    "algorithm.rollout_correction.rollout_is_threshold": _is("rho_clamp_upper_bound"),
    "algorithm.gamma": _none("a reward belongs to a whole response"),
    "algorithm.lam": _none("there is no critic"),
    "critic.optim.lr": _none("there is no critic"),
    "reward_model.enable": REWARDS,
    "reward_model.reward_manager": REWARDS,
    "custom_reward_function.path": REWARDS,
    "custom_reward_function.name": REWARDS,
    "reward_model.overlong_buffer.len": _is("overlong_buffer_len"),
    "reward_model.overlong_buffer.penalty_factor": _is("overlong_penalty_factor"),
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": CHECKPOINTS,
    "trainer.test_freq": _is("local_eval_every"),
    "trainer.val_before_train": _is("eval_on_step_0"),
    "trainer.logger": REPORT_TO,
    "trainer.project_name": _is("wandb_project"),
    "trainer.experiment_name": _is("exp_name"),
    "trainer.n_gpus_per_node": _is("num_learners_per_node", note="learners alone; engines have vllm_num_engines"),
    "trainer.nnodes": _is("num_learners_per_node", note="a number for each node"),
    "trainer.default_local_dir": _is("output_dir"),
    "trainer.resume_mode": RESUMES,
    "trainer.max_actor_ckpt_to_keep": _is("keep_last_n_checkpoints"),
    "trainer.rollout_data_dir": _is("save_traces", "rollouts_save_path"),
    "trainer.validation_data_dir": _none("completions/ in output_dir has the answers of each evaluation"),
}

PRIME_RL: Mapping[str, Meaning] = {
    "max_steps": STEPS,
    "seq_len": _is("pack_length"),
    "model.name": _is("model_name_or_path"),
    "output_dir": _is("output_dir"),
    "run.name": _is("run_name"),
    "clean": _none("a new run needs a directory of its own"),
    "resume.step": RESUMES,
    "ckpt.interval": CHECKPOINTS,
    "ckpt.keep_last": _is("keep_last_n_checkpoints"),
    "wandb.project": _is("wandb_project"),
    "wandb.name": _is("run_name"),
    "monitors.wandb": TRACKING,
    "monitors.wandb.project": _is("wandb_project"),
    "monitors.wandb.name": _is("run_name"),
    "deployment.num_train_gpus": _is("num_learners_per_node"),
    "deployment.num_infer_gpus": ENGINES,
    "weight_broadcast.type": _is("weight_transport"),
    "max_async_level": AHEAD,
    "orchestrator.batch_size": BATCH,
    "orchestrator.group_size": SAMPLES,
    "orchestrator.rollouts_per_example": SAMPLES,
    "orchestrator.max_async_level": AHEAD,
    "orchestrator.max_off_policy_steps": _is("max_staleness_allowed"),
    "orchestrator.max_steps": STEPS,
    "orchestrator.seq_len": _is("pack_length"),
    "orchestrator.env": _is("tools", "environment_modules", note="docs/guides/environments.md"),
    "orchestrator.environment.id": _is("tools", "environment_modules", note="docs/guides/environments.md"),
    "orchestrator.sampling.temperature": _is("temperature"),
    "orchestrator.sampling.max_tokens": _is("response_length"),
    "orchestrator.train.sampling.temperature": _is("temperature"),
    "orchestrator.train.sampling.max_completion_tokens": _is("response_length"),
    "orchestrator.train.filter_zero_advantages": _is("filter_zero_std_samples"),
    "orchestrator.eval.interval": _is("local_eval_every"),
    "orchestrator.eval.group_size": _is("eval_pass_at_k"),
    "orchestrator.eval.num_examples": EVAL_DATA,
    "orchestrator.eval.skip_first_step": _is("eval_on_step_0", note="the opposite"),
    "orchestrator.eval.sampling.temperature": _is("eval_temperature"),
    "orchestrator.eval.sampling.top_p": _is("eval_top_p"),
    "orchestrator.eval.sampling.max_completion_tokens": _is("eval_response_length"),
    "orchestrator.concurrency.max_inflight": _is("vllm_max_num_seqs"),
    "trainer.optim.lr": _is("learning_rate"),
    "trainer.optim.weight_decay": _is("weight_decay"),
    "trainer.optim.max_norm": _is("max_grad_norm"),
    "trainer.scheduler.type": _is("lr_scheduler_type"),
    "trainer.scheduler.warmup_steps": _is("warmup_ratio", note="a share of all steps"),
    "trainer.max_steps": STEPS,
    "trainer.model.attn": _is("attn_implementation"),
    "trainer.model.ac": _is("gradient_checkpointing"),
    "trainer.model.compile": _is("compile_model"),
    "trainer.model.cp": _is("sequence_parallel_size"),
    "trainer.model.fsdp_cpu_offload": _is("deepspeed_offload_param", "deepspeed_offload_optimizer"),
    "trainer.model.optim_cpu_offload": _is("deepspeed_offload_optimizer"),
    "trainer.model.lora.rank": _is("use_peft", "lora_r"),
    "trainer.model.lora.alpha": _is("lora_alpha"),
    "trainer.model.lora.target_modules": _is("lora_target_modules"),
    "trainer.loss.type": _is("loss_fn"),
    "trainer.loss.kl_tau": _is("beta", note="the KL to the reference policy, with kl_estimator"),
    "trainer.loss.dppo_mask_low": _is("loss_fn", "dppo_delta_lower"),
    "trainer.loss.dppo_mask_high": _is("loss_fn", "dppo_delta_higher"),
    "inference.vllm.model": _is("model_name_or_path"),
    "inference.vllm.max_model_len": _is("max_prompt_token_length", "response_length", note="their sum"),
    "inference.vllm.enforce_eager": _is("vllm_enforce_eager"),
    "inference.vllm.tensor_parallel_size": _is("vllm_tensor_parallel_size"),
    "inference.vllm.data_parallel_size": _is("vllm_num_engines"),
    "inference.vllm.gpu_memory_utilization": _is("vllm_gpu_memory_utilization"),
    "inference.vllm.enable_prefix_caching": _is("vllm_enable_prefix_caching"),
    "inference.parallel.tp": _is("vllm_tensor_parallel_size"),
    "inference.parallel.dp": _is("vllm_num_engines"),
}

PROJECTS: Mapping[str, Mapping[str, Meaning]] = {"TRL": TRL, "verl": VERL, "prime-rl": PRIME_RL}
COMMON: Mapping[str, Meaning] = {
    "lr": _is("learning_rate"),
    "model": _is("model_name_or_path"),
    "model_name": _is("model_name_or_path"),
    "dataset": DATA,
    "data": DATA,
    "epochs": EPOCHS,
    "steps": STEPS,
    "num_steps": STEPS,
    "batch_size": BATCH,
    "train_batch_size": PROMPTS,
    "group_size": SAMPLES,
    "rollouts_per_example": SAMPLES,
    "max_new_tokens": _is("response_length"),
    "max_tokens": _is("response_length"),
    "max_response_length": _is("response_length"),
    "kl_coef": _is("beta"),
    "lora_rank": _is("use_peft", "lora_r"),
    "gpu_memory_utilization": _is("vllm_gpu_memory_utilization"),
    "tensor_parallel_size": _is("vllm_tensor_parallel_size"),
    "use_wandb": TRACKING,
    "wandb": TRACKING,
}
"""Words that many programs use."""
_ASSIGNMENT = re.compile(r"[+~]*(?P<name>\w+(?:\.\w+)+)=")
"""An option in hydra's form, `data.train_batch_size=8`."""
LENGTH_OF_CONVERSATION = "max_steps"
"""The option of conversations whose name is the number of training steps in TRL and prime-rl."""
SAYS_HOW_LONG = "total_episodes", "rollout_workflow"
"""With one of these options, `max_steps` is not meant as the length of the run."""


def is_foreign(name: str) -> bool:
    """Whether a name, with underscores, is an option of another project, or a word that many programs use."""
    return name in COMMON or any(name in words for words in PROJECTS.values())


def hydra_word(word: str) -> str:
    """`data.train_batch_size` for the word `data.train_batch_size=8`, if that is a known option of another project; else ""."""
    assignment = _ASSIGNMENT.match(word)
    return assignment["name"] if assignment and is_foreign(assignment["name"]) else ""


def meaning_here(name: str, *, prefix: str) -> str:
    """What an option of another project means here, as sentences; "" if it is not known.

    Example: `TRL's num_generations is --num_samples_per_prompt_rollout here.`
    """
    owners: dict[Meaning, list[str]] = {}
    for project, words in PROJECTS.items():
        if name in words:
            owners.setdefault(words[name], []).append(f"{project}'s {name}")
    if not owners and name in COMMON:
        owners[COMMON[name]] = ["It"]
    return " ".join(_sentence(" and ".join(subjects), meaning, prefix) for meaning, subjects in owners.items())


def _sentence(subject: str, meaning: Meaning, prefix: str) -> str:
    if not meaning.options:
        return f"{subject} has no counterpart here: {meaning.note}."
    options = f" {meaning.joiner} ".join(f"{prefix}{option}" for option in meaning.options)
    return f"{subject} is {options} here{f' ({meaning.note})' if meaning.note else ''}."


def unclear_length(options: Mapping[str, Any], conversation_options: Sequence[str]) -> Iterator[str]:
    """The mistake that `--max_steps` is given and nothing says whether it bounds a conversation or the run.

    Args:
        options: the options as the user wrote them.
        conversation_options: the options that only conversations have.
    """
    clear = {*SAYS_HOW_LONG, *conversation_options} - {LENGTH_OF_CONVERSATION}
    if LENGTH_OF_CONVERSATION in options and not clear & options.keys():
        yield (
            f"--max_steps {options[LENGTH_OF_CONVERSATION]}: here it is the most calls of tools in a conversation, as in "
            f"open-instruct, and nothing else asks for conversations. For the number of training steps (as in TRL and prime-rl), "
            f"give --total_episodes ({STEPS.note}) in place of --max_steps. For conversations, add --tools or "
            "--rollout_workflow conversation."
        )


def table(words: Mapping[str, Meaning]) -> str:
    """A table of a project's options for the documents."""
    lines = ["| option | here |", "|---|---|"]
    for name, (options, note, joiner) in words.items():
        text = f" {joiner} ".join(f"`{option}`" for option in options)
        lines.append(f"| `{name}` | {f'{text}: {note}' if text and note else text or f'(none) {note}'} |")
    return "\n".join(lines)


def main() -> None:
    for project, words in PROJECTS.items():
        print(f"## {project}\n\n{table(words)}\n")


if __name__ == "__main__":
    main()
