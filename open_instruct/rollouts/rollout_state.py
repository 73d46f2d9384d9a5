"""The rollout side's state on disk: the dataset position, the prompts without a fate, and the groups that are finished.

The state is one NumPy `.npz` file, written whole or not at all. It holds a JSON header (plain values, and every finished group
without its arrays) and the arrays of all groups end to end. There is no pickle, so reading the file runs no code. A teacher's
log-probs are left out, because the teacher is asked again, and so are tokens that a step has forgotten (`without_tokens`).
"""

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics
from open_instruct.scored_groups import FunctionRewards, Misses, ScorePart

FORMAT_VERSION = 2
FILE = "rollout_state.npz"
TOKEN_ARRAYS = {"prompts": np.int32, "tokens": np.int32, "logprobs": np.float32, "masks": np.bool_}
ARRAYS = *TOKEN_ARRAYS, "scores"
PART_SCORES = "part_scores"
"""States of earlier versions lack this array, and their groups lack `score_s`, `cost`, `parts`, `misses`,
`functions` and `left_out_as`."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group that the engines have finished and that no step has trained on. Its fields are fields of `ScoredGroup`."""

    result: GenerationResult
    scores: np.ndarray | None = None  # (G,) float32
    """None if the group was still being verified."""
    num_failures: int = 0
    num_not_scored: int = 0
    score_s: float = 0.0
    cost: float = 0.0
    parts: tuple[ScorePart, ...] = ()
    misses: tuple[Misses, ...] = ()
    functions: tuple[FunctionRewards, ...] = ()
    left_out_as: str = ""
    well_formed: np.ndarray | None = None  # (G,) bool
    """Only of a group whose tokens are forgotten; of other groups it is computed from the tokens."""


def write_state(path: Path, state: dict[str, Any], finished: Sequence[FinishedGroup]) -> None:
    """Write to a temporary file next to `path`, then rename it. `state` holds JSON values."""
    header = {"format_version": FORMAT_VERSION, "state": state, "groups": [_header(group) for group in finished]}
    samples = [sample for group in finished if not group.left_out_as for sample in group.result.samples]
    prompts = [prompt for group in finished if not group.left_out_as for prompt in _prompts(group.result)]
    masks = [sample.loss_mask for sample in samples if sample.loss_mask is not None]
    scores = [group.scores for group in finished if group.scores is not None]
    part_scores = [part.scores for group in finished for part in group.parts]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        np.savez(
            file,
            header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            prompts=_joined(prompts, np.int32),
            tokens=_joined([sample.response_ids for sample in samples], np.int32),
            logprobs=_joined([sample.logprobs for sample in samples], np.float32),
            masks=_joined(masks, np.bool_),
            scores=_joined(scores, np.float32),
            part_scores=_joined(part_scores, np.float32),
        )
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_state(path: Path) -> tuple[dict[str, Any], list[FinishedGroup]]:
    """Read what `write_state` wrote.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is of another format.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            version = header["format_version"]
            names = (*ARRAYS, *({PART_SCORES} & set(arrays)))
            flat = {} if version != FORMAT_VERSION else {name: arrays[name] for name in names}
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such rollout state. Load a state that was saved.") from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no rollout state: {error}. Load an older state.") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version}, this program reads {FORMAT_VERSION}.")
    readers = {name: _Reader(array) for name, array in flat.items()}
    return header["state"], [_group(group, readers) for group in header["groups"]]


def _prompts(result: GenerationResult) -> list[np.ndarray]:
    """The different prompts of a group's samples, each once."""
    return list({sample.prompt_ids.tobytes(): sample.prompt_ids for sample in result.samples}.values())


