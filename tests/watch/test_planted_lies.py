"""The record holds what engines and learners held; ten lies that are planted in it are each found.

`differences` compares the record of the made run, value by value, with the groups and batches that it was made from.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_records import MadeRecord, copy_of, plans, shared_record

from open_instruct.record.samples import RecordedGroup
from open_instruct.watch.runs import Runs
from open_instruct.watch.views import answer

STEP = 7
"""The step that is looked at: it has tokens of every use but those of open steps and evaluations."""
Row = dict[str, Any]


def differences(made: MadeRecord, directory: Path) -> Iterator[str]:
    """What the views of a step say that is not what engines and learners held: `train-30 0: version`."""
    runs = Runs([directory])
    for plan, entry in zip(plans(STEP), made.groups[STEP], strict=True):
        own = {"step": str(STEP), "prompt_id": f"train-{plan.number}"}
        group = answer(runs, "group", own)
        for name in ("outcome", "row", "ground_truth"):
            if group[name] != getattr(entry, name):
                yield f"train-{plan.number}: {name}"
        for position in range(len(entry.group.samples)):
            sample = answer(runs, "sample", {**own, "sample": str(position)})
            yield from (f"train-{plan.number} {position}: {name}" for name in _wrong(entry, position, sample))


def _wrong(entry: RecordedGroup, position: int, sample: Row) -> Iterator[str]:
    """The values of a sample that are not those of the engine and of scoring, nor, for trained tokens, of the learner."""
    response, tokens = entry.group.samples[position], sample["tokens"]
    mask = np.ones(len(tokens), bool) if response.loss_mask is None else response.loss_mask
    versions = np.repeat(*np.array(response.version_spans).T)
    is_trained = mask & (STEP - 1 - versions < 2) & (entry.outcome == "consumed") & (sample["finish_reason"] == "stop")
    pairs: dict[str, tuple[object, object]] = {
        "id": ([token["id"] for token in tokens], response.response_ids.tolist()),
        "reward": (sample["reward"], entry.rewards[position]),
        "score": (sample["score"], entry.group.scores[position]),
        "finish_reason": (sample["finish_reason"], response.finish_reason),
        "engine": (sample["engine"], entry.group.result.engine_id),
        "version": (
            [token["version"] for token in tokens],
            [int(v) if own else None for v, own in zip(versions, mask, strict=True)],
        ),
        "engine_logprob": (
            [token["engine_logprob"] for token in tokens],
            [float(value) if own else None for value, own in zip(response.logprobs, mask, strict=True)],
        ),
        "use": ([token["use"] == 0 for token in tokens], is_trained.tolist()),
        "read": (sample["verdicts"][0]["read"], entry.group.readings[0][position].answer),
    }
    yield from (name for name, (told, held) in pairs.items() if told != held)
    if is_trained.any():
        learner = [token["learner_logprob"] for token in tokens if token["learner_logprob"] is not None]
        if len(learner) != is_trained.sum() or not _is_in(learner, _of_learners()):
            yield "learner_logprob"
        if sample["advantage"] != pytest.approx(_advantage(entry, position), abs=1e-5):
            yield "advantage"


def _advantage(entry: RecordedGroup, position: int) -> float:
    """Reward minus the mean of the conversations; a part of a conversation has the advantage of its end."""
    samples = entry.group.samples
    ends = [at for at, sample in enumerate(samples) if not sample.goes_on]
    end = next(at for at in ends if at >= position)
    return entry.rewards[end] - np.mean(entry.rewards[ends])


@cache
def _of_learners() -> bytes:
    """What the learners said, in the order of their tokens."""
    return b"|".join(values.tobytes() for values in shared_record().learner_logprobs[STEP])


def _is_in(values: list[float], held: bytes) -> bool:
    """Whether a learner said exactly these values one after the other."""
    return np.array(values, np.float32).tobytes() in held


def test_record_says_what_engines_and_learners_held() -> None:
    assert list(differences(shared_record(), shared_record().directory)) == []


def shift(row: Row, name: str) -> None:
    row[name] = [*row[name][-1:], *row[name][:-1]]


def swap(rows: list[Row], name: str) -> None:
    """The values of two rows that have other values."""
    other = next(row for row in rows[1:] if row[name] != rows[0][name])
    rows[0][name], other[name] = other[name], rows[0][name]


def of_prompt(rows: list[Row], number: int, position: int) -> Row:
    return next(row for row in rows if (row["prompt_id"], row["sample"]) == (f"train-{number}", position))


def raise_version(rows: list[Row]) -> None:
    of_prompt(rows, 31, 0)["version"][3] += 1


def swap_learners_tokens(rows: list[Row]) -> None:
    values = of_prompt(rows, 31, 0)["learner_logprobs"]
    values[0], values[1] = values[1], values[0]


def take_reward_of_another_group(rows: list[Row]) -> None:
    of_prompt(rows, 30, 1)["reward"] = of_prompt(rows, 33, 1)["reward"]


LIES: dict[str, tuple[Callable[[list[Row]], object], str]] = {
    "a shifted mask": (lambda rows: shift(of_prompt(rows, 31, 3), "use"), "train-31 3: use"),
    "a wrong version of one token": (raise_version, "train-31 0: version"),
    "a reward of another group": (take_reward_of_another_group, "train-30 1: reward"),
    "engine's log-probs one token late": (
        lambda rows: shift(of_prompt(rows, 30, 0), "engine_logprobs"),
        "train-30 0: engine_logprob",
    ),
    "two tokens of the learner swapped": (swap_learners_tokens, "train-31 0: learner_logprob"),
    "an advantage with the wrong sign": (
        lambda rows: of_prompt(rows, 31, 0).update(advantage=-of_prompt(rows, 31, 0)["advantage"]),
        "train-31 0: advantage",
    ),
    "outcomes of two groups swapped": (lambda rows: swap(rows, "outcome"), "train-34: outcome"),
    "a ground truth of another row": (lambda rows: swap(rows, "ground_truth"), "train-30: ground_truth"),
    "an answer that the verifier did not read": (
        lambda rows: of_prompt(rows, 32, 2)["verdicts"][0].update(read="8"),
        "train-32 2: read",
    ),
    "a token that was not sampled": (
        lambda rows: of_prompt(rows, 33, 0)["response_ids"].__setitem__(0, 5),
        "train-33 0: id",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_planted_lie_is_found(tmp_path: Path, name: str) -> None:
    plant, place = LIES[name]
    directory = copy_of(shared_record(), tmp_path / "out")
    path = directory / "record" / "steps" / f"{STEP:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    plant(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    assert place in list(differences(shared_record(), directory))
