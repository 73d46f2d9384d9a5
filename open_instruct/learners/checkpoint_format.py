"""Converts weights to the names and shapes of the checkpoint that a model was read from.

Transformers 5 holds some weights in another form than the checkpoint. It holds the experts of a Qwen3-MoE layer in one tensor,
`experts.gate_up_proj`, where the checkpoint has `experts.0.gate_proj.weight`, `experts.0.up_proj.weight` and so on. vLLM's
loaders know only the checkpoint's names and silently skip other names. `save_pretrained` converts a model back to the
checkpoint's form; this module applies the same conversion to a few parameters at a time, so that no process holds a second copy
of the model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from open_instruct.learners.lora import merged_name


class CheckpointFormat:
    """Converts weights of one model to the checkpoint's form, group by group.

    A group holds the tensors that a conversion needs at once: the tensors of one decoder layer, or one tensor outside the
    layers. The experts of one layer never need the experts of another layer.

    Args:
        model: a model of Transformers. Its conversion belongs to the checkpoint that `from_pretrained` read, or is
            the default of its class if the model was made otherwise.

    Raises ValueError if a conversion needs tensors of several layers at once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        _keep_used_conversions(model)
        tensors = dict(_saved_tensors(model))
        self.groups: list[list[str]] = layer_groups(tensors)
        """Names in the model, in the order of its parameters, then of its buffers."""
        self._check_groups({name: _on_meta(tensor) for name, tensor in tensors.items()})

    def convert(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One whole group under the checkpoint's names. The tensors are views of the group's tensors where that is possible."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, dict(weights))

    def metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors that converting all groups yields, in order, with tensors that have no memory."""
        tensors = dict(_saved_tensors(self._model))
        for group in self.groups:
            yield from self.convert({name: _on_meta(tensors[name]) for name in group}).items()

    def _check_groups(self, tensors: dict[str, torch.Tensor]) -> None:
        at_once = {name: tensor.shape for name, tensor in self.convert(tensors).items()}
        by_group = {name: tensor.shape for name, tensor in self.metadata()}
        if wrong := sorted(set(at_once.items()) ^ set(by_group.items())):
            raise ValueError(
                f"{type(self._model).__name__}: its weights cannot be sent layer by layer, because the checkpoint has "
                f"{', '.join(sorted({name for name, _ in wrong})[:4])} made of tensors of several layers. Train another model."
            )


def stacked_elements(model: torch.nn.Module) -> int:
    """Elements of the parameters that are made of several tensors of the checkpoint, such as the experts of a layer.

    Args:
        model: a model on torch's meta device.
    """
    with_adapter = ((merged_name(full_name), parameter) for full_name, parameter in model.named_parameters())
    parameters = {name: parameter for name, parameter in with_adapter if name is not None}
    converted = CheckpointFormat(model)
    num_elements = 0
    for group in converted.groups:
        for name in group:
            if name in parameters and len(converted.convert({name: _on_meta(parameters[name])})) > 1:
                num_elements += parameters[name].numel()
    return num_elements


def _keep_used_conversions(model: Any) -> None:
    """Drop conversions that matched nothing in the checkpoint.

    `from_pretrained` of Transformers 5.19 does so itself, except under ZeRO-3. Under ZeRO-3 the conversion would otherwise also
    bring back names of checkpoints from before 2020 (`LayerNorm.gamma`). `tests/learners/test_checkpoint_format.py` notices.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]


def _saved_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a checkpoint of the model without adapters holds, each tied tensor once. Buffers are included, because
    routers keep a bias in a buffer."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for full_name, parameter in model.named_parameters():
        name = merged_name(full_name)
        if name is not None and name not in ignored:
            yield name, parameter
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = merged_name(f"{prefix}.{name}" if prefix else name)
            if name not in module._non_persistent_buffers_set and full_name is not None and full_name not in ignored:
                yield full_name, buffer


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in without memory, of the full shape. The parameter's own shape would not do: under ZeRO-3 a parameter is empty."""
    return torch.empty(tuple(getattr(tensor, "ds_shape", tensor.shape)), dtype=tensor.dtype, device="meta")


def layer_groups(names: Any) -> list[list[str]]:
    """Groups names: the names of one decoder layer together, every other name by itself. `layers.0.a`, `layers.0.b`, `norm` make
    two groups."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        key = ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdigit()), -1) + 1]) or name
        groups.setdefault(key, []).append(name)
    return list(groups.values())
