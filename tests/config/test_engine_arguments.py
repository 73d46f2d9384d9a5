"""`--vllm_engine_args`: read, refused, passed on to vLLM, and part of a run's identity where they change samples."""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, make_args

from open_instruct.config.checks import RULES
from open_instruct.config.cli import UsageError, parse_args
from open_instruct.config.engine_arguments import CHANGES_SAMPLES, SET_BY, _known_arguments, engine_arguments_are_free
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.open_instruct_options import WITHOUT_EFFECT
from open_instruct.config.option_values import convert
from open_instruct.data.run_identity import differences, run_identity
from open_instruct.device import Device
from open_instruct.engines import vllm_engine
from open_instruct.fully_async_main import _flatten, compose
from open_instruct.registry import option_kinds
from open_instruct.run.rollout_manager import engine_options

GPU = Device("cuda", "bfloat16", "sdpa")
NO_FUSION = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}


def parsed(text: str) -> dict[str, Any]:
    words = ["--model_name_or_path", str(TINY_MODEL), "--vllm_engine_args", text]
    return parse_args(words, GRPOConfig).vllm_engine_args


def test_engine_arguments_are_one_json_object(tmp_path: Path) -> None:
    assert parsed(json.dumps(NO_FUSION)) == NO_FUSION
    path = tmp_path / "options.yaml"
    path.write_text(f"model_name_or_path: {TINY_MODEL}\nvllm_engine_args:\n  kv_cache_dtype: fp8\n")
    assert parse_args(["--config", str(path)], GRPOConfig).vllm_engine_args == {"kv_cache_dtype": "fp8"}
    config = compose(["rollout.vllm_engine_args={kv_cache_dtype:fp8}", f"model.model_name_or_path={TINY_MODEL}"])
    written, _, mistakes = _flatten(config, GRPOConfig)
    assert convert(written["vllm_engine_args"], option_kinds(GRPOConfig)["vllm_engine_args"]) == {
        "kv_cache_dtype": "fp8"
    }
    assert mistakes == []


@pytest.mark.parametrize("text", ["fp8", "[1]", "{", "3", '{"a": 1, "a": 2}', '{"a": NaN}', ""])
def test_other_engine_arguments_are_a_mistake(text: str) -> None:
    with pytest.raises(UsageError, match=r"--vllm_engine_args.*expected one JSON object"):
        parsed(text)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("kv_cache_dtype", GPU, None),
        ("max_num_batched_tokens", GPU, None),
        ("max_num_batched_tokens", None, "because on CPU it follows from the device"),
        ("dtype", GPU, "because --model_dtype sets it"),
        ("gpu_memory_utilization", None, "because --vllm_gpu_memory_utilization sets it"),
        ("hf_token", GPU, "set HF_TOKEN in the environment"),
        ("kv-cache-dtyp", GPU, "vLLM's engine has no such argument. Did you mean kv_cache_dtype?"),
        ("xyzxyz", GPU, "They are the fields of vllm.EngineArgs."),
    ],
)
def test_engine_arguments_that_a_run_sets_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, device: Device | None, expected: str | None
) -> None:
    args = make_args(vllm_engine_args={name: 1})
    if device is not None:
        monkeypatch.setattr(GRPOConfig, "device", device)
    told = list(engine_arguments_are_free(args))
    assert len(told) == (expected is not None)
    assert all((expected or "") in mistake for mistake in told)
    assert all(mistake.startswith(f"--vllm_engine_args {name}: ") for mistake in told)


def test_engine_arguments_are_checked_with_all_options() -> None:
    assert engine_arguments_are_free in RULES


def test_every_argument_that_an_engine_is_made_with_is_refused() -> None:
    tree = ast.parse(inspect.getsource(vllm_engine._engine_args))
    [call] = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "EngineArgs"]
    assert {keyword.arg for keyword in call.keywords} - {None} <= SET_BY.keys()


def test_names_of_arguments_and_options_exist() -> None:
    known = _known_arguments()
    assert known is not None
    assert {*SET_BY, *CHANGES_SAMPLES} <= known
    words = " ".join(SET_BY.values()).split()
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= option_kinds(GRPOConfig).keys()


def test_what_hints_say_of_vllm_is_there() -> None:
    """Its former `VLLM_ATTENTION_BACKEND`, for example, is ignored with a warning."""
    from vllm import envs

    variables = r"(?<![A-Z_])VLLM_[A-Z0-9_]+"
    pages = [path.read_text() for path in (Path(__file__).parents[2] / "docs").rglob("*.md")]
    named = {name for text in (*pages, *WITHOUT_EFFECT.values()) for name in re.findall(variables, text)}
    assert named
    assert named <= envs.environment_variables.keys()
    arguments = [
        json.loads(match[1])
        for hint in WITHOUT_EFFECT.values()
        if (match := re.search(r"vllm_engine_args (.*})", hint))
    ]
    assert len(arguments) >= 2
    known = _known_arguments()
    assert known is not None
    assert {name for values in arguments for name in values} <= known


def test_engine_arguments_come_after_those_of_the_device() -> None:
    args = make_args(vllm_engine_args=NO_FUSION)
    options = engine_options(args, GPU, seed=1, max_model_len=64)
    assert options.extra == {"gpu_memory_utilization": 0.9, **NO_FUSION}


@pytest.mark.extended
def test_engine_arguments_reach_vllm() -> None:
    """With them a user can switch off what vLLM chooses: the fusion that FlashInfer compiles, or the kernels of attention."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    given = NO_FUSION | {"attention_config": {"backend": "CPU_ATTN"}, "kv_cache_dtype": "auto"}
    args = make_args(vllm_engine_args=given)
    options = engine_options(args, args.device, seed=1, max_model_len=64)
    config = vllm_engine._engine_args(options).create_engine_config()
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False
    assert config.attention_config.backend is AttentionBackendEnum.CPU_ATTN
    assert config.scheduler_config.max_num_batched_tokens == 8192  # the device's own arguments stay


def test_a_resumed_run_needs_the_arguments_that_change_samples() -> None:
    plain, faster, coarser = (
        run_identity(make_args(vllm_engine_args=given))
        for given in ({}, {"max_num_partial_prefills": 2}, {"kv_cache_dtype": "fp8"})
    )
    assert differences(plain, faster) == []
    assert differences(plain, coarser) == ["--vllm_engine_args was {}, now {'kv_cache_dtype': 'fp8'}"]
    before_this_option = {"options": {k: v for k, v in plain["options"].items() if k != "vllm_engine_args"}}
    assert differences(before_this_option, coarser) == []
