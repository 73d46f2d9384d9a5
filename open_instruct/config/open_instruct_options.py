"""What becomes of each option of open-instruct's launch lines that this project does not have.

No such option is ignored silently. An option stops a run only if it asks for something that this project cannot do. So a launch
line that was written for open-instruct starts, and one warning says which of its options have no effect, and why.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

AI2 = "Ai2's own machines"
NO_EFFECT_THERE = "has no effect in open-instruct's grpo_fast.py either"
COMPUTED = "is computed from total_episodes"
OLD = "open-instruct has dropped it"
UPLOAD = "models are written to output_dir; `hf upload` brings them to the hub"
CACHE = "tokenized data are cached by their content (dataset_local_cache_dir)"

WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "try_launch_beaker_eval_jobs_on_weka",
            "try_auto_save_to_beaker",
            "no_try_launch_beaker_eval_jobs",
            "beaker_eval_freq",
            "gs_bucket_path",
            "gs_checkpoint_state_dir",
            "oe_eval_tasks",
            "oe_eval_max_length",
            "oe_eval_beaker_image",
            "oe_eval_gpu_multiplier",
            "eval_priority",
            "eval_workspace",
        ),
        AI2,
    ),
    **dict.fromkeys(
        (
            "data_loader_seed",
            "logging_steps",
            "dtype",
            "use_cache",
            "use_slow_tokenizer",
            "tokenizer_name",
            "tokenizer_files_hash",
            "lora_modules_to_save",
            "lora_task_type",
            "load_in_8bit",
            "load_in_4bit",
            "bnb_4bit_quant_type",
            "use_bnb_nested_quant",
            "max_seq_length",
            "max_train_steps",
            "gradient_accumulation_steps",
            "num_nodes",
            "world_size",
            "fsdp_shard_degree",
            "fsdp_num_replicas",
            "activation_memory_budget",
            "activation_checkpointing_mode",
            "activation_checkpointing_modules",
            "cp_degree",
            "cp_strategy",
            "checkpointing_steps",
            "ephemeral_save_interval",
            "max_possible_score",
        ),
        NO_EFFECT_THERE,
    ),
    **dict.fromkeys(("push_to_hub", "hf_entity", "hf_repo_id", "hf_repo_revision", "hf_repo_url"), UPLOAD),
    **dict.fromkeys(("dataset_cache_mode", "dataset_config_hash", "dataset_config_eval_hash"), CACHE),
    **dict.fromkeys(("inference_batch_size", "local_rollout_forward_batch_size", "allow_world_padding"), OLD),
    "num_training_steps": COMPUTED,
    "resume_from_checkpoint": "the same command resumes its run by itself",
    "lora_dropout": "adapters have no dropout: the engine that samples has none either",
    "get_tokenizer_fn": "chat_template_name and add_bos say how the tokenizer is set up",
    "use_fast": "tokenizers are fast ones wherever there is one",
    "dataset_transform_fn": "rows always get the chat template, and prompts over max_prompt_token_length are left out",
    "set_weight_decay_on_bias_and_norm": "weight_decay holds for all weights",
    "fused_optimizer": "AdamW is always fused",
    "deepspeed_checkpoint_load_universal": "a run resumes with the learners and the stage with which it was begun",
    "gather_whole_model": "weights are gathered one after another",
    "vllm_sync_backend": "weight_transport says how weights travel; by default the fastest way that there is",
    "vllm_attention_backend": 'vLLM chooses; to choose: vllm_engine_args {"attention_config": {"backend": "FLASH_ATTN"}}',
    "enable_queue_dashboard": "the queues are in the log every statistics_interval_s and in the metrics queue/*",
    "queue_dashboard_port": "the queues are in the log every statistics_interval_s and in the metrics queue/*",
    "record_entropy": "policy/entropy_avg is always recorded",
    "max_token_length": f"{OLD}; max_prompt_token_length is the limit",
    "local_rollout_batch_size": f"{OLD}; num_unique_prompts_rollout is the number of prompts in a step",
    "local_mini_batch_size": f"{OLD}; num_mini_batches is the number of optimizer steps in a step",
    "stop_token": f"{OLD}; stop_strings end a response, and so does the model's own end",
    "reward_model_multiplier": f"{OLD}; there is no reward model",
    "apply_arithmetic_reward": f"{OLD}; the verifiers of the rows score",
    "arithmetic_reward": f"{OLD}; the verifiers of the rows score",
    "masked_mean_axis": f"{OLD}; loss_denominator says what is averaged",
    "update_progress_every": f"{OLD}; progress is shown with every step",
    "num_evals": f"{OLD}; local_eval_every is the number of steps from one evaluation to the next",
    "use_fp8_kv_cache": f'{OLD}; vllm_engine_args {{"kv_cache_dtype": "fp8"}} sets the type of the key-value cache',
}
"""Why each option has no effect in this project, by name."""

RENAMED: dict[str, str] = {
    "number_samples_per_prompt": "num_samples_per_prompt_rollout",
    "actor_num_gpus_per_node": "num_learners_per_node",
    "add_r1_style_format_reward": "apply_r1_style_format_reward",
    "penalty_reward_value": "non_stop_penalty_value",
    "tool_tag_names": "tool_call_names",
    "eval_freq": "local_eval_every",
    "local_eval_freq": "local_eval_every",
}
"""Earlier names and abbreviations, with their names in this project."""


def _correction(cap: Any) -> dict[str, Any]:
    """In open-instruct a cap above 0 switched the correction on, and 0 switched it off."""
    try:
        is_on = float(cap) > 0
    except (TypeError, ValueError):
        is_on = True  # a script's variable; or not a number, which reading rho_clamp_upper_bound will report
    return {"rho_clamp_upper_bound": cap, "use_rho_correction": "True"} if is_on else {"use_rho_correction": "False"}


def _limit_of_calls(limits: Any) -> dict[str, Any]:
    """In open-instruct each tool could have its own limit."""
    different = list(dict.fromkeys(map(str, limits))) if isinstance(limits, list) else [limits]
    if len(different) > 1:
        raise ValueError("one limit holds for the calls of all tools together. Write it as --max_steps")
    return {"max_steps": different[0] if different else limits}


BY_VALUE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "truncated_importance_sampling_ratio_cap": _correction,
    "max_tool_calls": _limit_of_calls,
}
"""Earlier options whose value decides which options and values replace them. ValueError: this project cannot do that."""

REFUSED: dict[str, str] = {
    "mask_tool_use": "answers of tools are never trained on as if the model had said them. Their cross-entropy may be: --ce_coef",
    "search_api_endpoint": "no server of this kind is asked. --tools search looks into a file of texts, which --tool_configs "
    '\'{"index": "FILE"}\' names, and --tools generic_mcp asks an MCP server',
    "number_documents_to_search": 'the tool itself is told, as in --tools search --tool_configs \'{"index": "FILE", '
    '"num_results": 3}\'',
    "code_tool_api_endpoint": 'the tool itself is told, as in --tools python --tool_configs \'{"api_endpoint": "URL"}\'',
}
"""Why a run with each of these options is refused, by name. A value that changes nothing is accepted."""

OTHER_VALUES: dict[str, dict[str, str]] = {
    "kl_estimator": {"kl1": "0", "kl2": "1", "kl3": "2", "kl4": "3"},
    "chat_template_name": {"olmo123": "None"},  # never existed there: the tokenizer's own template is used
}
"""Earlier spellings of values, by option."""
_ASKS_FOR_NOTHING = {
    "mask_tool_use": (
        "true",
        "t",
        "yes",
        "y",
        "1",
        "[]",
        "",
    ),  # a bare switch is "[]", and in `translate` it is ""
}
"""Values that change nothing, for options where these values are not just false and none."""


@dataclass
class ForeignOptions:
    """Removes foreign options from the written options, and notes what became of each."""

    knows_any: bool = True
    notes: dict[str, str] = field(default_factory=dict)
    """What became of each option, by the name as it was written."""
    translations: set[str] = field(default_factory=set)
    """The options in `notes` whose value the run uses, under another name or in another spelling."""
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*WITHOUT_EFFECT, *RENAMED, *BY_VALUE, *REFUSED] if self.knows_any else []

    def of_file_and_command_line(
        self, in_file: Mapping[str, Any], on_command_line: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options of this project. The command line wins over the file, even if the two use different names for an option."""
        own_options = self.without_foreign(on_command_line)
        in_file = {name: value for name, value in in_file.items() if name not in on_command_line}
        return self.without_foreign(in_file, overrides=own_options) | own_options

    def without_foreign(
        self, options: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The options of this project. A value under an earlier name is used unless `options` also contains the present name, or
        `overrides` does, whose options win."""
        own_options = {name: value for name, value in options.items() if name not in self.names}
        for name, value in options.items() if self.knows_any else ():
            if name in RENAMED:
                replacements = {RENAMED[name]: True if value == [] else value}  # a bare switch
                own_options |= self._taken(
                    name, replacements, own_options.keys() | (overrides or {}).keys(), spelling=RENAMED[name]
                )
            elif name in BY_VALUE:
                own_options |= self._by_value(name, value, own_options.keys() | (overrides or {}).keys())
            elif name in WITHOUT_EFFECT:
                self.notes[name] = WITHOUT_EFFECT[name]
            elif name in REFUSED:
                if asks_for_nothing(name, value):
                    self.notes[name] = "asks for nothing that is not so"
                else:
                    self.refused[name] = REFUSED[name]
            elif name in OTHER_VALUES and str(value) in OTHER_VALUES[name]:
                own_options[name] = OTHER_VALUES[name][str(value)]
                self.notes[name] = f"{value} is taken as {own_options[name]}"
                self.translations.add(name)
        return own_options

    def _by_value(self, name: str, value: Any, options: Collection[str]) -> dict[str, Any]:
        try:
            replacements = BY_VALUE[name](value)
        except ValueError as error:
            self.refused[name] = str(error)
            return {}
        return self._taken(name, replacements, options)

    def _taken(
        self, name: str, replacements: Mapping[str, Any], options: Collection[str], *, spelling: str = ""
    ) -> dict[str, Any]:
        """The replacements of an option that are not in `options`. Also makes the note on the option."""
        new = {option: value for option, value in replacements.items() if option not in options}
        if new:
            self.notes[name] = f"taken as {spelling or ' '.join(f'{option} {new[option]}' for option in new)}"
            self.translations.add(name)
        else:
            holds = "is given too, and holds" if len(replacements) == 1 else "are given too, and hold"
            self.notes[name] = f"{' and '.join(replacements)} {holds}"
        return new

    @property
    def mistakes(self) -> list[str]:
        """One mistake for each reason, with all options that it applies to."""
        return [
            f"{' '.join(f'--{name}' for name, why in self.refused.items() if why == reason)}: {reason}"
            for reason in dict.fromkeys(self.refused.values())
        ]

    def warning(self) -> str:
        """What became of the options, one line for each reason; "" if there were no foreign options."""
        groups = {
            "These options are not this project's, and the run goes on without their effect:": self.notes.keys()
            - self.translations,
            "These options have other names or values in this project:": self.translations,
        }
        return "\n".join(line for head, names in groups.items() if names for line in (head, *self._lines(names)))

    def _lines(self, names: Collection[str]) -> Iterator[str]:
        notes = {name: reason for name, reason in self.notes.items() if name in names}
        for reason in dict.fromkeys(notes.values()):
            together = " ".join(f"--{name}" for name, why in notes.items() if why == reason)
            yield f"  {together}: {reason}"


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a value changes nothing."""
    return str(value).lower() in _ASKS_FOR_NOTHING.get(name, ("false", "none", "[]", ""))
