"""Attention of rows in which responses share a prompt (`--share_prompts`). Tokens attend only to tokens that they need.

    row        prompt  response 1  response 2            queries         keys
    parts      ───────                                   the prompt      the prompt
                       ──────────                        response 1      the prompt, response 1
                                   ──────────            response 2      the prompt, response 2

For attention each part is a separate sequence, and the layers in between compute each token once. (With a mask over whole rows
every response would compute scores for all other responses, only to discard them.) A sequence that shares its prompt with no
other sequence is one part. Results are exact except for rounding, and so are gradients: the prompt's keys and values sum up the
gradients from all parts that attended to them.

Shapes: B rows, T tokens of a row, N parts, Q queries and K keys of a part.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F

ATTENTION = "sdpa_of_shared_prompts"
"""Name under which Transformers knows the attention below. For rows that share no prompt it is torch's attention."""
SHORT_QUERIES, SHORT_KEYS = 64, 256
"""Up to this many queries and keys, attention by plain matrix products is the fastest on CPU.

It keeps the softmax of every query and key for the backward pass. Longer parts use torch's fused attention, which keeps none."""


@dataclass(frozen=True)
class Alike:
    """Parts of similar length, whose attention is computed together."""

    num_parts: int  # N
    num_queries: int  # Q
    num_keys: int  # K
    mask: torch.Tensor | None  # (N, 1, Q, K) bool: which query attends to which key; None where keys are queries
    bias: torch.Tensor | None  # (N, 1, Q, K) float32: the mask as 0 and -inf, for short parts on CPU


@dataclass(frozen=True)
class Parts:
    """All parts of some rows, in a form that lets each layer look up all its queries and keys at once."""

    alike: list[Alike]
    queries: torch.Tensor
    """(2, N * Q of all) int64: rows and columns of the parts' own tokens. The last token of a part is repeated up to Q."""
    keys: torch.Tensor
    """(2, N * K of all) int64: rows and columns of the tokens that parts attend to: the prompt's, then those of `queries`."""
    own: torch.Tensor
    """(tokens of all parts,) int64: which of `queries` are real tokens, not repetitions."""


def find_parts(segments: torch.Tensor, branches: torch.Tensor) -> Parts:
    """The parts of (B, T) rows, given `segments` and `branches` of `CollatedBatchData`."""
    by_shape: dict[tuple[bool, int], list[Part]] = defaultdict(list)
    for row, (segments_T, branches_T) in enumerate(zip(segments.tolist(), branches.tolist(), strict=True)):
        for part in parts_of_row(row, segments_T, branches_T):
            by_shape[len(part.prompt) > 0, len(part.own).bit_length()].append(part)
    alike = []
    queries, keys = ([torch.zeros(2, 0, dtype=torch.int64)] for _ in range(2))  # empty where all rows are padding
    is_query = [torch.zeros(0, dtype=torch.bool)]
    for parts in by_shape.values():
        batch, queries_NQ, keys_NK, is_query_NQ = _together(parts, segments.device)
        rows_N1 = torch.tensor([[part.row] for part in parts])
        alike.append(batch)
        queries.append(torch.stack([rows_N1.expand_as(queries_NQ).flatten(), queries_NQ.flatten()]))
        keys.append(torch.stack([rows_N1.expand_as(keys_NK).flatten(), keys_NK.flatten()]))
        is_query.append(is_query_NQ.flatten())
    own = torch.cat(is_query).nonzero().flatten()
    queries_2N, keys_2N, own_N = (
        tensor.to(segments.device) for tensor in (torch.cat(queries, 1), torch.cat(keys, 1), own)
    )
    return Parts(alike, queries_2N, keys_2N, own_N)


@dataclass(frozen=True)
class Part:
    """Neighbouring tokens of a row, all of one sequence, and the tokens of the prompt that they attend to in addition."""

    row: int
    own: range
    prompt: range


def parts_of_row(row: int, segments: Sequence[int], branches: Sequence[int]) -> list[Part]:
    """The parts of a row, in the order of their tokens. Padding is in no part."""
    parts: list[Part] = []
    start = 0
    for segment, tokens in groupby(zip(segments, branches, strict=True), key=lambda kind: kind[0]):
        ends = [start, *(start + length for length in accumulate(len(list(run)) for _, run in groupby(tokens)))]
        start = ends[-1]
        if not segment:  # padding
            continue
        prompt, *responses = (range(*edges) for edges in pairwise(ends))
        if len(responses) <= 1:
            parts.append(Part(row, range(ends[0], ends[-1]), range(0)))
        else:
            parts += [Part(row, prompt, range(0)), *(Part(row, response, prompt) for response in responses)]
    return parts


