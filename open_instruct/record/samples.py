"""Turns groups into rows of the record's table of samples."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from open_instruct.data_types import GenerationResult, Sample, TrainingSample
from open_instruct.record import schema
from open_instruct.record.schema import SAMPLES
from open_instruct.scored_groups import CONSUMED, Reading, ScoredGroup
from open_instruct.system.secret_masking import without_secrets

LONGEST_TEXT = 10_000
"""Characters of a ground truth or of a verifier's reasoning that the record holds; the tests of a program may be long."""


@dataclass(frozen=True)
class RecordedGroup:
    """A scored group with everything that the record says of it."""

    group: ScoredGroup
    rewards: np.ndarray  # (G,)
    row: str
    """Place of the row in the user's data, such as `train.jsonl line 7`."""
    source: str
    """The file or data set that the row comes from."""
    ground_truth: object
    outcome: str
    attempt: int
    """How often the prompt was issued before: 0 for most."""
    step: int
    """The training step; of an evaluation the version that it measures."""
    arrived: float
    """Unix time at which the group had its scores."""
    set: str | None = None
    """Name of the evaluation set; None in training."""
    oldest_trained_version: int = 0
    """Tokens of older versions are not trained on."""
    first_sample: int = 0
    """Number of its first sample: 0, or more if others of the same group come before."""
    masks_cut_off: bool = False
    """Whether responses that were cut off are not trained on (`--mask_truncated_completions`)."""


@dataclass(frozen=True)
class TrainedTokens:
    """What the learners did with a sample."""

    sample: TrainingSample
    rank: int
    mini_batch: int
    micro_batch: int
    position: int
    """Number of the sample in its micro-batch."""
    logprobs: np.ndarray | None = None  # (trained tokens,) float32
    """The learner's log-probs before the optimizer step. None: not known."""
    correction: np.ndarray | None = None  # (trained tokens,) float32
    """Importance weights. None: the run has no correction."""


Trained = Mapping[int, TrainedTokens]
"""By `id` of the sample's array `response_ids`, for the samples that are trained on."""


def rows_of(groups: Sequence[RecordedGroup], trained: Trained | None = None, *, start: int = 1) -> pa.RecordBatch:
    """The samples of these groups as rows of `SAMPLES`, in order.

    Args:
        trained: what the learners did, once the step is trained. None: it is not known yet.
        start: number of the start of the run that writes, from 1.
    """
    rows = [row for entry in groups for row in _rows_of_group(entry, trained)]
    columns = {
        **_columns_of_group(rows),
        "start": [start] * len(rows),
        **_columns_of_sample(rows),
        **_columns_of_training(rows),
        **_columns_of_tokens(rows),
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field in SAMPLES
        for column in (columns[field.name],)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SAMPLES)


@dataclass(frozen=True, slots=True)
class _Row:
    """One sample of a group."""

    entry: RecordedGroup
    position: int
    sample: Sample
    tokens: TrainedTokens | None
    unused: int
    """What its sampled tokens are used for that are not trained on (`schema.USES`)."""
    verdicts: list[dict[str, Any]]


def _rows_of_group(entry: RecordedGroup, trained: Trained | None) -> list[_Row]:
    group, is_trained_step = entry.group, trained is not None
    tokens = [None if trained is None else trained.get(id(sample.response_ids)) for sample in group.samples]
    stopped = group.stopped if is_trained_step and None in tokens else np.ones(len(tokens), bool)
    verdicts = _verdicts(group)
    return [
        _Row(
            entry,
            position,
            sample,
            own,
            _use_of_sample(entry, sample, own, is_trained_step=is_trained_step, stopped=bool(stopped[position])),
            verdicts[position] if sample.is_judged else [],
        )
        for position, (sample, own) in enumerate(zip(group.samples, tokens, strict=True))
    ]


