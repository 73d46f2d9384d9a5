"""Loads a mixture of experts at ZeRO stage 3 with one copy of its experts in main memory, that of rank 0.

A checkpoint holds each expert by itself; Transformers stacks the experts of a layer in new tensors. Version 5.19 does so on every
rank, although at stage 3 rank 0 alone hands out values, and other ranks need only names and shapes. So on a node with 8 learners
a model of 30 billion weights in 16 bits would take 8 x 58 GB. Other tensors are pages of the file, which all ranks share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def experts_on_rank_0(rank: int) -> Iterator[None]:
    """Inside the block, a model that is loaded at stage 3 holds the values of its experts only on rank 0. For Transformers 5.19;
    `tests/learners/test_stage3_loading.py` notices when a later version loads in another way."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations import deepspeed

    convert, add_tensor = deepspeed._apply_weight_conversions_to_state_dict, WeightConverter.add_tensor
    buffers: set[str] = set()
    """Names of the tensors of which each rank takes its own values."""

    def convert_shapes(model: Any, *args: Any) -> Any:
        buffers.update(name for name, _ in model.named_buffers())
        return convert(model, *args)

    def add_shape(self: Any, target: str, source: str, pattern: str, tensor: torch.Tensor) -> None:
        add_tensor(self, target, source, pattern, tensor if target in buffers else tensor.to("meta"))

    if rank == 0:
        yield
        return
    deepspeed._apply_weight_conversions_to_state_dict, WeightConverter.add_tensor = convert_shapes, add_shape
    try:
        yield
    finally:
        deepspeed._apply_weight_conversions_to_state_dict, WeightConverter.add_tensor = convert, add_tensor
