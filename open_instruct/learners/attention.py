"""Chooses the attention of a learner's model, by the name in `--attn_implementation`."""

import torch

from open_instruct.learners import flash_attention, shared_attention
from open_instruct.learners.flash_attention import Spans
from open_instruct.learners.shared_attention import Parts

FLASH = "flash_attention_2"
"""The name of flash attention in `--attn_implementation`."""


def register(attn_implementation: str) -> str:
    """Register this project's attention for `attn_implementation` with Transformers, and return its name there. If this project
    has none, return `attn_implementation`.

    Our attention is not compiled with the layers around it (`--compile_model`), because it depends on the sequences in the rows.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if attn_implementation == "sdpa":
        AttentionInterface.register(shared_attention.ATTENTION, torch.compiler.disable(shared_attention.attend))
        AttentionMaskInterface.register(shared_attention.ATTENTION, sdpa_mask)
        return shared_attention.ATTENTION
    if attn_implementation == FLASH:
        AttentionInterface.register(flash_attention.ATTENTION, torch.compiler.disable(flash_attention.attend))
        return flash_attention.ATTENTION
    return attn_implementation


def find_parts(
    attention: str,
    position_ids: torch.Tensor,
    segments: torch.Tensor | None,
    branches: torch.Tensor | None,
    *,
    num_columns: int,
) -> Parts | Spans | None:
    """Which tokens attend to which in (B, T) rows that are padded on the right to `num_columns`, in the form that the attention
    registered under the name `attention` takes. None if it is not flash attention and no prompt is shared: Transformers then
    makes a mask from the position ids."""
    if attention == flash_attention.ATTENTION:
        if segments is None or branches is None:
            return flash_attention.find_spans(position_ids, num_columns=num_columns)
        return flash_attention.find_spans_of_shared(segments, branches, num_columns=num_columns)
    if segments is None or branches is None:
        return None
    return shared_attention.find_parts(segments, branches)
