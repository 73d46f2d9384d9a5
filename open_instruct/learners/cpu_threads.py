"""Threads of a learner on CPU that shares its cores with engines (`system/shared_cores.py`).

A micro-batch can take a second and an engine step 10 ms, so a learner takes its share of the cores again before each layer.
"""

from typing import Any

import torch

from open_instruct.cluster.ray_utils import file_of_job
from open_instruct.device import Device
from open_instruct.system.shared_cores import FILE_NAME, CorePlace, SharedCores


def share_cores(device: Device, model: torch.nn.Module, *, rank: int) -> SharedCores:
    """This rank's share of the cores of its machine. `model` updates the share while it computes."""
    if not device.shares_cores:
        return SharedCores()
    cores = SharedCores(file_of_job(FILE_NAME), CorePlace(rank))
    take_share_in_layers(model, cores)
    return cores


def take_share_in_layers(model: torch.nn.Module, cores: SharedCores) -> None:
    """Call `cores.compute` before each layer of `model` that has weights, in the forward and in the backward pass."""

    def forward(*_: Any) -> None:
        cores.compute()

    def backward(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: cores.compute())

    for module in model.modules():
        if module._parameters:  # the module itself has weights
            module.register_forward_pre_hook(forward)
            module.register_forward_hook(backward)