def _together(parts: Sequence[Part], device: torch.device) -> tuple[Alike, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts as `Alike`; columns of their queries, (N, Q), and keys, (N, K); which queries are not repetitions, (N, Q)."""
    num_queries = max(len(part.own) for part in parts)
    num_prompt = max(len(part.prompt) for part in parts)
    own_lengths = torch.tensor([[len(part.own)] for part in parts])
    prompt_lengths = torch.tensor([[len(part.prompt)] for part in parts])
    ordinals_Q, ordinals_P = torch.arange(num_queries), torch.arange(num_prompt)
    queries = torch.tensor([[part.own.start] for part in parts]) + ordinals_Q.minimum(own_lengths - 1)
    keys, mask = queries, None
    if num_prompt:
        prompt_keys = torch.tensor([[part.prompt.start] for part in parts]) + ordinals_P.minimum(prompt_lengths - 1)
        keys = torch.cat([prompt_keys, queries], dim=1)
        sees_prompt = (ordinals_P < prompt_lengths)[:, None, :].expand(-1, num_queries, -1)
        sees_own = (ordinals_Q[:, None] >= ordinals_Q).expand(len(parts), -1, -1)
        mask = torch.cat([sees_prompt, sees_own], dim=2)[:, None].to(device)
    num_keys = keys.shape[1]
    bias = None
    if mask is not None and device.type == "cpu" and num_queries <= SHORT_QUERIES and num_keys <= SHORT_KEYS:
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return Alike(len(parts), num_queries, num_keys, mask, bias), queries, keys, ordinals_Q < own_lengths


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    parts: Parts | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that Transformers calls for attention.

    Args:
        query, key, value: (B, heads, T, head size), with fewer heads of keys and values where several queries share them.
        attention_mask: the mask of rows without `parts`.
        parts: from `find_parts`. Transformers passes this further argument of the model's `forward` on to this function.

    Returns:
        (B, T, heads, head size), 0 where a token belongs to no part; and None.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if parts is None:
        # The mask of rows with parts has only one entry, so every token may attend to all others.
        if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            raise ValueError(f"{type(module).__name__} does not pass on which tokens are one sequence")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    num_rows, num_heads, num_tokens, _ = query.shape
    groups = num_heads // key.shape[1]
    queries, keys, values = _take(query, parts.queries), _take(key, parts.keys), _take(value, parts.keys)
    nums_queries = [alike.num_parts * alike.num_queries for alike in parts.alike]
    nums_keys = [alike.num_parts * alike.num_keys for alike in parts.alike]
    splits = queries.split(nums_queries), keys.split(nums_keys), values.split(nums_keys)
    outs = [value.new_zeros(0, num_heads, value.shape[3])]
    for alike, *flat in zip(parts.alike, *splits, strict=True):
        query_N, key_N, value_N = (tensor.unflatten(0, (alike.num_parts, -1)).transpose(1, 2) for tensor in flat)
        if alike.bias is not None and query.dtype == torch.float32 and not dropout:
            out = _attend_short(query_N, key_N, value_N, alike.bias, scaling)
        else:
            out = F.scaled_dot_product_attention(
                query_N,
                repeat_kv(key_N, groups),
                repeat_kv(value_N, groups),
                attn_mask=alike.mask,
                dropout_p=dropout,
                scale=scaling,
                is_causal=alike.mask is None,
            )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    rows, columns = parts.queries.index_select(1, parts.own)
    nothing = value.new_zeros(num_rows, num_tokens, num_heads, value.shape[3])
    return nothing.index_put((rows, columns), torch.cat(outs).index_select(0, parts.own)), None


def _take(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, head size): from (B, heads, T, head size), the tokens at these rows and columns, (2, tokens).

    This is a table lookup, because its backward pass always adds up in the same order. The backward pass of indexing adds with
    atomics, in any order, and on two cores takes six times as long.
    """
    rows, columns = tokens
    table = states.transpose(1, 2).flatten(2).flatten(0, 1)
    return F.embedding(rows * states.shape[2] + columns, table).unflatten(1, (states.shape[1], -1))


def _attend_short(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention by plain matrix products, which for short parts take two thirds of the time of torch's fused kernel on CPU.

    Queries that share a head of keys are rows of one product. `bias` is added to the scores of (N, heads, Q, K).
    """
    num_parts, num_heads, num_queries, head_size = query.shape
    batch = num_parts * key.shape[1]
    scaled = query * (head_size**-0.5 if scaling is None else scaling)
    scores = torch.bmm(scaled.reshape(batch, -1, head_size), key.flatten(0, 1).transpose(1, 2))
    weights = (scores.view(num_parts, num_heads, num_queries, -1) + bias).softmax(dim=-1)
    return torch.bmm(weights.view(batch, -1, weights.shape[3]), value.flatten(0, 1)).view(*query.shape[:3], -1)
