"""One case per mistake in the options, and the values derived from them."""

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL

from open_instruct.config import checks as config_checks
from open_instruct.config import grpo_config as config
from open_instruct.config import model_checks
from open_instruct.config.checks import collect_mistakes
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import load_tokenizer
from open_instruct.device import Device
from open_instruct.option_limits import limits_of
from open_instruct.run.rollout_manager import engine_options
from open_instruct.workflows.rc import prompts as rc_prompts
from open_instruct.workflows.rc.workflow import ReasoningCache

CPU = Device("cpu", "float32", "sdpa")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU machine with room for 8 workers, no cluster, and no way to the hub."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Device, "num_places", 8)
    monkeypatch.setattr(config, "current_device", lambda **_: CPU)
    monkeypatch.setattr(
        model_checks, "_problem_with_hub_name", lambda name, revision: "not on the hub. Check the name."
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the checks read of a model: its config and its tokenizer, with a chat template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 600}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def make_args(model_dir: Path, tmp_path: Path) -> Callable[..., GRPOConfig]:
    """A config without mistakes, but for what is given."""

    def make(**options: Any) -> GRPOConfig:
        given: dict[str, Any] = {"model_name_or_path": str(model_dir), "output_dir": str(tmp_path / "out")} | options
        return GRPOConfig(**given)

    return make


MakeArgs = Callable[..., GRPOConfig]


def test_defaults_have_no_mistake(make_args: MakeArgs) -> None:
    assert collect_mistakes(make_args()) == []


