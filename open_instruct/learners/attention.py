"""The attention of a learner's model, by what `--attn_implementation` names."""

import torch

from open_instruct.learners import flash_attention, shared_attention
from open_instruct.learners.flash_attention import Spans
from open_instruct.learners.shared_attention import Parts

FLASH = "flash_attention_2"
"""What `--attn_implementation` calls flash attention."""


def register(attn_implementation: str) -> str:
    """The name under which Transformers knows this project's attention of that kind, or the attention itself if there is none.

    It is not compiled with the layers around it (`--compile_model`), because it depends on the sequences in the rows.
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
    """Who looks at whom in (B, T) rows that are padded on the right to `num_columns`, as the attention registered under that name
    takes it. None where it is not flash attention and no prompt is shared: Transformers makes a mask of the position ids then."""
    if attention == flash_attention.ATTENTION:
        if segments is None or branches is None:
            return flash_attention.find_spans(position_ids, num_columns=num_columns)
        return flash_attention.find_spans_of_shared(segments, branches, num_columns=num_columns)
    if segments is None or branches is None:
        return None
    return shared_attention.find_parts(segments, branches)