def _header(group: FinishedGroup) -> dict[str, Any]:
    """The fields of a group except its arrays."""
    result = group.result
    prompts = {prompt.tobytes(): number for number, prompt in enumerate(_prompts(result))}
    names = {field.name for field in fields(Sample)} - {
        "prompt_ids",
        "response_ids",
        "logprobs",
        "loss_mask",
        "teacher",
    }
    return {
        "prompt_lengths": [len(prompt) for prompt in _prompts(result)],
        "samples": [
            {name: getattr(sample, name) for name in names}
            | {
                "prompt": prompts[sample.prompt_ids.tobytes()],
                "length": len(sample.response_ids),
                "has_mask": sample.loss_mask is not None,
            }
            for sample in result.samples
        ],
        "is_scored": group.scores is not None,
        "num_failures": group.num_failures,
        "num_not_scored": group.num_not_scored,
        "score_s": group.score_s,
        "cost": group.cost,
        "parts": [{"name": part.name, "weight": part.weight} for part in group.parts],
        "misses": [asdict(misses) for misses in group.misses],
        "functions": [_function_header(function) for function in group.functions],
        "left_out_as": group.left_out_as,
        "well_formed": group.well_formed.tolist() if group.left_out_as and group.well_formed is not None else None,
        "index": result.index,
        "prompt_id": result.prompt_id,
        "issue_version": result.issue_version,
        "engine_id": result.engine_id,
        "token_statistics": asdict(result.token_statistics),
        "notes": result.notes,
    }


def _function_header(function: FunctionRewards) -> dict[str, Any]:
    """The rewards of a function as JSON values, null where it scored nothing. What it gave to `log_extra` is not kept."""
    rewards = [None if np.isnan(reward) else reward for reward in function.rewards.tolist()]
    return {**asdict(function), "rewards": rewards, "extra": {}}


def _numbers(rewards: Sequence[float | None]) -> np.ndarray:
    """(G,) float64, NaN for None."""
    return np.array(rewards, dtype=np.float64)


class _Reader:
    """Gives the next entries of a flat array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._at = 0

    def take(self, number: int) -> np.ndarray:
        self._at += number
        return self._array[self._at - number : self._at]


class _NothingKept(_Reader):
    """Stands for the tokens of a group whose tokens are forgotten: zeros."""

    def take(self, number: int) -> np.ndarray:
        return np.broadcast_to(self._array, number)


def _group(header: dict[str, Any], readers: Mapping[str, _Reader]) -> FinishedGroup:
    left_out_as, well_formed = header.get("left_out_as", ""), header.get("well_formed")
    arrays = readers
    if left_out_as:
        blank = {name: _NothingKept(np.zeros((), dtype)) for name, dtype in TOKEN_ARRAYS.items()}
        arrays = {**readers, **blank}
    prompts = [arrays["prompts"].take(length) for length in header["prompt_lengths"]]
    result = GenerationResult(
        samples=[_sample(sample, prompts, arrays) for sample in header["samples"]],
        index=header["index"],
        prompt_id=header["prompt_id"],
        issue_version=header["issue_version"],
        engine_id=header["engine_id"],
        token_statistics=_token_statistics(header["token_statistics"]),
        notes=header["notes"],
    )
    num_samples = len(result.samples)
    return FinishedGroup(
        result,
        arrays["scores"].take(num_samples) if header["is_scored"] else None,
        header["num_failures"],
        header["num_not_scored"],
        header.get("score_s", 0.0),
        header.get("cost", 0.0),
        tuple(ScorePart(**part, scores=arrays[PART_SCORES].take(num_samples)) for part in header.get("parts", ())),
        tuple(Misses(**misses) for misses in header.get("misses", ())),
        tuple(
            FunctionRewards(**function | {"rewards": _numbers(function["rewards"])})
            for function in header.get("functions", ())
        ),
        left_out_as,
        None if well_formed is None else np.array(well_formed, dtype=bool),
    )


def _token_statistics(values: dict[str, Any]) -> TokenStatistics:
    """JSON has made lists of tuples."""
    return TokenStatistics(**values | {"effects": tuple(map(tuple, values.get("effects", ())))})


def _sample(header: dict[str, Any], prompts: Sequence[np.ndarray], arrays: Mapping[str, _Reader]) -> Sample:
    values = {name: value for name, value in header.items() if name not in ("prompt", "length", "has_mask")}
    length = header["length"]
    return Sample(
        prompt_ids=prompts[header["prompt"]],
        response_ids=arrays["tokens"].take(length),
        logprobs=arrays["logprobs"].take(length),
        loss_mask=arrays["masks"].take(length) if header["has_mask"] else None,
        **values | {"version_spans": [(version, num) for version, num in header["version_spans"]]},
    )


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
