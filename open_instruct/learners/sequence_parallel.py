"""Sequence parallelism: each rank of a group holds one slice of every row (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

    rank 0   tokens 0..3 of each row ─► layer ─┐ attention: all tokens, heads 0..1 ┌─► layer ─► log-probs that tokens 0..3 predict
    rank 1   tokens 4..7 of each row ─► layer ─┘ attention: all tokens, heads 2..3 └─► layer ─► log-probs that tokens 4..7 predict

All ranks of a group get the same rows. Each rank runs the layers and the head on its own slice; before attention the ranks
exchange tokens for heads, and after it heads for tokens. Then the log-probs of all slices are put together, so that losses,
corrections and metrics see whole rows. A token's log-prob is computed on the rank whose slice holds the token before it.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from open_instruct.learners.attention import register

ATTENTION = "ulysses"
"""Name under which Transformers knows the attention that exchanges tokens and heads."""


class SequenceParallel:
    """This rank's place in its group. Make it on every rank at once, before the model is loaded.

    Args:
        size: ranks of a group; neighbours form a group.
        timeout: time after which an exchange fails; None is torch's default for the backend.
        attn_implementation: the attention that computes a rank's heads.
        config: the text model's configuration.
    """

    def __init__(
        self,
        *,
        size: int,
        rank: int,
        world_size: int,
        attn_implementation: str,
        config: Any,
        timeout: timedelta | None = None,
    ) -> None:
        groups = [list(range(first, first + size)) for first in range(0, world_size, size)]
        # torch requires that every rank makes every group.
        process_groups = [torch.distributed.new_group(ranks, timeout=timeout) for ranks in groups]
        self._group: Any = process_groups[rank // size]
        self._size, self._rank = size, rank % size
        self._config = config
        self._exchanges: dict[tuple[int, ...], Any] = {}
        """Modules that exchange tokens and heads, by number of rows, heads, heads of keys and values, and size of a head."""
        self.attention = register(attn_implementation)
        """The name under which Transformers knows the attention of whole rows."""
        _register(self)

    def num_columns(self, num_tokens: int) -> int:
        """Number of columns of a row with `num_tokens` tokens, after padding so that the group can divide the row."""
        return num_tokens + -num_tokens % self._size

    def slice_inputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, range]:
        """This rank's slice of (B, T) rows for its layers, and the columns of the slice.

        Rows are padded on the right to a length T' that the group can divide. A given mask is returned unchanged. Otherwise the
        mask is that of whole rows, (B, 1, T', T'), if attention needs a mask.
        """
        num_tokens = input_ids.shape[1]
        padding = self.num_columns(num_tokens) - num_tokens
        needs_mask = attention_mask is None and bool((position_ids[:, 1:] == 0).any())
        if padding:
            input_ids = F.pad(input_ids, (0, padding))
            further = torch.arange(1, padding + 1, device=position_ids.device)
            position_ids = torch.cat([position_ids, position_ids[:, -1:] + further], dim=1)
        if needs_mask:
            attention_mask = _mask_of(position_ids)
        length = (num_tokens + padding) // self._size
        own = range(self._rank * length, (self._rank + 1) * length)
        columns = slice(own.start, own.stop)
        # Contiguous, because the ranks exchange the positions. NCCL refuses tensors with gaps; gloo copies them silently.
        return input_ids[:, columns].contiguous(), position_ids[:, columns].contiguous(), attention_mask, own

    def put_together(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all ranks together; each rank has 0 where another rank has the value. The gradient is that of whole rows,
        which is the same on every rank."""
        return _PutTogether.apply(values, self._group)

    def attend(self, module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The function that Transformers calls for attention; `query` is (B, heads, T / size, head size)."""
        num_rows, num_heads, _, head_size = query.shape
        shape = num_rows, num_heads, args[0].shape[1], head_size
        if shape not in self._exchanges:
            self._exchanges[shape] = self._exchange(*shape)
        return self._exchanges[shape](module, query, *args, **kwargs)

    def _exchange(self, num_rows: int, num_heads: int, num_key_value_heads: int, head_size: int) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return UlyssesSPAttentionHF(
            attn=ALL_ATTENTION_FUNCTIONS[self.attention],
            batch_size=num_rows,
            attn_head_count=num_heads,
            attn_head_size=head_size,
            kv_head_count=num_key_value_heads,
            num_hidden_layers=self._config.num_hidden_layers,
            process_group=self._group,
            seq_length_is_variable=True,
        )


def _register(sequence_parallel: SequenceParallel) -> None:
    from transformers import AttentionInterface

    # Transformers makes no mask for an attention that it does not know, and passes on the mask that it is given.
    AttentionInterface.register(ATTENTION, sequence_parallel.attend)


def _mask_of(position_ids: torch.Tensor) -> torch.Tensor:
    """(B, 1, T, T) bool: a token sees itself and earlier tokens of its sequence; a sequence begins at position 0."""
    sequences = (position_ids == 0).cumsum(dim=1)
    num_tokens = position_ids.shape[1]
    is_earlier = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=position_ids.device).tril()
    return (is_earlier & (sequences[:, :, None] == sequences[:, None, :]))[:, None]


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        whole = values.detach().clone(memory_format=torch.contiguous_format)  # NCCL refuses tensors with gaps
        torch.distributed.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore[bad-override]
        return grad_outputs[0], None