RC: dict[str, Any] = {"rollout_workflow": "rc", "rc_max_summary_tokens": 32, "pack_length": 576}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_unique_prompts_rollout": 0}, "--num_unique_prompts_rollout 0: out of range. Give 1 or more."),
    ({"num_samples_per_prompt_rollout": -4}, "--num_samples_per_prompt_rollout -4: out of range. Give 1 or more."),
    ({"vllm_num_engines": 0}, "--vllm_num_engines 0: out of range. Give 1 or more."),
    ({"save_freq": 0}, "--save_freq 0: out of range. Give 1 or more, or -1 for never."),
    ({"keep_last_n_checkpoints": 0}, "--keep_last_n_checkpoints 0: out of range. Give 1 or more, or -1 for all."),
    ({"async_steps": -1, "staleness_threshold": 0}, "--async_steps -1: out of range. Give 0 or more."),
    (
        {"staleness_threshold": 3, "max_staleness_allowed": 2},
        "--max_staleness_allowed 2 --staleness_threshold 3 --async_steps None: pacing aims at samples that are older than the "
        "bound allows. Set max_staleness_allowed to 3 or more.",
    ),
    (
        {"over_issued_prompts": 2, "async_steps": 0},
        "--over_issued_prompts 2 --staleness_threshold None --max_staleness_allowed None --async_steps 0: a prompt that a step "
        "leaves to the next step becomes older than the threshold. Set staleness_threshold to 1 or more and "
        "max_staleness_allowed to more than that, or over_issued_prompts to 0.",
    ),
    (
        {"over_issued_prompts": 17, "max_staleness_allowed": 2},
        "--over_issued_prompts 17 --num_unique_prompts_rollout 16: more prompts than a step takes. Give 16 or fewer.",
    ),
    (
        {"trigger_parameter_sync_step": 3},
        "--trigger_parameter_sync_step 3 --staleness_threshold None --async_steps None: between two updates of the engines' "
        "weights samples become 2 steps old. Set staleness_threshold to 2 or more, or trigger_parameter_sync_step to 1.",
    ),
    (
        {"straggler_policy": "truncate", "inflight_updates": False},
        "--straggler_policy truncate --inflight_updates False: without in-flight updates all tokens of a response have "
        "the same age. Use drop or wait.",
    ),
    (
        {"streaming": True, "num_mini_batches": 2},
        "--streaming True --num_epochs 1 --num_mini_batches 2: with streaming a step begins before its batch is complete, so "
        "it can make only one update. Set num_epochs and num_mini_batches to 1, or leave out streaming.",
    ),
    (
        {"max_queue_size": 63},
        "--max_queue_size 63 --num_unique_prompts_rollout 16 --num_samples_per_prompt_rollout 4: the queue cannot hold one "
        "step. Set max_queue_size to 64 or more, or leave it out.",
    ),
    (
        {"use_vllm_logprobs": True, "use_rho_correction": True},
        "--use_vllm_logprobs True --use_rho_correction True: with the engine's log-probs as the old policy, rho is always 1 "
        "and corrects nothing. Leave out one of the two.",
    ),
    (
        {"rho_mask_lower_bound": 2.0, "rho_mask_upper_bound": 1.0},
        "--rho_mask_lower_bound 2.0 --rho_mask_upper_bound 1.0: the lower bound is above the upper bound. Exchange them, or "
        "set the upper bound to 0 for none.",
    ),
    (
        {"rho_mask_tv_divergence": True, "rho_mask_sequence_level": True},
        "--rho_mask_tv_divergence True --rho_mask_sequence_level True: both decide which responses are masked. Leave out one "
        "of the two.",
    ),
    (
        {"rho_mask_tv_divergence": True},
        "--rho_mask_tv_divergence True --rho_mask_upper_bound 0.0: nothing would be masked. Set an upper bound, such as 0.1.",
    ),
    (
        {"rho_mask_sequence_level": True},
        "--rho_mask_sequence_level True --rho_mask_lower_bound 0.0 --rho_mask_upper_bound 0.0: nothing would be masked. "
        "Set a lower or an upper bound.",
    ),
    (
        {"rho_mask_tv_divergence": True, "rho_mask_upper_bound": 0.6, "rho_mask_lower_bound": 0.5},
        "--rho_mask_tv_divergence True --rho_mask_lower_bound 0.5: no response is too near to the policy. Leave out",
    ),
    (
        {"rho_as_in_open_instruct": True},
        "--rho_as_in_open_instruct True --rho_mask_sequence_level False --rho_mask_tv_divergence False: it says how these two "
        "mask, and neither is on. Set one of them, or leave out rho_as_in_open_instruct.",
    ),
    (
        {"async_steps": 0, "staleness_threshold": 3},
        "--async_steps 0 --staleness_threshold 3: both say how far generation may run ahead. Leave out one of the two; in a "
        "YAML file, set it to null.",
    ),
    (
        {"vllm_keep_prefix_cache": True, "vllm_recompute_kv_cache": True},
        "--vllm_keep_prefix_cache True --vllm_recompute_kv_cache True: one uses keys and values of older weights, the other "
        "never does. Leave out one of the two.",
    ),
    (
        {"vllm_keep_prefix_cache": True, "vllm_enable_prefix_caching": False},
        "--vllm_keep_prefix_cache True --vllm_enable_prefix_caching False: it would have no effect. Set "
        "vllm_enable_prefix_caching too, or leave out vllm_keep_prefix_cache.",
    ),
    (
        {"rc_buffer_size": 5},
        "--rollout_workflow single_turn --rc_buffer_size 5: the workflow single_turn has no such option. Leave it out, or set",
    ),
    (
        {**RC, "rc_states_per_problem": 4},
        "--rc_states_per_problem 4 --rc_num_reasoning_steps 3: a trajectory has a state before each of its cycles. Ask for 3 "
        "or fewer.",
    ),
    (
        {**RC, "rc_train_on": "turns", "rc_buffer_size": 5},
        "--rc_train_on turns --rc_buffer_size 5: with rc_train_on turns every trajectory begins at the beginning, so no state is "
        "kept. Set rc_buffer_size to 0, or rc_train_on to states.",
    ),
    (
        {**RC, "rc_reasoning_prompt_template": "{problem} {so_far}{curr_summary}"},
        "--rc_reasoning_prompt_template: {so_far} is no field. There are {problem}, {curr_summary}; write {{so_far}} where "
        "braces are meant.",
    ),
    (
        {**RC, "rc_summarization_prompt_template": "{problem} {existing_summary}"},
        "--rc_summarization_prompt_template: it lacks {reasoning}. Write it where that text shall stand.",
    ),
    (
        {**RC, "rc_reasoning_prompt_template": "file:/no/such/file"},
        "--rc_reasoning_prompt_template: it cannot be read (No such file or directory). Check the path.",
    ),
    (
        {**RC, "rc_turn_weights": ["thinking=2"]},
        "--rc_turn_weights thinking=2: thinking=2: write reasoning=WEIGHT or reasoning:NUMBER=WEIGHT, or summarization in its "
        "place.",
    ),
    (
        {**RC, "rc_turn_weights": ["summarization=2"]},
        "--rc_turn_weights summarization=2 --rc_summary_reward none: summaries are not trained. Set rc_summary_reward, or "
        "leave out their weights.",
    ),
    (
        {**RC, "rc_summary_reward": "downstream_mean", "rc_summary_samples": 1},
        "--rc_summary_reward downstream_mean --rc_summary_samples 1: a summary is compared with other summaries, and there "
        "are none. Give 2 or more.",
    ),
    (
        {**RC, "rc_summary_reward": "zero"},
        "--rc_summary_reward zero --filter_zero_std_samples True --beta 0.05: summaries that all score 0 are moved by the KL "
        "alone. Set filter_zero_std_samples to False and beta above 0, or rc_summary_reward to none.",
    ),
    (
        {**RC, "pack_length": 543},
        "--pack_length 543 --max_prompt_token_length 256 --response_length 256 --rc_max_summary_tokens 32: the longest prompt "
        "with the longest response does not fit into a row. Set pack_length to 544 or more.",
    ),
    ({"alerts": ["age>3"]}, "--alerts age>3: not a limit on a metric. Write metric=number, such as max_sample_age=3."),
    ({"temperature": 0.0}, "--temperature 0.0: out of range. Give more than 0, at most 2.0."),
    (
        {"eval_temperature": 0.0, "eval_pass_at_k": 4},
        "--eval_pass_at_k 4 --eval_temperature 0.0: greedy responses are all the same. Set eval_pass_at_k to 1, or "
        "eval_temperature above 0.",
    ),
    (
        {"temperature": 1e-6},
        "--temperature 1e-06: the engine would take 0.01 in its place. Give 0.01 or more.",
    ),
    (
        {"eval_temperature": 0.001, "eval_pass_at_k": 4},
        "--eval_temperature 0.001: the engine would take 0.01 in its place. Give 0.01 or more, or 0 for greedy responses.",
    ),
    ({"eval_temperature": -0.1}, "--eval_temperature -0.1: out of range. Give 0 or more, at most 2.0."),
    ({"eval_top_p": 1.5}, "--eval_top_p 1.5: out of range. Give more than 0, at most 1."),
    ({"learning_rate": float("nan")}, "--learning_rate nan: out of range. Give 0 or more."),
    ({"beta": float("inf")}, "--beta inf: out of range. Give 0 or more."),
    ({"seed": 2**32}, "--seed 4294967296: out of range. Give 0 or more, at most 4294967295."),
    ({"num_learners_per_node": [1, 0]}, "--num_learners_per_node 1 0: every node needs a learner. Give 1"),
    ({"num_learners_per_node": []}, "--num_learners_per_node (empty): every node needs a learner. Give 1"),
    (
        {"loss_fn": "ppo"},
        "--loss_fn ppo: unknown. Choose one of dapo, grpo, dr_grpo, cispo, dppo_tv, gmpo, gspo, sapo.",
    ),
    ({"deepspeed_stage": 1}, "--deepspeed_stage 1: unknown. Choose one of 0, 2, 3."),
    (
        {"loss_denominator": "tokens"},
        "--loss_denominator tokens: the loss cannot be divided by it. Give token, sequence, constant or a number",
    ),
    (
        {"loss_denominator": 0.0},
        "--loss_denominator 0.0: the loss cannot be divided by it. Give token, sequence, constant or a number above 0.",
    ),
    ({"stop_strings": ["</s>", ""]}, "--stop_strings '': an empty string would end every response at once."),
    (
        {"pack_length": 511},
        "--pack_length 511 --max_prompt_token_length 256 --response_length 256: the longest prompt with the longest response "
        "does not fit into a row. Set pack_length to 512 or more.",
    ),
    ({"load_ref_policy": False}, "--beta 0.05 --load_ref_policy False: the KL divergence needs a reference policy."),
    (
        {"num_samples_per_prompt_rollout": 1},
        "--num_samples_per_prompt_rollout 1 --advantage_normalization_type centered: a response is compared with",
    ),
    (
        {"rho_level": "sequence", "async_steps": 0},
        "--rho_level sequence --use_rho_correction None: it would have no effect. Set use_rho_correction too",
    ),
    (
        {"rho_mask_upper_bound": 2.0, "use_vllm_logprobs": True},
        "--rho_mask_upper_bound 2.0 --use_rho_correction None: it",
    ),
    (
        {"weight_transport": "shm", "num_learners_per_node": [1, 1]},
        "--weight_transport shm --num_learners_per_node 1 1: the shared memory of one node cannot be read on another.",
    ),
    ({"kl_denominator": "tokens"}, "--kl_denominator tokens: the loss cannot be divided by it."),
    (
        {"kl_denominator": "sequence", "streaming": True},
        "--kl_denominator sequence --loss_denominator None --loss_fn dapo --streaming True: how the two compare is known only",
    ),
    ({"lora_r": 8}, "--lora_r 8 --use_peft False: it would have no effect."),
    (
        {"deepspeed_zpg": 2, "num_learners_per_node": [2]},
        "--deepspeed_zpg 2 --deepspeed_stage 0: it would have no effect. Set deepspeed_stage 3 too, or leave out",
    ),
    (
        {"deepspeed_zpg": 2, "deepspeed_stage": 3, "num_learners_per_node": [3]},
        "--deepspeed_zpg 2 --num_learners_per_node 3: 3 learners cannot be divided into groups of 2. "
        "Give a number that divides 3.",
    ),
    (
        {"use_peft": True, "ref_policy_update_freq": 5},
        "--ref_policy_update_freq 5 --use_peft True: with LoRA the reference policy is the model without its adapter.",
    ),
    (
        {"sequence_parallel_size": 2, "num_learners_per_node": [3]},
        "--sequence_parallel_size 2 --num_learners_per_node 3: 3 learners cannot be divided into groups of 2. "
        "Give a number that divides 3.",
    ),
    ({"alpha": 0.9}, "--alpha 0.9 --ref_policy_update_freq None: it would have no effect."),
    (
        {"non_stop_penalty_value": -1.0},
        "--non_stop_penalty_value -1.0 --non_stop_penalty False: it would have no effect.",
    ),
    (
        {"overlong_penalty_factor": 2.0},
        "--overlong_penalty_factor 2.0 --overlong_buffer_len 0: it would have no effect.",
    ),
    (
        {"loss_fn": "grpo", "clip_higher": 0.3},
        "--loss_fn grpo --clip_higher 0.3: the loss grpo does not use clip_higher.",
    ),
    (
        {"loss_fn": "cispo", "clip_lower": 0.1},
        "--loss_fn cispo --clip_lower 0.1: the loss cispo does not use clip_lower.",
    ),
    ({"entropy_coef": float("nan")}, "--entropy_coef nan: out of range. Give a finite number."),
    (
        {"distillation_top_k": 4},
        "--distillation_top_k 4 --teacher_model_name_or_path None: there is no teacher. Name one, or leave out distillation_top",
    ),
    ({"use_task_rewards": False}, "--use_task_rewards False --teacher_model_name_or_path None: there is no teacher."),
    ({"teacher_model_name_or_path": "/nowhere"}, "--teacher_model_name_or_path /nowhere: no such directory."),
    (
        {"total_episodes": 63},
        "--total_episodes 63 --num_unique_prompts_rollout 16 --num_samples_per_prompt_rollout 4: fewer episodes than one step "
        "needs. Set total_episodes to 64 or more.",
    ),
    ({"num_mini_batches": 65}, "--num_mini_batches 65 --num_unique_prompts_rollout 16 "),
    (
        {"dataset_mixer_eval_list": ["a", "1.0"], "local_eval_every": -1},
        "--dataset_mixer_eval_list a 1.0 --local_eval_every -1 --eval_on_step_0 False: the evaluation would never run.",
    ),
    ({"eval_on_step_0": True}, "--eval_on_step_0 True --dataset_mixer_eval_list (empty): there is nothing to evaluate"),
    ({"system_prompt_override_file": "/no/such"}, "--system_prompt_override_file /no/such: there is no readable file."),
    ({"output_dir": "/dev/null/out"}, "--output_dir /dev/null/out: /dev/null is a file. Give a directory."),
    (
        {"checkpoint_state_dir": "out/../out", "output_dir": "out", "save_freq": 5},
        "--checkpoint_state_dir out/../out --output_dir out --save_freq 5: the model and the checkpoint of a step would",
    ),
    ({"checkpoint_state_dir": "/dev/null"}, "--checkpoint_state_dir /dev/null: /dev/null is a file. Give a"),
    ({"attn_implementation": "flash_attention_2"}, "--attn_implementation flash_attention_2: flash attention needs"),
    (
        {"num_learners_per_node": [4], "vllm_num_engines": 3, "vllm_tensor_parallel_size": 2},
        "--num_learners_per_node 4 --vllm_num_engines 3 --vllm_tensor_parallel_size 2: 10 workers, and this machine "
        "has room for 8 (",
    ),
    ({"model_name_or_path": "./no/model"}, "--model_name_or_path ./no/model: no such directory. Check the path."),
    ({"model_name_or_path": "/dev/null"}, "--model_name_or_path /dev/null: no such directory. Check the path."),
    ({"model_name_or_path": "/dev"}, "--model_name_or_path /dev: no config.json in it."),
    ({"model_name_or_path": ""}, "--model_name_or_path (empty): empty. Name a model."),
    (
        {"output_dir": ""},
        "--output_dir (empty): an empty path, which would be the current directory. Name a directory.",
    ),
    (
        {"rho_level": "sequence", "use_vllm_logprobs": True},
        "--rho_level sequence --use_rho_correction None: it would have no effect. Leave out use_vllm_logprobs, or",
    ),
    (
        {"model_name_or_path": "org/missing", "model_revision": "v2"},
        "--model_name_or_path org/missing --model_revision v2: not on the hub. Check the name.",
    ),
]


