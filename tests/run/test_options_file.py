"""`options.json`: what was given, what follows from it, and what is in force."""

import json
from pathlib import Path

import pytest
from conftest import TINY_MODEL

from open_instruct.config.cli import parse_args
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import option_fields
from open_instruct.run.options_file import DERIVED, options_in_force, write_options

OFF = {
    *("wandb_entity", "wandb_group_name", "engine_sleep_after_s", "cache_evolving_rubric_data_dir", "llm_judge_model"),
    *("llm_judge_api_base", "llm_judge_cache_dir", "code_api_url", "default_verifier", "verifier_workers"),
    *("teacher_model_name_or_path", "teacher_model_revision", "clip_ratio_c", "ref_policy_update_freq"),
    *("off_policy_mask_threshold", "generation_timeout", "agent_command", "agent_max_concurrent"),
    *("per_turn_max_tokens", "tool_output_max_tokens", "rc_max_state_age", "no_resampling_pass_rate"),
    *("dataset_local_cache_dir", "system_prompt_override_file", "chat_template_name", "model_revision"),
    *("gpu_memory", "num_gpus", "vllm_enable_prefix_caching", "metrics_port", "otlp_traces_endpoint"),
}
"""Options for which None means that there is no such thing or no such limit, or that another machine or vLLM decides."""


def args_of(tmp_path: Path, *words: str) -> GRPOConfig:
    return parse_args(
        ["--model_name_or_path", str(TINY_MODEL), "--output_dir", str(tmp_path), *words, "--device_type", "cpu"],
        GRPOConfig,
    )


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_each_option_without_a_value_of_its_own_is_derived_or_off() -> None:
    open_ended = {option.name for option in option_fields(GRPOConfig) if option.default in (None, "auto")}
    assert open_ended - DERIVED.keys() == OFF


def test_given_derived_and_in_force_are_apart(tmp_path: Path) -> None:
    args = args_of(tmp_path, "--seed", "7", "--temperature", "0.5", "--tools", "calculator")
    args.command_line = ["grpo_fast.py", "--seed", "7", "--exp_name", "two words"]
    content = read(write_options(args))
    assert content["given"] == {
        "model_name_or_path": str(TINY_MODEL),
        "output_dir": str(tmp_path),
        "seed": "7",
        "temperature": "0.5",
        "tools": ["calculator"],
        "device_type": "cpu",
    }
    assert content["command"] == "grpo_fast.py --seed 7 --exp_name 'two words'"
    derived = content["derived"]
    assert (derived["async_steps"], derived["max_staleness_allowed"], derived["use_rho_correction"]) == (1, 1, True)
    assert (derived["eval_temperature"], derived["model_dtype"], derived["run_name"]) == (0.5, "float32", "grpo__7")
    in_force = content["in_force"]
    assert in_force["rollout_workflow"] == "conversation"
    assert in_force["vllm_enforce_eager"] is True  # on CPU
    assert in_force["learning_rate"] == GRPOConfig(model_name_or_path="m").learning_rate
    assert in_force.keys() == {option.name for option in option_fields(GRPOConfig)}
    assert derived.items() <= in_force.items()
    assert content["versions"].keys() >= {"python", "torch", "ray"}


def test_a_given_value_is_not_derived(tmp_path: Path) -> None:
    args = args_of(tmp_path, "--async_steps", "3", "--eval_temperature", "0.25")
    content = read(write_options(args))
    assert not {"async_steps", "eval_temperature"} & content["derived"].keys()
    assert (content["in_force"]["async_steps"], content["in_force"]["staleness_threshold"]) == (3, 3)


def test_a_later_start_keeps_the_files_of_the_earlier_ones(tmp_path: Path) -> None:
    for seed in ("1", "2", "3"):
        write_options(args_of(tmp_path, "--seed", seed))
    seeds = {path.name: read(path)["in_force"]["seed"] for path in tmp_path.glob("options*.json")}
    assert seeds == {"options_1.json": 1, "options_2.json": 2, "options.json": 3}


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    args = args_of(
        tmp_path, "--run_name", "very-secret-value", "--llm_judge_api_base", "http://x/?key=very-secret-value"
    )
    args.command_line = ["grpo_fast.py", "--run_name", "very-secret-value"]
    text = write_options(args).read_text()
    assert "very-secret-value" not in text
    assert read(tmp_path / "options.json")["given"]["run_name"] == "***"


def test_options_of_the_users_own_parts_are_there(tmp_path: Path) -> None:
    args = args_of(tmp_path)
    args.own_options = {"my_strength": 2.0}
    assert options_in_force(args)["my_strength"] == 2.0
