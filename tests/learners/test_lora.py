"""Adapters: what the learner computes with them, and what engines and files get."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TIMEOUT_S, make_args
from model_families import FAMILIES, build_model

from open_instruct.data_types import GenerationResult, SamplingConfig
from open_instruct.engines.weight_update_client import WeightUpdateClient
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.lora import ModelWithoutAdapter, add_adapter, merged_name, save_adapter
from open_instruct.learners.weight_sync import DeepSpeedWeightSource, RayObjectSender


def with_adapter(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """The model with an adapter that changes what it computes."""
    add_adapter(model, make_args(use_peft=True, **options))
    change_adapter(model, seed=5)
    return model


def change_adapter(model: torch.nn.Module, *, seed: int, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, torch.arange(ids.shape[1])[None].expand_as(ids), 1.0)[0]


def load(directory: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt_oss", "falcon_h1"}))  # these two are refused
def test_merged_weights_compute_what_the_adapter_computes(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path / "base")
    base = load(tmp_path / "base")
    names = [name for name, _ in DeepSpeedWeightSource(base, zero_stage=0)]
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    before = logprobs_of(LogProbModel(base), ids)
    model: Any = with_adapter(base)
    adapted = logprobs_of(LogProbModel(model), ids)
    merged = dict(DeepSpeedWeightSource(model, zero_stage=0))
    assert list(merged) == names  # an engine sees no difference
    model.save_pretrained(tmp_path / "merged", state_dict=merged, save_original_format=False)
    assert (logprobs_of(LogProbModel(load(tmp_path / "merged")), ids) - adapted).abs().max() < 1e-5
    assert (adapted - before).abs().max() > 1e-3


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt_oss", "falcon_h1"}))
def test_an_engine_that_gets_the_adapter_alone_computes_what_the_learner_merges(family: str, tmp_path: Path) -> None:
    """Families whose experts have adapters send merged weights, because files have experts in another form."""
    from safetensors.torch import load_file

    build_model(family, tmp_path)
    model = with_adapter(load(tmp_path), lora_r=2)
    source = DeepSpeedWeightSource(model, zero_stage=0)
    has_adapted_experts = any(hasattr(module, "parameter_name") for module in model.modules())
    assert (source.base_of_adapter is None) == has_adapted_experts
    if (base := source.base_of_adapter) is not None:
        files = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
        files["another.weight"] = torch.zeros(1)
        merged = dict(base.merged(files.items(), source.adapter(), "cpu"))
        expected = dict(source)
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], weight) for name, weight in expected.items())
        del files[next(iter(expected))]
        with pytest.raises(ValueError, match="the model's files lack"):
            list(base.merged(files.items(), source.adapter(), "cpu"))


def test_an_adapter_that_is_not_smaller_is_merged_by_the_learner(tied_model: str) -> None:
    assert DeepSpeedWeightSource(with_adapter(load(tied_model), lora_r=128), zero_stage=0).base_of_adapter is None
    assert DeepSpeedWeightSource(load(tied_model), zero_stage=0).base_of_adapter is None


def test_the_reference_is_the_model_without_its_adapter(tied_model: str) -> None:
    model = load(tied_model)
    ids = torch.arange(5, 25)[None]
    before = logprobs_of(LogProbModel(model), ids)
    engine = LogProbModel(with_adapter(model))
    engine.module = engine  # as DeepSpeed's engine holds it
    adapted = logprobs_of(engine, ids)
    assert torch.equal(logprobs_of(ModelWithoutAdapter(engine), ids), before)
    assert torch.equal(logprobs_of(engine, ids), adapted)
    assert not torch.equal(adapted, before)


def test_only_adapters_are_trained_and_no_layer_outside_the_targets_has_one(tied_model: str) -> None:
    model = load(tied_model)
    add_adapter(model, make_args(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"]))
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".q_proj.lora_" in name or ".v_proj.lora_" in name for name in trained)
    heads = (
        model.config.num_attention_heads * model.config.head_dim
        + model.config.num_key_value_heads * model.config.head_dim
    )
    assert sum(trained.values()) == 4 * model.config.num_hidden_layers * (2 * model.config.hidden_size + heads)


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 8 / 4), (True, 8 / 4**0.5)])
def test_scale_of_an_adapter(tied_model: str, use_rslora: bool, scale: float) -> None:
    model = load(tied_model)
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_submodule(name).weight.detach().clone()
    model = with_adapter(model, lora_r=4, lora_alpha=8, use_rslora=use_rslora)
    layer: Any = model.get_submodule(name)
    expected = before + scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(dict(DeepSpeedWeightSource(model, zero_stage=0))[f"{name}.weight"], expected.detach())


def test_peft_reads_what_is_saved(tied_model: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = with_adapter(load(tied_model))
    save_adapter(model, DeepSpeedWeightSource(model, zero_stage=0).adapter(), tmp_path)
    loaded = PeftModel.from_pretrained(load(tied_model), str(tmp_path))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    assert loaded.peft_config["default"].base_model_name_or_path == tied_model


def test_names() -> None:
    assert merged_name("model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    assert merged_name("model.layers.0.q_proj.lora_A.default.weight") is None
    assert merged_name("model.norm.weight") == "model.norm.weight"


class CountingClient(WeightUpdateClient):
    num_bytes = 0
    """Of all weights that were sent."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        import ray

        self.num_bytes += ray.get(update_info["bucket"])["buffer"].nbytes
        super().update_weights(update_info)


def test_engine_and_learner_agree_after_each_update(
    ray_session: Any, engines: SimpleNamespace, tied_model: str, prompts: list[np.ndarray]
) -> None:
    model, engine = with_adapter(load(tied_model)), engines.actors[0]
    client = CountingClient([engine], workers_per_engine=1, timeout_s=TIMEOUT_S)
    sender = RayObjectSender(client=client, source=DeepSpeedWeightSource(model, zero_stage=0), is_sender=True)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sampling = SamplingConfig(max_tokens=24, n=4, seed=11)

    def differences(model: Any, results: list[GenerationResult]) -> torch.Tensor:
        return torch.cat(
            [
                logprobs_of(LogProbModel(model), torch.tensor([[*prompt, *response]]))[0, len(prompt) - 1 :]
                - torch.tensor(of_engine)
                for prompt, result in zip(prompts, results, strict=False)
                for response, of_engine in zip(result.responses, result.logprobs, strict=True)
            ]
        ).abs()

    try:
        for version in (1, 2, 3):
            change_adapter(model, seed=version, size=0.02)
            client.begin(version)
            sender.send_weights()
            assert client.num_bytes == version * 4 * num_trained  # adapters, and no weight of the model
            results = ray_session.get(
                engine.generate_with_single_engine.remote(prompts[:4], sampling), timeout=TIMEOUT_S
            )
            assert differences(model, results).mean() < 1e-5
            assert differences(model, results).max() < 1e-4  # of rare tokens, with or without an adapter
            assert differences(load(tied_model), results).mean() > 1e-2
    finally:
        base = RayObjectSender(
            client=client, source=DeepSpeedWeightSource(load(tied_model), zero_stage=0), is_sender=True
        )
        client.begin(0)
        base.send_weights()