@pytest.mark.parametrize(("options", "expected"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_each_mistake_is_told_once(make_args: MakeArgs, options: dict[str, Any], expected: str) -> None:
    mistakes = collect_mistakes(make_args(**options))
    assert len(mistakes) == 1, mistakes
    assert mistakes[0].startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"use_peft": True, "lora_target_modules": ["q_proj", "query"]},
            "the model has no such layer (query). Give all-linear alone or some of down_proj, gate_proj, k_proj,",
        ),
        ({"use_peft": True, "lora_target_modules": ["lm_head"]}, "the model has no such layer (lm_head)."),
        (
            {"vllm_tensor_parallel_size": 3},
            "the model has 32 attention heads and 32 of keys and values, which cannot be divided among 3 workers of an engine.",
        ),
        (
            {"sequence_parallel_size": 3, "num_learners_per_node": [3]},
            "the model has 32 attention heads and 32 of keys and values, which cannot be divided among 3 learners.",
        ),
    ],
)
def test_what_the_model_lacks_is_told(make_args: MakeArgs, options: dict[str, Any], expected: str) -> None:
    [mistake] = collect_mistakes(make_args(**options))
    assert mistake.startswith(tuple(f"--{name} " for name in options))
    assert expected in mistake


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ""),
        ({"filter_zero_std_samples": False, "use_task_rewards": False, "distillation_top_k": 0}, ""),
        (
            {"temperature": 0.7},
            "{teacher} --temperature 0.7: the teacher's probabilities are those of temperature 1. Set",
        ),
        ({"active_sampling": True}, "{teacher} --active_sampling True: with a teacher no group is left out, so"),
        (
            {"distillation_loss": "forward_kl", "distillation_top_k": 0},
            "--distillation_top_k 0 --distillation_loss forward_kl: this loss is a sum over the teacher's likeliest tokens.",
        ),
        (
            {"distillation_top_k": 10**6},
            "{teacher} --distillation_top_k 1000000: the teacher knows 151936 tokens. Give fewer.",
        ),
        (
            {"teacher_num_engines": 5, "teacher_tensor_parallel_size": 2},
            "--num_learners_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --teacher_num_engines 5 "
            "--teacher_tensor_parallel_size 2: 12 workers, and this machine has room for 8",
        ),
        (
            {"teacher_model_name_or_path": str(TINY_MODEL)},
            f"--teacher_model_name_or_path {TINY_MODEL}: 2 tokens of the model are others in the teacher's tokenizer, such as",
        ),
    ],
)
def test_mistakes_about_the_teacher(
    make_args: MakeArgs, model_dir: Path, options: dict[str, Any], expected: str
) -> None:
    teacher = {"teacher_model_name_or_path": str(model_dir)}
    mistakes = collect_mistakes(make_args(**teacher | options))
    assert len(mistakes) == bool(expected), mistakes
    if mistakes:
        assert mistakes[0].startswith(expected.format(teacher=f"--teacher_model_name_or_path {model_dir}"))


