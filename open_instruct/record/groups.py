"""Makes groups again from rows of the record: what was scored, and what was trained on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics, TrainingSample
from open_instruct.record import schema
from open_instruct.scored_groups import CONSUMED, UNSCORED, FunctionRewards, Reading, ScoredGroup, ScorePart

TOKENS = ("prompt_ids", "response_ids", "version", "use", "engine_logprobs")
"""The columns over tokens that groups are made of."""


@dataclass(frozen=True)
class ReadGroup:
    """A group as the record holds it."""

    group: ScoredGroup
    """Its `shaped_rewards` are the recorded rewards."""
    trained: list[TrainingSample] | None
    """The samples that are trained on; None if no step trains on the group."""
    outcome: str
    attempt: int
    row: str
    source: str
    ground_truth: Any
    set: str | None


def groups_of(table: pa.Table) -> Iterator[ReadGroup]:
    """The groups of a table of `schema.SAMPLES`, in its order, without responses that were not scored. Log-probs of teachers and
    costs are not in the record."""

    def identity(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["prompt_id"], row["attempt"], row["set"]

    for _, rows in groupby(_rows(table.filter(pc.field("outcome") != UNSCORED)), key=identity):
        yield _group(list(rows))


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows; columns over tokens as arrays, because lists of numbers take many times as long."""
    rows = table.drop_columns([*TOKENS, "learner_logprobs", "correction"]).to_pylist()
    for name in TOKENS if rows else ():
        column = table[name].combine_chunks()
        values, offsets = column.flatten().to_numpy(), np.cumsum([0, *column.value_lengths().to_pylist()])
        for row, own in zip(rows, np.split(values, offsets[1:-1]), strict=True):
            row[name] = own
    return rows


def _group(rows: list[dict[str, Any]]) -> ReadGroup:
    first = rows[0]
    samples = [_sample(row) for row in rows]
    statistics = TokenStatistics(
        len(first["prompt_ids"]),
        sum(len(row["response_ids"]) for row in rows),
        first["generation_s"],
        first["began"],
        first["tool_s"],
        [tuple(effect.values()) for effect in first["effects"] or ()],
    )
    result = GenerationResult(
        samples, first["index"], first["prompt_id"], first["issue_version"], first["engine"], statistics
    )
    group = ScoredGroup(
        result,
        first["dataset"],
        np.array([row["score"] for row in rows], dtype=np.float32),
        score_s=first["score_s"],
        shaped_rewards=np.array([row["reward"] for row in rows]),
    )
    trained = [
        _training_sample(row, sample) for row, sample in zip(rows, samples, strict=True) if row["rank"] is not None
    ]
    return ReadGroup(
        _with_verdicts(group, rows),
        trained if first["outcome"] == CONSUMED else None,
        first["outcome"],
        first["attempt"],
        first["row"],
        first["source"],
        json.loads(first["ground_truth"]),
        first["set"],
    )


def _sample(row: dict[str, Any]) -> Sample:
    uses = np.array(row["use"], dtype=np.uint8)
    was_sampled = ~np.isin(uses, (schema.GIVEN, schema.TAUGHT))
    versions = np.array(row["version"], dtype=np.int64)
    starts = np.flatnonzero(np.diff(versions, prepend=-1)).tolist()
    lengths = np.diff([*starts, len(versions)]).tolist()
    return Sample(
        prompt_ids=np.array(row["prompt_ids"], dtype=np.int32),
        response_ids=np.array(row["response_ids"], dtype=np.int32),
        logprobs=np.array(row["engine_logprobs"], dtype=np.float32),
        finish_reason=row["finish_reason"],
        version_spans=[(int(versions[start]), length) for start, length in zip(starts, lengths, strict=True)],
        loss_mask=None if was_sampled.all() else was_sampled,
        **{name: row[name] for name in ("group", "kind", "number", "weight", "is_judged", "answer_start", "goes_on")},
        **{name: row[name] for name in ("environment_reward", "kv_age", "parent")},
    )


def _training_sample(row: dict[str, Any], sample: Sample) -> TrainingSample:
    uses = np.array(row["use"], dtype=np.uint8)
    return TrainingSample(
        query=sample.prompt_ids,
        response=sample.response_ids,
        mask=uses == schema.TRAINED,
        logprobs=sample.logprobs,
        advantage=row["advantage"],
        weight=row["weight"],
        inserted=uses == schema.TAUGHT if (uses == schema.TAUGHT).any() else None,
    )


def _with_verdicts(group: ScoredGroup, rows: list[dict[str, Any]]) -> ScoredGroup:
    """The group with what its verifiers and reward functions said. A sample that no verifier saw has no verdicts."""
    shape: list[dict[str, Any]] = max((row["verdicts"] for row in rows), key=len)
    columns = [[row["verdicts"][number] if row["verdicts"] else None for row in rows] for number in range(len(shape))]
    parts, readings, functions = [], [], []
    for about, verdicts in zip(shape, columns, strict=True):
        scores = [np.nan if verdict is None or verdict["score"] is None else verdict["score"] for verdict in verdicts]
        if about["kind"] == "verifier":
            parts.append(ScorePart(about["name"], about["weight"], np.nan_to_num(np.array(scores, dtype=np.float32))))
            readings.append(
                tuple(
                    Reading() if verdict is None else Reading(verdict["read"], verdict["reasoning"])
                    for verdict in verdicts
                )
            )
        else:
            functions.append(
                FunctionRewards(
                    about["name"], about["weight"], np.array(scores), about["seconds"], extra=_extra(verdicts)
                )
            )
    weight = sum(part.weight for part in parts) if parts else 1.0
    group = replace(group, reward_weight=weight, readings=tuple(readings), functions=tuple(functions))
    return replace(group, parts=tuple(parts) if len(parts) > 1 else ())


def _extra(verdicts: list[dict[str, Any] | None]) -> dict[str, list[str]]:
    """What a reward function gave to `log_extra`, by column."""
    logged = [json.loads(verdict["reasoning"]) if verdict and verdict["reasoning"] else {} for verdict in verdicts]
    names = dict.fromkeys(name for values in logged for name in values)
    return {name: [str(values.get(name, "")) for values in logged] for name in names}
