"""The rollout side's state on disk: where the dataset stands, the prompts without a fate, and the groups that are finished.

One file, whole or not at all: a JSON header (plain values, and of every finished group all but its arrays) and the arrays of
all groups end to end, in NumPy's `.npz`. No pickle: reading it runs no code.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, TokenStatistics
from open_instruct.rc_types import ReachedState, Turn

FORMAT_VERSION = 1
FILE = "rollout_state.npz"


@dataclass(frozen=True)
class FinishedGroup:
    """A group that the engines have finished and no training step has used up."""

    result: GenerationResult
    scores: np.ndarray | None = None  # (G,) float32
    """None: its verification was under way."""
    num_failures: int = 0
    """Responses whose verifier failed."""


def write_state(path: Path, state: dict[str, Any], finished: Sequence[FinishedGroup]) -> None:
    """Write beside `path`, then rename. `state` holds JSON values."""
    header = {"format_version": FORMAT_VERSION, "state": state, "groups": [_header(group) for group in finished]}
    responses = [response for group in finished for response in group.result.responses]
    logprobs = [one for group in finished for one in group.result.logprobs]
    scores = [group.scores for group in finished if group.scores is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        np.savez(
            file,
            header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            tokens=_joined(responses, np.int32),
            logprobs=_joined(logprobs, np.float32),
            scores=_joined(scores, np.float32),
        )
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_state(path: Path) -> tuple[dict[str, Any], list[FinishedGroup]]:
    """What `write_state` wrote.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is of another format.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            tokens, logprobs, scores = arrays["tokens"], arrays["logprobs"], arrays["scores"]
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such rollout state. Load one that was saved.") from error
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no rollout state: {error}. Load an older one.") from error
    if header["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format {header['format_version']}, this program reads {FORMAT_VERSION}.")
    return header["state"], list(_groups(header["groups"], tokens, logprobs, scores))


def _header(group: FinishedGroup) -> dict[str, Any]:
    result = group.result
    return {
        "lengths": [len(response) for response in result.responses],
        "is_scored": group.scores is not None,
        "num_failures": group.num_failures,
        "finish_reasons": result.finish_reasons,
        "version_spans": result.version_spans,
        "index": result.index,
        "prompt_id": result.prompt_id,
        "training_step": result.training_step,
        "engine_id": result.engine_id,
        "token_statistics": asdict(result.token_statistics),
        "turns": [vars(turn) | {"query": turn.query.tolist()} for turn in result.turns],
        "states": [asdict(state) for state in result.states],
    }


def _groups(
    headers: Sequence[dict[str, Any]], tokens: np.ndarray, logprobs: np.ndarray, scores: np.ndarray
) -> Iterator[FinishedGroup]:
    at = at_score = 0
    for header in headers:
        lengths = header["lengths"]
        ends = at + np.cumsum(lengths, dtype=int)
        responses, chosen = (np.split(flat[at : at + sum(lengths)], ends[:-1] - at) for flat in (tokens, logprobs))
        at += sum(lengths)
        own_scores = scores[at_score : at_score + len(lengths)] if header["is_scored"] else None
        at_score += len(lengths) if header["is_scored"] else 0
        result = GenerationResult(
            responses=responses,
            logprobs=chosen,
            finish_reasons=header["finish_reasons"],
            version_spans=[[(version, n) for version, n in spans] for spans in header["version_spans"]],
            index=header["index"],
            prompt_id=header["prompt_id"],
            training_step=header["training_step"],
            engine_id=header["engine_id"],
            token_statistics=TokenStatistics(**header["token_statistics"]),
            turns=tuple(
                Turn(**turn | {"query": np.asarray(turn["query"], np.int32)}) for turn in header.get("turns", ())
            ),
            states=tuple(ReachedState(**state) for state in header.get("states", ())),
        )
        yield FinishedGroup(result, own_scores, header["num_failures"])


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