def test_a_teacher_reads_one_token_more_than_the_model(make_args: MakeArgs, model_dir: Path) -> None:
    lengths = {"max_prompt_token_length": 300, "response_length": 300, "pack_length": 600}
    assert collect_mistakes(make_args(**lengths)) == []
    [mistake] = collect_mistakes(make_args(**lengths, teacher_model_name_or_path=str(model_dir)))
    assert "the teacher reads 600 tokens at most, and 601 are needed. Set shorter lengths." in mistake
    lengths |= {"response_length": 100, "eval_response_length": 300}  # an evaluation asks for the length
    [mistake] = collect_mistakes(make_args(**lengths, teacher_model_name_or_path=str(model_dir)))
    assert "--eval_response_length 300: the teacher reads 600 tokens" in mistake


MAXRL = {"advantage_normalization_type": "maxrl"}
FORM = {"apply_r1_style_format_reward": True, "additive_format_reward": True}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlong_buffer_len": 16}, "--overlong_buffer_len 16"),
        ({"non_stop_penalty": True, "non_stop_penalty_value": -0.5}, "--non_stop_penalty_value -0.5"),
        (FORM | {"r1_style_format_reward": -1.0}, "--r1_style_format_reward -1.0"),
        (
            FORM | {"r1_style_format_reward": -1.0, "overlong_buffer_len": 16},
            "--overlong_buffer_len 16 --r1_style_format_reward -1.0",
        ),
    ],
)
def test_maxrl_has_no_negative_rewards(make_args: MakeArgs, options: dict[str, Any], said: str) -> None:
    [mistake] = collect_mistakes(make_args(**options | MAXRL))
    assert mistake.startswith(
        f"--advantage_normalization_type maxrl {said}: a reward may be negative, which maxrl counts as 0."
    )


