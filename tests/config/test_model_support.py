"""Families that cannot be trained exactly are refused before anything starts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL, make_args
from model_families import _DENSE, FAMILIES, build_model, family_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from open_instruct.config.attention_calls import attention_calls, take_parts
from open_instruct.config.checks import collect_mistakes
from open_instruct.config.model_checks import (
    adapters_have_layers,
    layers_can_compute_again,
    model_family_can_be_trained,
    rows_can_be_divided,
    with_attention_that_fits,
)
from open_instruct.config.model_support import (
    linear_cost,
    logits_scale_and_cap,
    problem_with_weights,
    why_not_divided,
    why_refused,
)

REASONS = [
    ("gpt_oss", "attention sinks"),
    ("falcon_h1", "recurrent layers"),
    ("deepseek_v3", "latent attention on CPU"),
]
REFUSED = {family for family, _ in REASONS}


@pytest.mark.parametrize(
    ("family", "reason"),
    REASONS,
)
def test_refused_family_is_named_with_reason_and_cure(tmp_path: Path, family: str, reason: str) -> None:
    family_config(family).save_pretrained(tmp_path)
    [mistake] = [one for one in collect_mistakes(make_args(model_name_or_path=str(tmp_path))) if "of type" in one]
    assert mistake.startswith(f"--model_name_or_path {tmp_path}: a model of type {family} is not supported")
    assert reason in mistake
    assert "Choose a model of a family that docs/guides/models.md lists" in mistake


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
def test_other_families_are_not_refused(family: str) -> None:
    assert (
        why_refused(family_config(family), device_kind="cpu", attn_implementation="sdpa", max_sequence_length=96)
        is None
    )


def test_capped_attention_needs_an_implementation_that_caps() -> None:
    config = family_config("gemma2")
    config.attn_logit_softcapping = 50.0
    for fused in ("sdpa", "flash_attention_2"):
        refused = why_refused(config, device_kind="cuda", attn_implementation=fused, max_sequence_length=96)
        assert "attn_logit_softcapping=50" in (refused or "")
        assert "Use --attn_implementation auto or eager" in (refused or "")
    assert why_refused(config, device_kind="cpu", attn_implementation="eager", max_sequence_length=96) is None


@pytest.mark.parametrize(
    ("family", "changes", "device", "attention"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, "cpu", "eager"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "cuda", "eager"),
        ("nemotron", {}, "cuda", "sdpa"),
    ],
)
def test_auto_is_an_attention_that_computes_the_model(
    tmp_path: Path, family: str, changes: dict[str, Any], device: str, attention: str
) -> None:
    config_of(family, changes).save_pretrained(tmp_path)
    given = {"model_name_or_path": str(tmp_path), "device_type": device}
    args = make_args(**given)
    assert not list(model_family_can_be_trained(args))
    changed, told = with_attention_that_fits(args)
    assert changed.device.attn_implementation == attention
    assert told.startswith(f"--attn_implementation auto is {attention} for this model: ")
    assert with_attention_that_fits(changed) == (changed, "")
    [mistake] = model_family_can_be_trained(make_args(**given, attn_implementation="flash_attention_2"))
    assert f"Use --attn_implementation auto or {attention}" in mistake


def test_auto_is_the_choice_of_the_device_for_other_models(tmp_path: Path) -> None:
    family_config("qwen3").save_pretrained(tmp_path)
    for device in ("cpu", "cuda"):
        args = make_args(model_name_or_path=str(tmp_path), device_type=device)
        assert with_attention_that_fits(args) == (args, "")


WINDOW = {"sliding_window": 16, "use_sliding_window": True}


def config_of(family: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    base = {**_DENSE, "moe_intermediate_size": 64, **FAMILIES.get(family, {})}
    return AutoConfig.for_model(family, **(base if family != "gemma4_text" else {}) | changes)


def flash_refuses(config: Any) -> str | None:
    return why_refused(config, device_kind="cuda", max_sequence_length=96, attn_implementation="flash_attention_2")


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {"head_dim": 20}, "heads of 20 and 20 numbers. Use --attn_implementation auto or sdpa"),
        ("qwen3", {"head_dim": 264}, "heads of 264 and 264 numbers"),
        ("qwen2_moe", WINDOW | {"layer_types": ["sliding_attention"] * 2}, "how far it may look back"),
        ("phimoe", WINDOW | {"num_local_experts": 4}, "how far it may look back"),
        (
            "llama4_text",
            {"head_dim": 32, "layer_types": ["chunked_attention", "full_attention"]},
            "how far it may look back",
        ),
        ("stablelm", {}, "which tokens of a row are one sequence"),
        ("falcon", {}, "which tokens of a row are one sequence"),
        ("gemma4_text", {}, "heads of 512 and 512 numbers"),
    ],
)
def test_what_the_kernels_of_flash_attention_lack_is_told(family: str, changes: dict[str, Any], reason: str) -> None:
    config = config_of(family, changes)
    assert "flash attention cannot compute it: its " in (flash_refuses(config) or "")
    assert reason in (flash_refuses(config) or "")
    assert why_refused(config, device_kind="cuda", max_sequence_length=96, attn_implementation="sdpa") is None


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED | {"deepseek_v3"}))
def test_flash_attention_computes_the_other_families(family: str) -> None:
    assert flash_refuses(family_config(family)) is None


def test_windows_that_are_told_are_known() -> None:
    calls = attention_calls(family_config("gemma3_text"))
    assert [call.window for call in calls] == [16, None]
    assert {(call.head_size, call.value_size, call.takes_parts, call.caps_or_sinks) for call in calls} == {
        (32, 32, True, False)
    }
    latent = attention_calls(family_config("deepseek_v3"))
    assert {(call.head_size, call.value_size) for call in latent} == {(64, 32)}
    assert all(call.caps_or_sinks for call in attention_calls(family_config("gpt_oss")))


@pytest.mark.parametrize("family", [*sorted(FAMILIES.keys() - {"falcon_h1"}), "stablelm", "nemotron", "falcon"])
def test_prompts_are_shared_only_where_layers_are_told(family: str) -> None:
    assert take_parts(config_of(family, {})) == (family in FAMILIES)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {}, ""),
        ("gpt_neox", {}, ""),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depend on the length",
        ),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4}}},
            "depend on the length",
        ),
        ("gemma3_text", {"sliding_window": 8}, "windows"),
        ("falcon", {}, "the layers of falcon do not use the attention interface"),
        ("gpt2", {}, "the layers of gpt2 do not use the attention interface"),
    ],
)
def test_why_rows_are_not_divided(family: str, changes: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(family, **{**_DENSE, **changes})
    why = why_not_divided(config)
    assert reason in why
    assert bool(reason) == bool(why)


def test_rows_are_not_divided_for_eager_attention(tmp_path: Path) -> None:
    family_config("llama").save_pretrained(tmp_path)
    options = {"attn_implementation": "eager", "sequence_parallel_size": 2, "num_learners_per_node": [2]}
    args = make_args(model_name_or_path=str(tmp_path), **options)
    assert [one for one in rows_can_be_divided(args) if "Use sdpa or auto" in one]


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_auto_is_plain_attention_where_there_is_no_other(tmp_path: Path, family: str) -> None:
    AutoConfig.for_model(family, n_layer=1, n_head=2, n_embd=32, hidden_size=32).save_pretrained(tmp_path)
    args = make_args(model_name_or_path=str(tmp_path))
    settled, told = with_attention_that_fits(args)
    assert settled.attn_implementation == "eager"
    assert "no fused attention" in told
    [mistake] = model_family_can_be_trained(make_args(model_name_or_path=str(tmp_path), attn_implementation="sdpa"))
    assert "Use --attn_implementation auto or eager" in mistake


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom"])
def test_what_a_token_costs_is_known_without_a_size_between_the_layers(family: str) -> None:
    config = AutoConfig.for_model(family, hidden_size=64, num_attention_heads=4, ffn_dim=256)
    assert linear_cost(config) == pytest.approx(2 * 64 * (4 * 64 + 3 * 256) / (4 * 64))


def test_gradient_checkpointing_that_a_model_lacks_is_told(tmp_path: Path) -> None:
    AutoConfig.for_model("jetmoe", num_hidden_layers=1).save_pretrained(tmp_path)
    [mistake] = layers_can_compute_again(make_args(model_name_or_path=str(tmp_path), gradient_checkpointing=True))
    assert "no gradient checkpointing for a model of type jetmoe" in mistake
    assert not list(layers_can_compute_again(make_args(gradient_checkpointing=True)))


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "c_fc"]])
def test_adapters_find_the_layers_of_gpt2(tmp_path: Path, targets: list[str]) -> None:
    AutoConfig.for_model("gpt2", n_layer=1).save_pretrained(tmp_path)
    args = make_args(model_name_or_path=str(tmp_path), use_peft=True, lora_target_modules=targets)
    assert not list(adapters_have_layers(args))


def test_window_that_is_wider_in_the_engine_is_refused_for_sequences_beyond_it() -> None:
    config = family_config("cohere2")
    assert (
        why_refused(config, device_kind="cpu", attn_implementation="sdpa", max_sequence_length=config.sliding_window)
        is None
    )
    refused = why_refused(
        config, device_kind="cpu", attn_implementation="sdpa", max_sequence_length=config.sliding_window + 1
    )
    assert "one token wider in the engine" in (refused or "")


def test_logits_of_a_family_are_scaled_or_capped_as_its_config_says() -> None:
    assert logits_scale_and_cap(family_config("qwen3")) == (1.0, None)
    assert logits_scale_and_cap(family_config("granite")) == (0.25, None)
    assert logits_scale_and_cap(family_config("cohere")) == (0.25, None)
    assert logits_scale_and_cap(family_config("gemma2")) == (1.0, 5.0)


# --- weight files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_of_a_family_fit_unless_a_tensor_is_missing_or_of_another_shape(tmp_path: Path, family: str) -> None:
    """Experts, tied heads and old names are held otherwise in files than in models."""
    build_model(family, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert problem_with_weights(tmp_path) == ""
    name = next(name for name in sorted(weights) if "layers.1" in name and weights[name].dim() == 2)
    save_file(weights | {name: weights[name][:-1].contiguous()}, file)
    assert re.search("has the shape|issues during automatic conversion", problem_with_weights(tmp_path))
    del weights[name]
    save_file(weights, file)
    assert re.search("weights lack|has the shape|issues during automatic conversion", problem_with_weights(tmp_path))


def test_comparing_weights_says_nothing_by_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bars and no report of Transformers stand between a user and the one message."""
    shutil.copytree(TINY_MODEL, tmp_path, dirs_exist_ok=True)
    save_file(
        {"model.norm.weight": torch.zeros(3), **{f"x.{n}": torch.zeros(1) for n in range(9)}},
        tmp_path / "model.safetensors",
    )
    assert "weights lack" in problem_with_weights(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_weights_of_the_tiny_model_fit_in_two_parts(tmp_path: Path) -> None:
    weights = load_file(TINY_MODEL / "model.safetensors")
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    names = sorted(weights)
    for number, part in enumerate((names[:10], names[10:])):
        save_file({name: weights[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: f"part-{int(n >= 10)}.safetensors" for n, name in enumerate(names)}})
    )
    assert problem_with_weights(tmp_path) == ""


@pytest.mark.parametrize("new", [True, False])
def test_pickled_weights_are_whole_or_damaged(tmp_path: Path, new: bool) -> None:
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(100)}, file, _use_new_zipfile_serialization=new)
    assert problem_with_weights(tmp_path) == ""
    if new:
        file.write_bytes(file.read_bytes()[:-1])
        assert problem_with_weights(tmp_path) == "pytorch_model.bin is damaged. Save or download it again."
