"""Weights go out under the names and in the shapes of the checkpoint, a layer at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import build_model
from safetensors.torch import load_file

from open_instruct.learners.checkpoint_format import CheckpointFormat, layer_groups
from open_instruct.learners.weight_sync import DeepSpeedWeightSource


def in_checkpoint_form(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Group by group, as weights are sent."""
    checkpoint_format, tensors = CheckpointFormat(model), model.state_dict()
    converted: dict[str, torch.Tensor] = {}
    for group in checkpoint_format.groups:
        part = checkpoint_format.convert({name: tensors[name] for name in group})
        assert not converted.keys() & part.keys()
        converted |= part
    return converted


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_converted_weights_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    build_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved, converted = load_file(tmp_path / "model.safetensors"), in_checkpoint_form(model)
    assert converted.keys() == saved.keys()
    assert all(torch.equal(converted[name], saved[name]) for name in saved)


def test_a_saved_model_has_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """As the learner writes it: from tensors that are converted already."""
    from transformers import AutoModelForCausalLM

    build_model("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = in_checkpoint_form(model)
    model.save_pretrained(tmp_path / "again", state_dict=state, save_original_format=False)
    saved, again = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_weights_that_are_not_finite_are_not_sent_the_first_time(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build_model("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    parameter = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    first = parameter.detach().flatten()[0].clone()
    source = DeepSpeedWeightSource(model, zero_stage=0)
    parameter.data.view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=r"^model.layers.1.mlp.up_proj.weight: 1 of \d+ weights are not finite"):
        list(source)
    parameter.data.view(-1)[0] = first
    assert len(list(source)) == len(source.metadata())


def test_metadata_says_what_conversion_yields_in_order(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build_model("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    said = [(name, tensor.shape, tensor.dtype) for name, tensor in CheckpointFormat(model).metadata()]
    assert said == [(name, tensor.shape, tensor.dtype) for name, tensor in in_checkpoint_form(model).items()]


def test_a_conversion_that_matched_nothing_is_not_reversed(tmp_path: Path) -> None:
    """Under ZeRO-3 `from_pretrained` keeps the conversions of checkpoints from before 2020 too."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    build_model("qwen3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.model.norm.LayerNorm = torch.nn.LayerNorm(4)
    model._weight_conversions = get_model_conversion_mapping(model)
    assert model._weight_conversions  # else there is nothing to see
    assert "model.norm.LayerNorm.weight" in in_checkpoint_form(model)


def test_a_conversion_across_layers_is_refused_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"both": torch.cat(list(weights.values()))} if len(weights) > 1 else dict(weights)

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", merge)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))})
    with pytest.raises(ValueError, match=r"cannot be sent layer by layer.*both"):
        CheckpointFormat(model)


def test_groups_hold_one_layer_each_and_what_is_outside_alone() -> None:
    names = ["embed.weight", "layers.0.a", "layers.0.experts.1.b", "layers.1.a", "norm.weight", "layers.0.bias"]
    assert layer_groups(names) == [
        ["embed.weight"],
        ["layers.0.a", "layers.0.experts.1.b", "layers.0.bias"],
        ["layers.1.a"],
        ["norm.weight"],
    ]
