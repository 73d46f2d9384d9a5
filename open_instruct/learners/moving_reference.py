"""A reference policy that follows the policy (`--ref_policy_update_freq`).

At ZeRO stage 3 each rank holds a part of every weight, and updates, saves and loads its own part alone. Policy and reference are
divided alike, because they are the same model on the same ranks.
"""

from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def move_reference(reference: torch.nn.Module, policy: torch.nn.Module, alpha: float) -> None:
    """`reference = alpha * policy + (1 - alpha) * reference`, weight by weight (Polyak averaging)."""
    for own, new in zip(_held(reference), _held(policy), strict=True):
        own.lerp_(new.to(own.dtype), alpha)


def reference_state(reference: Any) -> list[torch.Tensor]:
    """The weights that this rank holds, on the CPU."""
    return [tensor.detach().cpu() for tensor in _held(reference)]


@torch.no_grad()
def load_reference(reference: Any, file: Path) -> None:
    """Take the weights that `reference_state` gave."""
    for own, saved in zip(_held(reference), torch.load(file, weights_only=True), strict=True):
        own.copy_(saved)


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    """The memory of each parameter on this rank: at stage 3 the rank's part of it, flat."""
    return [getattr(parameter, "ds_tensor", parameter.data) for parameter in model.parameters()]