@pytest.mark.parametrize(
    "options",
    [
        MAXRL | {"overlong_buffer_len": 16, "overlong_penalty_factor": 0.0},
        MAXRL | {"non_stop_penalty": True, "non_stop_penalty_value": 0.5},
        MAXRL | {"apply_r1_style_format_reward": True},
        MAXRL | FORM,
        FORM | {"r1_style_format_reward": -1.0},
        {"eval_temperature": 0.0},
        {"eval_temperature": 0.01, "temperature": 0.01, "eval_pass_at_k": 4},
        {"eval_temperature": 0.0, "eval_pass_at_k": 4, "rollout_workflow": "conversation", "tools": ["calculator"]},
        {"save_freq": -1, "checkpoint_state_freq": -1, "keep_last_n_checkpoints": -1, "local_eval_every": -1},
        {"async_steps": 0},
        {"async_steps": 2, "staleness_threshold": 2},
        {
            "rho_as_in_open_instruct": True,
            "rho_mask_tv_divergence": True,
            "rho_mask_upper_bound": 0.6,
            "rho_mask_lower_bound": 0.5,
        },
        {"async_steps": 0, "vllm_top_p": 0.9, "rho_clamp_upper_bound": 3.0},
        {"num_samples_per_prompt_rollout": 1, "advantage_normalization_type": "reinforce_plus_plus"},
        {"use_vllm_logprobs": True},
        {"total_episodes": 64, "num_mini_batches": 64},
        {"load_ref_policy": False, "beta": 0.0},
        {"loss_denominator": 128.0},
        {"dataset_mixer_eval_list": ["a", "16"], "eval_on_step_0": True, "local_eval_every": -1},
        {"response_length": 300, "pack_length": 556},
        {"num_learners_per_node": [7], "vllm_num_engines": 1},
        {"num_learners_per_node": [8, 8], "vllm_num_engines": 16},
    ],
    ids=str,
)
def test_these_are_no_mistakes(make_args: MakeArgs, options: dict[str, Any]) -> None:
    assert collect_mistakes(make_args(**options)) == []


