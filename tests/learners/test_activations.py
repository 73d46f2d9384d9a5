"""What a forward pass keeps, counted without numbers, against forward passes with numbers on CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_args
from model_families import FAMILIES, family_config
from transformers import AutoConfig

from open_instruct.device import Device
from open_instruct.learners.activations import (
    ATTENTION,
    CannotCount,
    activation_bytes,
    kept_for_backward,
    model_on_meta,
)
from open_instruct.learners.cpu_norms import use_fewer_passes
from open_instruct.learners.lora import add_adapter
from open_instruct.learners.models import _drop_nothing

ROWS, COLUMNS = 4, 128
CPU, GPU = Device("cpu", "float32", "sdpa"), Device("cuda", "bfloat16", "sdpa")
MIXTURES = ["qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "granitemoe", "glm4_moe", "qwen2_moe"]
DENSE = ["llama", "gemma3_text", "starcoder2"]


def said(path: str, device: Device, **options: Any) -> int:
    model = model_on_meta(make_args(model_name_or_path=path, **options), device)
    return kept_for_backward(model, ROWS, COLUMNS)


def taken(path: str, device: Device, attention: str = "sdpa", **options: Any) -> int:
    """Bytes that a forward pass with numbers keeps, of a model set up as a learner's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, dtype=device.torch_dtype, attn_implementation=attention).train()
    _drop_nothing(model)
    if device.has_faster_layers:
        use_fewer_passes(model)
    if options.get("use_peft"):
        add_adapter(model, make_args(model_name_or_path=path, **options))
    storages: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(3, 60, (ROWS, COLUMNS))
    positions = torch.arange(COLUMNS).expand_as(ids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    del output
    return sum(storages.values())


def test_activations_are_what_torch_keeps(tied_model: str) -> None:
    """Against the tiny model, whose attention on CPU keeps what fused attention keeps."""
    assert said(tied_model, CPU) == pytest.approx(taken(tied_model, CPU), rel=0.05)


@pytest.mark.parametrize("options", [{}, {"use_peft": True, "lora_r": 4}], ids=["all", "adapters"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_what_is_said_of_a_family_is_what_torch_keeps(
    family: str, device: Device, options: dict[str, Any], tmp_path: Path
) -> None:
    config = family_config(family)
    if family == "starcoder2":
        config.residual_dropout = 0.1  # a learner drops nothing
    config.save_pretrained(tmp_path)
    # Torch on CPU has no fused attention for values of another size than keys.
    attention = ATTENTION if family == "deepseek_v3" else "sdpa"
    counted = said(str(tmp_path), device, **options)
    assert counted == pytest.approx(taken(str(tmp_path), device, attention, **options), rel=0.1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "falcon_h1"])  # the run refuses it
def test_every_family_is_counted(family: str, tmp_path: Path) -> None:
    family_config(family).save_pretrained(tmp_path)
    for device in (CPU, GPU):
        whole, adapters = said(str(tmp_path), device), said(str(tmp_path), device, use_peft=True, lora_r=2)
        assert 0 < adapters < 1.2 * whole


def test_autocast_is_itself_again_after_counting(tied_model: str) -> None:
    before = torch.autocast
    said(tied_model, CPU)
    assert torch.autocast is before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_with_attention_of_its_own_is_not_counted(tmp_path: Path, attention: str) -> None:
    AutoConfig.for_model("gptj", n_layer=1, n_head=2, n_embd=32, rotary_dim=8).save_pretrained(tmp_path)
    args = make_args(model_name_or_path=str(tmp_path))
    device = Device("cpu", "float32", attention)
    with pytest.raises(CannotCount, match="GPTJForCausalLM has attention of its own"):
        activation_bytes(model_on_meta(args, device), args, device)


def test_a_model_that_asks_for_numbers_is_not_counted(tied_model: str) -> None:
    model = model_on_meta(make_args(model_name_or_path=tied_model), CPU)
    model.base_model.register_forward_pre_hook(lambda module, args: bool(module.embed_tokens.weight.sum() > 0))
    with pytest.raises(CannotCount, match=r"^Qwen3ForCausalLM does not run without numbers \(.+\)$"):
        kept_for_backward(model, ROWS, COLUMNS)
