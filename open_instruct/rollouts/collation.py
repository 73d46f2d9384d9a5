"""Turns samples into the arrays of one micro-batch: padded rows, or one packed row. NumPy only.

Both layouts are filled from the same flat arrays, which hold the rows end to end. Shapes: B rows, T tokens, N tokens of all rows.
"""

from collections.abc import Callable, Sequence

import numpy as np

from open_instruct.data_types import CollatedBatchData, TrainingSample
from open_instruct.rollouts.shared_prompts import Shared

Flat = dict[str, tuple[np.ndarray, float]]
"""For each field of `CollatedBatchData`: the values of all tokens, (N, …), and the value of padding."""


def reset_position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """Position of each token within its own sequence.

    Args:
        attention_mask: (B, T) integers; 1..k number the sequences that share a row, 0 is padding.

    Returns:
        (B, T) int32, from 0 in each sequence; 0 on padding.
    """
    columns = np.arange(attention_mask.shape[1])
    starts = np.diff(attention_mask, axis=1, prepend=-1) != 0
    start_columns = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
    return np.where(attention_mask == 0, 0, columns - start_columns).astype(np.int32)


def collate_padded(samples: Sequence[TrainingSample], pad_token_id: int) -> CollatedBatchData:
    """One sample per row, padded on the right to the longest sample."""
    return pad_rows([Shared([sample]) for sample in samples], pad_token_id)


def collate_packed(samples: Sequence[TrainingSample], pad_token_id: int) -> CollatedBatchData:
    """All samples end to end in a single row (B = 1), without padding. `position_ids` start at 0 in each sample."""
    return pack_rows([Shared([sample]) for sample in samples], pad_token_id)


def pad_rows(rows: Sequence[Shared], pad_token_id: int) -> CollatedBatchData:
    """Each of `rows` becomes one row, padded on the right to the longest."""
    lengths_B = np.array([len(row) for row in rows])
    columns_T = np.arange(lengths_B.max(), dtype=np.int32)
    is_token_BT = columns_T < lengths_B[:, None]

    def fill(values: np.ndarray, padding: float) -> np.ndarray:
        padded_BT = np.full((*is_token_BT.shape, *values.shape[1:]), padding, dtype=values.dtype)
        padded_BT[is_token_BT] = values  # row by row, which is the order of `values`
        return padded_BT

    flat = _flat_fields(rows, pad_token_id)
    arrays = {name: fill(*field) for name, field in flat.items()}
    if "branches" not in flat:
        # Counting on through the padding keeps each row one sequence, for which attention has its fast causal path.
        arrays["position_ids"] = np.tile(columns_T, (len(rows), 1))
    return CollatedBatchData(**arrays)


def pack_rows(rows: Sequence[Shared], pad_token_id: int) -> CollatedBatchData:
    """All of `rows` end to end in a single row (B = 1), without padding."""
    flat = _flat_fields(rows, pad_token_id)
    if "predictors" in flat:  # count from the beginning of the packed row
        starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
        predictors = flat["predictors"][0] + np.repeat(starts, [len(row) for row in rows])
        flat["predictors"] = predictors.astype(np.int32), 0
    return CollatedBatchData(**{name: values[None] for name, (values, _) in flat.items()})


def _flat_fields(rows: Sequence[Shared], pad_token_id: int) -> Flat:
    # A first token has no log-prob: it has no predecessor, or in a packed row its predecessor belongs to another sample.
    assert all(len(row.query) > 0 for row in rows), "a sample needs at least one query token"
    tokens = [part for row in rows for part in (row.query, *(sample.response for sample in row.samples))]
    is_trained_N = _spread(rows, lambda sample: sample.mask)

    def where_trained(values_N: np.ndarray) -> np.ndarray:
        return np.where(is_trained_N, values_N, 0).astype(np.float32)

    fields: Flat = {
        "query_responses": (np.concatenate(tokens).astype(np.int32), pad_token_id),
        "position_ids": (np.concatenate([row.positions() for row in rows]), 0),
        "response_masks": (is_trained_N, 0),
        "advantages": (where_trained(_spread(rows, lambda sample: _constant(sample, sample.advantage))), 0),
        "vllm_logprobs": (where_trained(_spread(rows, lambda sample: sample.logprobs)), 0),
    }
    samples = [sample for row in rows for sample in row.samples]
    if any(sample.weight != 1.0 for sample in samples):
        fields["loss_weights"] = _spread(rows, lambda sample: _constant(sample, sample.weight).astype(np.float32)), 0
    if any(sample.conversation_tokens is not None for sample in samples):
        fields["conversation_tokens"] = _spread(rows, _conversation_tokens), 0
    if any(sample.inserted is not None for sample in samples):
        fields["ce_masks"] = _spread(rows, _inserted), 0
    if any(sample.teacher is not None for sample in samples):
        fields |= _of_teacher(rows, samples)
    if any(len(row.samples) > 1 for row in rows):
        numbers = np.repeat(np.arange(1, len(rows) + 1), [len(row) for row in rows])
        fields |= {
            "segments": (numbers.astype(np.int32), 0),
            "branches": (np.concatenate([row.branches() for row in rows]), 0),
            "predictors": (np.concatenate([row.predictors() for row in rows]), 0),
        }
    return fields


def _spread(
    rows: Sequence[Shared], getter: Callable[[TrainingSample], np.ndarray], on_prompts: float = 0
) -> np.ndarray:
    """(N, …): the values of each response's tokens, and `on_prompts` at the tokens of prompts."""
    parts = []
    for row in rows:
        values = [getter(sample) for sample in row.samples]
        parts += [np.full((len(row.query), *values[0].shape[1:]), on_prompts, dtype=values[0].dtype), *values]
    return np.concatenate(parts)


def _constant(sample: TrainingSample, value: float) -> np.ndarray:
    """(R,) float64: the value at every token of the response."""
    return np.full(len(sample.response), value)


def _conversation_tokens(sample: TrainingSample) -> np.ndarray:
    """(R,) float32: the trained tokens of the response's conversation."""
    num_tokens = sample.conversation_tokens
    return np.full(len(sample.response), sample.num_trained if num_tokens is None else num_tokens, dtype=np.float32)


def _inserted(sample: TrainingSample) -> np.ndarray:
    return np.zeros(len(sample.response), dtype=bool) if sample.inserted is None else sample.inserted


def _of_teacher(rows: Sequence[Shared], samples: Sequence[TrainingSample]) -> Flat:
    logprobs = {id(sample): sample.teacher for sample in samples if sample.teacher is not None}
    assert len(logprobs) == len(samples), "the teacher was asked about some of the samples only"
    return {
        "teacher_top_ids": (_spread(rows, lambda sample: logprobs[id(sample)].top_ids), 0),
        "teacher_top_logprobs": (_spread(rows, lambda sample: logprobs[id(sample)].top_logprobs, -np.inf), -np.inf),
        "teacher_logprobs": (_spread(rows, lambda sample: logprobs[id(sample)].logprobs), 0),
    }
