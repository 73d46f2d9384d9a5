"""Threads of a learner on CPU that shares its cores with engines (`system/shared_cores.py`).

A micro-batch can take a second and an engine step 10 ms, so a learner takes its share of the cores anew before each linear layer.
"""

from typing import Any

import torch

from open_instruct.system.shared_cores import SharedCores


def take_share_in_layers(model: torch.nn.Module, cores: SharedCores) -> None:
    """Call `cores.compute` before each linear layer of `model`, in the forward and in the backward pass."""

    def forward(*_: Any) -> None:
        cores.compute()

    def backward(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: cores.compute())

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(forward)
            module.register_forward_hook(backward)