def test_all_mistakes_at_once(make_args: MakeArgs) -> None:
    mistakes = collect_mistakes(make_args(temperature=-1.0, pack_length=0, output_dir="/dev/null", loss_fn="ppo"))
    assert [mistake.split()[0] for mistake in mistakes] == [
        "--loss_fn",
        "--pack_length",
        "--temperature",
        "--pack_length",
        "--output_dir",
    ]


def test_every_number_has_limits() -> None:
    hints = typing.get_type_hints(GRPOConfig)
    numbers = {name for name, hint in hints.items() if {int, float} & {hint, *typing.get_args(hint)}}
    checked_elsewhere = {
        "num_learners_per_node",
        "loss_denominator",
        "kl_denominator",
        "llm_judge_price_per_million_tokens",
        "reward_weights",
    }
    assert set(limits_of(GRPOConfig)) == numbers - checked_elsewhere


def test_a_model_that_reads_too_little(make_args: MakeArgs) -> None:
    args = make_args(eval_response_length=345)
    (mistake,) = collect_mistakes(args)
    assert mistake.startswith("--model_name_or_path ")
    assert mistake.endswith("--eval_response_length 345: the model reads 600 tokens at most. Set shorter lengths.")
    assert collect_mistakes(make_args(eval_response_length=344)) == []


def test_a_directory_without_permission(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config_checks.os, "access", lambda path, mode: Path(path) != tmp_path)
    (mistake,) = collect_mistakes(make_args())
    assert mistake == f"--output_dir {tmp_path}/out: {tmp_path} cannot be written to. Give another directory."


