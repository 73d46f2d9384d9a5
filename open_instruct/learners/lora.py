"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): the model's weights are frozen, and only small matrices beside its
linear layers are trained.

    a layer of the learner     W x + s B (A x)     W: (out, in), frozen; A: (r, in) and B: (out, r) are trained; s = alpha / r
    an engine                  W + s B A           one merged weight, without an adapter: the learner merges it or, where only
                                                   A and B are sent, the engine
    the reference policy       W x                 the same model with s = 0, so it takes no memory

B begins as 0, so the first policy is the base model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.lora_merge import IN_PEFT_FILES, BaseOfAdapter, add_low_rank

ADAPTER = "default"
"""peft's name for an adapter that was given no name."""


def add_adapter(model: torch.nn.Module, args: GRPOConfig) -> None:
    """Add adapters, in place, to the layers that `--lora_target_modules` names. Afterwards only adapters have a gradient.

    Raises ValueError if the model has no such layers.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets: Any = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        use_rslora=args.use_rslora,
        lora_dropout=0.0,  # the engine has no dropout, so with dropout the learner's policy would differ from the engine's
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=args.model_name_or_path,
        revision=args.model_revision,
    )
    inject_adapter_in_model(config, model)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(merged_name(name) is None)


def leave_frozen_out_of_checkpoints(engine: Any) -> None:
    """Leave frozen parameters out of checkpoints also under a second name, such as the head of a model whose head is its
    embedding. DeepSpeed itself leaves out parameters without a gradient, but not their second names."""
    engine_state_dict = engine.module_state_dict

    def adapter_state_dict(*arguments: Any, **options: Any) -> dict[str, Any]:
        frozen = {
            name
            for name, parameter in engine.module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        return {name: value for name, value in engine_state_dict(*arguments, **options).items() if name not in frozen}

    engine.module_state_dict = adapter_state_dict


def merged_name(name: str) -> str | None:
    """The parameter's name in the model without adapters: `q_proj.weight` for `q_proj.base_layer.weight`; None for a parameter of
    an adapter."""
    parts = name.split(".")
    if ADAPTER in parts and any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part != "base_layer")


class Adapters:
    """The adapters of a model, by the names of the weights that they change; empty for a model without adapters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = {_adapted_weight(name, layer): layer for name, layer in _lora_layers(model)}

    def parameters_of(self, names: Any) -> list[torch.nn.Parameter]:
        """The parameters that `merged` reads in addition to these weights."""
        layers = [self._layers[name] for name in names if name in self._layers]
        return [part[ADAPTER].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` with its adapter added, in the weight's dtype; the weight itself if it has no adapter. Under ZeRO-3 the weight
        and its adapter have to be gathered before."""
        layer = self._layers.get(name)
        if layer is None:
            return weight
        if _is_plain(layer):
            return add_low_rank(
                weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
            )
        delta = layer.get_delta_weight(ADAPTER)
        return (weight.float() + delta.float()).to(weight.dtype)

    def base(self, weights: Mapping[str, torch.Tensor]) -> BaseOfAdapter | None:
        """What an engine needs, in addition to the adapters' weights, to merge them itself; None where it cannot merge them, or
        where the merged weights would be no larger than the adapters.

        Args:
            weights: all weights of a checkpoint by name. Only their shapes and dtypes are read.
        """
        num_merged = num_alone = 0
        for name, layer in self._layers.items():
            if name not in weights or not _is_plain(layer):
                return None
            num_rows, num_columns = weights[name].shape
            num_merged += num_rows * num_columns
            num_alone += layer.r[ADAPTER] * (num_rows + num_columns)
        scalings = {layer.scaling[ADAPTER] for layer in self._layers.values()}
        if num_alone >= num_merged or len(scalings) > 1:
            return None
        dtypes = {name: str(weight.dtype).removeprefix("torch.") for name, weight in weights.items()}
        return BaseOfAdapter(dtypes, scalings.pop())


class ModelWithoutAdapter:
    """Calls `engine`, a learner's DeepSpeed engine, with its adapters scaled to 0: the reference model of a run with LoRA.

    The adapters' layers still run, because under ZeRO-3 every pass has to call the same layers in the same order. Call it without
    gradients.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scalings = [layer.scaling for _, layer in _lora_layers(engine.module)]

    def __call__(self, *args: Any) -> Any:
        with self._off():
            return self._engine(*args)

    @contextmanager
    def _off(self) -> Iterator[None]:
        before = [scaling[ADAPTER] for scaling in self._scalings]
        for scaling in self._scalings:
            scaling[ADAPTER] = 0.0
        try:
            yield
        finally:
            for scaling, value in zip(self._scalings, before, strict=True):
                scaling[ADAPTER] = value


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by their names in peft's files."""
    return {
        IN_PEFT_FILES + name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if merged_name(name) is None
    }


def save_adapter(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write what `peft.PeftModel.from_pretrained` and vLLM read: `adapter_config.json` and `adapter_model.safetensors`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = getattr(model, "peft_config")[ADAPTER]  # noqa: B009 - peft puts it there, and no type knows of it
    config.inference_mode = True
    config.save_pretrained(directory)
    save_file(dict(weights), directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def _is_plain(layer: Any) -> bool:
    """Whether A and B are matrices that belong to one linear layer, whose weight is (out, in)."""
    return isinstance(layer.get_base_layer(), torch.nn.Linear) and not hasattr(layer, "parameter_name")


def _adapted_weight(name: str, layer: Any) -> str | None:
    """The name of the weight that a layer's adapter changes. Experts and routers are plain parameters, which peft knows by their
    own names."""
    return merged_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