def _columns_of_group(rows: Sequence[_Row]) -> dict[str, Any]:
    entries = [row.entry for row in rows]
    results = [entry.group.result for entry in entries]
    texts = {id(entry): _as_json(entry.ground_truth) for entry in {id(entry): entry for entry in entries}.values()}
    return {
        "prompt_id": [result.prompt_id for result in results],
        "attempt": [entry.attempt for entry in entries],
        "step": [entry.step for entry in entries],
        "set": [entry.set for entry in entries],
        "row": [entry.row for entry in entries],
        "index": [result.index for result in results],
        "source": [entry.source for entry in entries],
        "dataset": [entry.group.dataset for entry in entries],
        "outcome": [entry.outcome for entry in entries],
        "ground_truth": [texts[id(entry)] for entry in entries],
        "engine": [result.engine_id for result in results],
        "issue_version": [result.issue_version for result in results],
        "began": [result.token_statistics.start_time for result in results],
        "generation_s": [result.token_statistics.generation_time for result in results],
        "tool_s": [result.token_statistics.tool_time for result in results],
        "effects": [None if row.position else _effects(row.entry.group.result) for row in rows],
        "score_s": [entry.group.score_s for entry in entries],
        "arrived": [entry.arrived for entry in entries],
    }


def _effects(result: GenerationResult) -> list[dict[str, Any]]:
    names = ("kind", "name", "began", "seconds")
    return [dict(zip(names, effect, strict=True)) for effect in result.token_statistics.effects]


def _columns_of_sample(rows: Sequence[_Row]) -> dict[str, Any]:
    samples = [row.sample for row in rows]
    return {
        "sample": [row.entry.first_sample + row.position for row in rows],
        "finish_reason": [sample.finish_reason for sample in samples],
        "score": [_or_null(row.entry.group.scores[row.position]) for row in rows],
        "reward": [_or_null(row.entry.rewards[row.position]) for row in rows],
        "environment_reward": [sample.environment_reward for sample in samples],
        "verdicts": [row.verdicts for row in rows],
        "group": [sample.group for sample in samples],
        "kind": [sample.kind for sample in samples],
        "number": [sample.number for sample in samples],
        "weight": [sample.weight for sample in samples],
        "is_judged": [sample.is_judged for sample in samples],
        "goes_on": [sample.goes_on for sample in samples],
        "parent": [sample.parent for sample in samples],
        "answer_start": [sample.answer_start for sample in samples],
        "kv_age": [sample.kv_age for sample in samples],
    }


def _columns_of_training(rows: Sequence[_Row]) -> dict[str, Any]:
    tokens = [row.tokens for row in rows]
    return {
        "advantage": [None if own is None else own.sample.advantage for own in tokens],
        "rank": [None if own is None else own.rank for own in tokens],
        "mini_batch": [None if own is None else own.mini_batch for own in tokens],
        "micro_batch": [None if own is None else own.micro_batch for own in tokens],
        "position": [None if own is None else own.position for own in tokens],
    }


def _columns_of_tokens(rows: Sequence[_Row]) -> dict[str, pa.Array]:
    samples = [row.sample for row in rows]
    return {
        "prompt_ids": _lists([sample.prompt_ids for sample in samples], np.int32),
        "response_ids": _lists([sample.response_ids for sample in samples], np.int32),
        "version": _split(_versions(samples), samples),
        "use": _split(_uses(rows), samples),
        "engine_logprobs": _lists([sample.logprobs for sample in samples], np.float32),
        "learner_logprobs": _lists([_of_learner(row, "logprobs") for row in rows], np.float32),
        "correction": _lists([_of_learner(row, "correction") for row in rows], np.float32),
    }


def _lists(arrays: Sequence[np.ndarray | None], dtype: type) -> pa.Array:
    """One list for each array; null for None."""
    nothing = np.zeros(0, dtype)
    is_null = [array is None for array in arrays]
    present = [nothing if array is None else array for array in arrays]
    values = np.concatenate([nothing, *present]).astype(dtype, copy=False)
    mask = pa.array(is_null) if any(is_null) else None
    return pa.ListArray.from_arrays(pa.array(_offsets(present)), pa.array(values), mask=mask)


def _split(values: np.ndarray, samples: Sequence[Sample]) -> pa.Array:
    """The values of all tokens, end to end, as one list for each sample."""
    return pa.ListArray.from_arrays(pa.array(_offsets([sample.response_ids for sample in samples])), pa.array(values))


