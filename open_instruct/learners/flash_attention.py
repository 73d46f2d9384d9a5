"""Attention on a GPU with torch's FlashAttention kernels: no sequence of a row attends to another.

    row        sequence 1  sequence 2  prompt  response 1  response 2      queries       keys
    parts      ──────────                                                  sequence 1    sequence 1
                           ──────────                                      sequence 2    sequence 2
                                       ──────                              the prompt    the prompt
                                               ──────────                  response 1    the prompt, response 1
                                                           ──────────      response 2    the prompt, response 2

The kernels take all parts one after another, separated by the positions where they end, so there is neither padding nor a mask.
The parts follow each other in the row, so its queries are used as they are. Keys are copied only where responses share a prompt.

Shapes: B rows, T tokens of a row, N parts, Q = B * T queries, K keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from open_instruct.learners.shared_attention import Part, parts_of_row

ATTENTION = "varlen_of_parts"
"""Name under which Transformers knows the attention below. With "flash" in the name, Transformers would look for packages."""
DTYPES = torch.bfloat16, torch.float16
"""The dtypes that the kernels compute in; inputs of other dtypes are rounded to bfloat16."""


@dataclass(frozen=True)
class Spans:
    """The positions of the parts of some rows, one after another."""

    ends_of_queries: torch.Tensor
    """(N + 1,) int32: 0, then the end of each part's queries among the Q queries."""
    ends_of_keys: torch.Tensor
    """(N + 1,) int32: the same for the K keys."""
    most_queries: int
    """The largest number of queries in one part."""
    most_keys: int
    keys: torch.Tensor | None = None
    """(K,) int64: the index of each key among the Q tokens; None if keys and queries are the same tokens."""


def find_spans(position_ids: torch.Tensor, *, num_columns: int) -> Spans:
    """The spans of (B, T) rows, padded on the right to `num_columns`, in which each sequence begins at position 0."""
    begins = F.pad(position_ids == 0, (0, num_columns - position_ids.shape[1]))
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    ends = F.pad(starts, (0, 1), value=begins.numel()).int()
    most = int(ends.diff().max())
    return Spans(ends, ends, most, most)


def find_spans_of_shared(segments: torch.Tensor, branches: torch.Tensor, *, num_columns: int) -> Spans:
    """The spans of (B, T) rows with `segments` and `branches` as in `CollatedBatchData`, padded on the right to `num_columns`."""
    rows = zip(segments.tolist(), branches.tolist(), strict=True)
    parts = [
        part for row, kinds in enumerate(rows) for part in _with_padding(parts_of_row(row, *kinds), row, num_columns)
    ]
    nums_queries = [len(part.own) for part in parts]
    nums_keys = [len(part.prompt) + len(part.own) for part in parts]
    columns = [column for part in parts for column in (*part.prompt, *part.own)]
    rows_K = torch.tensor([part.row for part in parts]).repeat_interleave(torch.tensor(nums_keys))
    keys = torch.tensor(columns) + rows_K * num_columns
    return Spans(
        _ends(nums_queries).to(segments.device),
        _ends(nums_keys).to(segments.device),
        max(nums_queries),
        max(nums_keys),
        keys.to(segments.device),
    )


def _ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _with_padding(parts: list[Part], row: int, num_columns: int) -> Iterator[Part]:
    """The parts of a row, then its padding as one more part, which no other part attends to."""
    yield from parts
    end = parts[-1].own.stop if parts else 0
    if end < num_columns:
        yield Part(row, range(end, num_columns), range(0))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    parts: Spans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Transformers calls for attention.

    Args:
        query, key, value: (B, heads, T, head size), with fewer heads of keys and values where several queries share them.
        attention_mask: ignored.
        parts: the spans of all rows. Transformers passes this further argument of the model's `forward` on to this function.
        sliding_window: the most tokens that a token attends to, itself included; None: it attends to all earlier tokens.

    Returns:
        (B, T, heads, head size), and None.
    """
    if parts is None:
        raise ValueError(f"{type(module).__name__} does not pass on which tokens are one sequence")
    num_rows, num_heads, num_tokens, head_size = query.shape
    dtype = query.dtype if query.dtype in DTYPES else DTYPES[0]
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    if parts.keys is not None:
        keys, values = _take(keys, parts.keys), _take(values, parts.keys)
    num_values = values.shape[2]  # latent attention: smaller than the head size, which the kernels need
    out: Any = varlen_attn(
        queries,
        keys,
        F.pad(values, (0, head_size - num_values)),
        parts.ends_of_queries,
        parts.ends_of_keys,
        parts.most_queries,
        parts.most_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=keys.shape[1] != num_heads,
    )
    return out[..., :num_values].unflatten(0, (num_rows, num_tokens)).to(query.dtype), None


def _take(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of (Q, heads, head size). This is a table lookup, because its backward pass adds up in float32."""
    return F.embedding(tokens, states.flatten(1)).unflatten(1, states.shape[1:])
