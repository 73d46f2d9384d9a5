"""The reference policy may follow the policy (`--ref_policy_update_freq`). Checkpoints contain it once it has moved.

At ZeRO stage 3 each rank holds a part of every weight, and updates, saves and loads only its own part. Policy and reference are
divided alike, because they are the same model on the same ranks. At the other stages each rank holds all weights.

A reference in 16 bits is updated through a float32 copy in main memory. From one update to the next a policy changes so little
that a small share of the change (`--alpha`) would be rounded away. With alpha 0.05 most weights in bfloat16 would never move.
"""

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class MovingReference:
    """Moves this rank's part of `reference` towards `policy`, and saves and loads it with checkpoints.

    Args:
        every: training steps between two updates; None: the reference never changes.
    """

    def __init__(
        self,
        reference: torch.nn.Module,
        policy: torch.nn.Module,
        *,
        every: int | None,
        alpha: float,
        rank: int,
        is_divided: bool,
    ) -> None:
        self._reference, self._policy = reference, policy
        self._every, self._alpha = every, alpha
        self._rank, self._is_divided = rank, is_divided
        self._has_moved = False
        self._exact: list[torch.Tensor] | None = None
        """This rank's part of the reference in float32; made at the first update, and only for references in 16 bits."""

    @torch.no_grad()
    def update(self, version: int) -> None:
        """After every `every`-th training step: `reference = alpha * policy + (1 - alpha) * reference`, weight by weight
        (Polyak averaging)."""
        if self._every is None or version % self._every:
            return
        self._has_moved = True
        tensors = _held(self._reference)
        if self._exact is None and any(own.dtype.itemsize < 4 for own in tensors):
            self._exact = [own.to("cpu", torch.float32, copy=True) for own in tensors]
        for own, exact, new in zip(tensors, self._exact or tensors, _held(self._policy), strict=True):
            exact.lerp_(new.to(exact), self._alpha)
            own.copy_(exact)

    def save(self, directory: Path) -> None:
        """Write this rank's part of the reference, unless it is still the initial model. Without ZeRO stage 3 all ranks hold the
        same weights, and the first rank writes them."""
        if self._has_moved and (self._is_divided or self._rank == 0):
            tensors = self._exact or [tensor.detach().cpu() for tensor in _held(self._reference)]
            torch.save(tensors, self._file(directory))

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Take the weights that `save` wrote, if it wrote any."""
        if not self._file(directory).exists():
            return
        if self._every is None and self._rank == 0:
            logger.warning(
                "the reference policy is that of the checkpoint, and moves no more (no --ref_policy_update_freq)"
            )
        self._has_moved = True
        saved = torch.load(self._file(directory), weights_only=True)
        tensors = _held(self._reference)
        self._exact = (
            saved if any(value.dtype != own.dtype for own, value in zip(tensors, saved, strict=True)) else None
        )
        for own, value in zip(tensors, saved, strict=True):
            own.copy_(value)

    def _file(self, directory: Path) -> Path:
        return directory / f"reference_{self._rank if self._is_divided else 0}.pt"


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    """The memory of each parameter on this rank: at stage 3 the rank's part of it, flat."""
    return [getattr(parameter, "ds_tensor", parameter.data) for parameter in model.parameters()]