def _offsets(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *map(len, arrays)], dtype=np.int32)


def _versions(samples: Sequence[Sample]) -> np.ndarray:
    """(tokens of all samples,) int32: the version that sampled each token."""
    spans = [span for sample in samples for span in sample.version_spans]
    return np.repeat(*np.array(spans or [(0, 0)], dtype=np.int32).T)


def _uses(rows: Sequence[_Row]) -> np.ndarray:
    """(tokens of all samples,) uint8: what each token is used for (`schema.USES`)."""
    uses = np.repeat(np.array([row.unused for row in rows], np.uint8), [len(row.sample.response_ids) for row in rows])
    starts = _offsets([row.sample.response_ids for row in rows])
    for start, end, row in zip(starts[:-1].tolist(), starts[1:].tolist(), rows, strict=True):
        own = uses[start:end]
        if row.tokens is not None:
            own[row.tokens.sample.mask] = schema.TRAINED
        if row.sample.loss_mask is not None:
            own[~row.sample.loss_mask] = schema.GIVEN
        if row.tokens is not None and row.tokens.sample.inserted is not None:
            own[row.tokens.sample.inserted] = schema.TAUGHT
    return uses


def _use_of_sample(
    entry: RecordedGroup, sample: Sample, tokens: TrainedTokens | None, *, is_trained_step: bool, stopped: bool
) -> int:
    """What the sampled tokens are used for that are not trained on."""
    if entry.set is not None:
        return schema.MEASURED
    if entry.outcome != CONSUMED:
        return schema.LEFT_OUT
    if not is_trained_step:
        return schema.OPEN
    if tokens is not None:
        return schema.TOO_OLD
    if sample.weight == 0:
        return schema.NO_WEIGHT
    if entry.masks_cut_off and not stopped:
        return schema.CUT
    is_too_old = all(version < entry.oldest_trained_version for version, _ in sample.version_spans)
    return schema.TOO_OLD if is_too_old else schema.ALIKE


def _of_learner(row: _Row, name: str) -> np.ndarray | None:
    """(R,) float32, NaN where a token is not trained on; None where the learner gave nothing."""
    values = None if row.tokens is None else getattr(row.tokens, name)
    if row.tokens is None or values is None:
        return None
    spread = np.full(len(row.sample.response_ids), np.nan, dtype=np.float32)
    spread[row.tokens.sample.mask] = values
    return spread


def _verdicts(group: ScoredGroup) -> list[list[dict[str, Any]]]:
    """For each sample what each verifier and each reward function gave it."""
    verdicts: list[list[dict[str, Any]]] = [[] for _ in group.samples]
    parts = group.by_verifier
    for part, readings in zip(parts, group.readings or [None] * len(parts), strict=False):
        shared = {"name": part.name, "kind": "verifier", "weight": part.weight, "seconds": None}
        for position, score in enumerate(part.scores.tolist()):
            reading = Reading() if readings is None else readings[position]
            texts = {"score": _or_null(score), "read": reading.answer, "reasoning": _reasoning(reading)}
            verdicts[position].append(shared | texts)
    for function in group.functions:
        shared = {"name": function.name, "kind": "function", "weight": function.weight, "seconds": function.seconds}
        for position, reward in enumerate(function.rewards.tolist()):
            logged = {column: values[position] for column, values in function.extra.items()}
            logged |= {"failure": function.failure} if function.failure else {}
            text = without_secrets(json.dumps(logged, default=str)) if logged else None
            verdicts[position].append(shared | {"score": _or_null(reward), "read": None, "reasoning": text})
    return verdicts


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _as_json(value: object) -> str:
    """A ground truth as JSON. One that is too long becomes a text with its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_TEXT else json.dumps(_shortened(text), ensure_ascii=False)


def _reasoning(reading: Reading) -> str | None:
    """What a verifier says, shortened, without anything that looks like a secret."""
    return None if reading.reasoning is None else without_secrets(_shortened(reading.reasoning))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text):,} characters)"