def test_rollouts_in_place_of_a_file(make_args: MakeArgs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (mistake,) = collect_mistakes(make_args(save_traces=True, rollouts_save_path=str(tmp_path / "file" / "x")))
    assert mistake == f"--rollouts_save_path {tmp_path}/file/x: {tmp_path}/file is a file. Give a directory."


def test_traces_need_the_record_that_they_are_made_of(make_args: MakeArgs) -> None:
    (mistake,) = collect_mistakes(make_args(save_traces=True, record=False))
    assert mistake.startswith(
        "--save_traces True --record False: it would have no effect. Set record too, or leave out save"
    )


def test_room_of_a_cluster_is_not_judged_here(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert collect_mistakes(make_args(vllm_num_engines=100)) == []


def test_colocated_learners_and_engines_take_turns(make_args: MakeArgs) -> None:
    assert collect_mistakes(make_args(colocate=True)) == []
    assert make_args(colocate=True).staleness_bound == 0
    for options, words in (
        (
            {"async_steps": 1},
            "nothing is generated while learners train. Set async_steps and max_staleness_allowed to 0",
        ),
        ({"streaming": True, "deepspeed_stage": 2}, "engines and learners use the devices by turns"),
        ({"engine_sleep_after_s": 5.0}, "engines sleep whenever learners train."),
        ({"vllm_num_engines": 2}, "the engines need 2 places on the devices of the learners, and there are 1."),
    ):
        mistakes = collect_mistakes(make_args(colocate=True, **options))
        assert any(words in mistake for mistake in mistakes), (options, mistakes)


def test_single_gpu_mode_takes_one_learner_and_one_engine(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", "bfloat16", "sdpa", colocated=True)
    monkeypatch.setattr(config, "current_device", lambda **_: gpu)
    monkeypatch.setattr(Device, "num_places", 1)
    half = {"single_gpu_mode": True, "vllm_gpu_memory_utilization": 0.5}
    assert collect_mistakes(make_args(**half)) == []
    (mistake,) = collect_mistakes(make_args(**half, vllm_num_engines=2))
    assert mistake.startswith("--single_gpu_mode True --num_learners_per_node 1 --vllm_num_engines 2 ")
    (mistake,) = collect_mistakes(make_args(single_gpu_mode=True))
    assert mistake.startswith("--single_gpu_mode True --vllm_gpu_memory_utilization 0.9: ")
    assert "0.5 or less" in mistake
    mistakes = collect_mistakes(make_args(**half, colocate=True))
    assert any("with single_gpu_mode both stay in its memory. Leave out one of the two." in one for one in mistakes)


def test_single_gpu_mode_means_nothing_without_a_gpu(make_args: MakeArgs) -> None:
    args = make_args(single_gpu_mode=True)
    assert collect_mistakes(args) == []
    assert not args.shares_devices


@pytest.mark.parametrize("option", [None, True, False])
@pytest.mark.parametrize(("device", "by_default"), [(CPU, True), (Device("cuda", "bfloat16", "sdpa"), False)])
def test_engines_are_eager_as_the_option_says_and_by_default_only_on_cpu(
    make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch, option: bool | None, device: Device, by_default: bool
) -> None:
    monkeypatch.setattr(config, "current_device", lambda **_: device)
    args = make_args(vllm_enforce_eager=option)
    eager = by_default if option is None else option
    options = engine_options(args, device, seed=0, max_model_len=64)
    assert (options.enforce_eager, "ir_op_priority" in options.extra) == (eager, eager and device is CPU)
    assert make_args().vllm_enforce_eager is None


def test_gpus_are_counted(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "current_device", lambda **_: Device("cuda", "bfloat16", "sdpa"))
    assert collect_mistakes(make_args(num_learners_per_node=[4], vllm_num_engines=4)) == []
    (mistake,) = collect_mistakes(make_args(num_learners_per_node=[4], vllm_num_engines=5))
    assert "9 workers, and this machine has room for 8 (GPUs: 8, one worker each)" in mistake


def test_a_broken_config_file(make_args: MakeArgs, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    (mistake,) = collect_mistakes(make_args(model_name_or_path=str(tmp_path)))
    assert mistake.startswith(f"--model_name_or_path {tmp_path}: it cannot be read: ")


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(model_checks, "HUB_TIMEOUT_S", 0.05)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: model_checks.threading.Event().wait(1))
    problem = model_checks._problem_with_hub_name("org/name", None)
    assert problem.startswith("no such directory here, not in the local cache")
    assert "no answer in " in problem


def test_load_tokenizer(make_args: MakeArgs) -> None:
    tokenizer, mistakes = load_tokenizer(make_args())
    assert mistakes == []
    assert tokenizer is not None
    assert tokenizer.encode("b") == [1]


def test_a_tokenizer_without_chat_template(make_args: MakeArgs, model_dir: Path, tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer(make_args())
    assert tokenizer is not None
    tokenizer.chat_template, template = None, tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    tokenizer.chat_template = template
    found, (mistake,) = load_tokenizer(make_args(tokenizer_name_or_path=str(tmp_path)))
    assert found is None
    assert mistake.startswith(f"--tokenizer_name_or_path {tmp_path}: its tokenizer has no chat template. ")


def test_a_model_without_tokenizer(make_args: MakeArgs, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    found, (mistake,) = load_tokenizer(make_args(model_name_or_path=str(tmp_path)))
    assert found is None
    assert mistake.startswith(f"--model_name_or_path {tmp_path}: it holds no tokenizer. ")


def test_a_missing_model_is_told_by_the_options_alone(make_args: MakeArgs) -> None:
    assert load_tokenizer(make_args(model_name_or_path="./no/model")) == (None, [])


@pytest.mark.parametrize(
    ("options", "corrects"),
    [
        ({}, True),
        ({"async_steps": 0}, False),
        ({"async_steps": 0, "vllm_top_p": 0.9}, True),
        ({"vllm_top_p": 0.9, "use_vllm_logprobs": True}, False),
        ({"vllm_top_p": 0.9, "use_rho_correction": False}, False),
        ({"async_steps": 0, "use_rho_correction": True}, True),
        ({"async_steps": 0, "vllm_enable_prefix_caching": True, "vllm_keep_prefix_cache": True}, True),
    ],
    ids=str,
)
def test_rho_corrects_where_engine_and_learner_differ(
    make_args: MakeArgs, options: dict[str, Any], corrects: bool
) -> None:
    assert make_args(**options).corrects_off_policy == corrects


def test_derived_values(make_args: MakeArgs, tmp_path: Path) -> None:
    args = make_args(total_episodes=1000, num_learners_per_node=[2, 3], stop_strings=["x"], seed=7)
    assert args.run_title == "grpo__7"
    assert args.num_samples_per_step == 64
    assert args.num_training_steps == 15
    assert args.num_learners == 5
    assert args.tokenizer_name == args.model_name_or_path
    assert args.state_dir == tmp_path / "out" / "checkpoint_states"
    assert args.max_sequence_length == 512
    assert (args.train_sampling.n, args.train_sampling.stop, args.train_sampling.max_tokens) == (4, ("x",), 256)
    assert (args.eval_sampling.n, args.eval_sampling.temperature, args.eval_sampling.top_p) == (1, 1.0, 1.0)
    assert dataclasses.replace(args, vllm_top_p=0.9, temperature=0.7).eval_sampling.top_p == 0.9  # as in open-instruct
    told = dataclasses.replace(
        args, run_name="mine", checkpoint_state_dir="c", eval_temperature=0.0, eval_top_p=0.5, eval_response_length=300
    )
    assert told.run_title == "mine"
    assert told.state_dir == Path("c")
    assert told.max_sequence_length == 556
    assert (told.eval_sampling.temperature, told.eval_sampling.top_p, told.eval_sampling.max_tokens) == (0.0, 0.5, 300)


def test_rules_speak_of_what_their_message_begins_with(make_args: MakeArgs) -> None:
    """`cli.py` reads the options that a mistake rests on from the part before the colon."""

    def names(mistake: str) -> Iterator[str]:
        return (word.removeprefix("--") for word in mistake.split(": ")[0].split() if word.startswith("--"))

    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    for options, _ in WRONG:
        for mistake in collect_mistakes(make_args(**options)):
            assert set(names(mistake))
            assert set(names(mistake)) <= fields


# --- reasoning cache --------------------------------------------------------------------------------------------------


def test_lengths_with_the_reasoning_cache(make_args: MakeArgs) -> None:
    lengths = {"response_length": 100, "max_prompt_token_length": 50, "rc_max_summary_tokens": 20}
    args = make_args(**RC | lengths)
    assert args.lengths.trained == 50 + 20 + 100
    assert (
        args.max_sequence_length == 50 + 100 + 2 * 20
    )  # the prompt of a summary holds reasoning and the summary before
    trained = make_args(**RC | lengths, rc_summary_reward="downstream_mean")
    assert trained.lengths.trained == trained.max_sequence_length


@pytest.mark.parametrize(
    ("options", "responses"),
    [
        ({}, 2 * 4),
        ({"rc_summary_reward": "zero", "rc_summary_samples": 3}, 2 * (3 + 3 * 4)),
        ({"rc_train_on": "turns"}, 4 * 3),
        ({"rc_train_on": "turns", "rc_summary_reward": "zero"}, 4 * 5),
    ],
)
def test_responses_of_a_prompt(make_args: MakeArgs, options: dict[str, Any], responses: int) -> None:
    assert make_args(**RC, **options).lengths.samples == responses
    assert make_args().lengths.samples == 4


def test_templates_are_those_of_the_other_door() -> None:
    import yaml

    actor = yaml.safe_load((Path(__file__).parents[2] / "conf" / "rc_base.yaml").read_text())["actor"]
    assert actor["reasoning_prompt_template"] == rc_prompts.REASONING_TEMPLATE
    assert actor["summarization_prompt_template"] == rc_prompts.SUMMARIZATION_TEMPLATE


def test_a_template_can_be_a_file(make_args: MakeArgs, tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("{problem} then {curr_summary}")
    args = make_args(**RC, rc_reasoning_prompt_template=f"file:{path}")
    assert collect_mistakes(args) == []
    path_is_read_by_the_driver = args.workflow
    path.unlink()
    assert path_is_read_by_the_driver.options["rc_reasoning_prompt_template"] == "{problem} then {curr_summary}"
    assert isinstance(path_is_read_by_the_driver.make(), ReasoningCache)
