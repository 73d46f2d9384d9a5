"""What the record costs: processor time and bytes for each sampled token, without a run around it.

    python benchmarks/record_cost.py                      256 prompts × 8 responses of 400 tokens, half of the groups left out
    python benchmarks/record_cost.py --tokens 2000
    python benchmarks/record_cost.py --like out/cpu_game  what the steps of a run have cost, whatever its workflow

Token ids follow Zipf's law over 150,000 words, log-probs of the engine are those of a sampler of 0.6 nats of entropy, and those
of the learner differ by 0.01 nats, as in bfloat16. With `--like` the groups are those of a run's record, and the processor time
of a step is divided by the time that it took in the run. The first step is not counted, because it loads libraries.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics, TrainingSample
from open_instruct.record.places import RECORD
from open_instruct.record.reader import RunRecord
from open_instruct.record.samples import RecordedGroup
from open_instruct.record.schema import GIVEN, TAUGHT, TRAINED
from open_instruct.record.writer import RecordWriter
from open_instruct.rollouts.packing import prepare_collated_data_for_workers
from open_instruct.rollouts.prompt_ledger import ZERO_STD
from open_instruct.scored_groups import CONSUMED, Reading, ScoredGroup

WORDS = 150_000
NUM_STEPS = 8
OUTCOMES = CONSUMED, ZERO_STD
NOT_SAMPLED = GIVEN, TAUGHT
WRITTEN_S = 600.0


def make_groups(rng: np.random.Generator, num_prompts: int, num_samples: int, num_tokens: int) -> list[ScoredGroup]:
    groups = []
    for prompt in range(num_prompts):
        query = _ids(rng, 200)
        samples = [
            Sample(query, _ids(rng, num_tokens), _logprobs(rng, num_tokens), "stop", [(3, num_tokens)])
            for _ in range(num_samples)
        ]
        statistics = TokenStatistics(200, num_samples * num_tokens, 1.0, time.time())
        result = GenerationResult(samples, prompt, f"train-{prompt}", 3, 0, statistics)
        groups.append(ScoredGroup(result, "math", rng.integers(0, 2, num_samples).astype(np.float32)))
    return groups


def _ids(rng: np.random.Generator, number: int) -> np.ndarray:
    return np.minimum(rng.zipf(1.3, number), WORDS - 1).astype(np.int32)


def _logprobs(rng: np.random.Generator, number: int) -> np.ndarray:
    return -rng.exponential(0.6, number).astype(np.float32)


def measure(num_prompts: int, num_samples: int, num_tokens: int) -> dict[str, float]:
    """Seconds of processor time and bytes of one step."""
    rng = np.random.default_rng(1)
    groups = make_groups(rng, num_prompts, num_samples, num_tokens)
    samples = [
        TrainingSample(sample.prompt_ids, sample.response_ids, np.ones(num_tokens, bool), sample.logprobs, 0.5)
        for group in groups[::2]
        for sample in group.samples
    ]
    rank_batches = _packed(samples)
    engine = np.concatenate([samples[number].logprobs for number in _order(rank_batches)])
    values = {"logprobs": engine + rng.normal(0, 0.01, len(engine)).astype(np.float32), "correction": None}
    entries = [
        RecordedGroup(group, group.scores, "line 7", "a.jsonl", "42", OUTCOMES[number % 2], 0, 1, time.time())
        for number, group in enumerate(groups)
    ]
    step = RecordedStep(entries, samples, rank_batches, values)
    costs, num_bytes = written([step] * NUM_STEPS)
    cpu_s = statistics.median(cost.cpu_s for cost in costs[1:])
    num_sampled, num_trained = num_prompts * num_samples * num_tokens, len(samples) * num_tokens
    return {
        "sampled_tokens": num_sampled,
        "cpu_s": cpu_s,
        "in_caller_s": statistics.median(cost.in_caller_s for cost in costs[1:]),
        "cpu_us_per_sampled_token": 1e6 * cpu_s / num_sampled,
        "cpu_share_at_20000_tokens_per_s": 20_000 * cpu_s / num_sampled,
        "bytes_per_sampled_token": num_bytes / len(costs) / num_sampled,
        "bytes_per_trained_token": num_bytes / len(costs) / num_trained,
    }


def measure_like(output_dir: Path) -> dict[str, float]:
    """The same for the steps of a run, and the share of its time that the record took."""
    record = RunRecord(output_dir)
    seconds = {row["training_step"]: row["time/total"] for row in record.metrics() if "time/total" in row}
    numbers = [number for number in record.steps() if number in seconds]
    tables = [record.samples(number).to_pylist() for number in numbers]
    costs, num_bytes = written([_step_of(rows) for rows in tables])
    sampled = [sum(use not in NOT_SAMPLED for row in rows for use in row["use"]) for rows in tables]
    trained = sum(use == TRAINED for rows in tables for row in rows for use in row["use"])
    cpu_s = statistics.median(cost.cpu_s for cost in costs[1:])
    step_s = statistics.median([seconds[number] for number in numbers[1:]])
    return {
        "steps": len(numbers),
        "samples_per_step": statistics.median(map(len, tables)),
        "sampled_tokens_per_step": statistics.median(sampled),
        "cpu_s": cpu_s,
        "in_caller_s": statistics.median(cost.in_caller_s for cost in costs[1:]),
        "step_s": step_s,
        "share_of_a_step": cpu_s / step_s,
        "bytes_per_sampled_token": num_bytes / sum(sampled),
        "bytes_per_trained_token": num_bytes / trained,
    }


@dataclass(frozen=True)
class RecordedStep:
    """What the controller tells the record of a step."""

    groups: list[RecordedGroup]
    samples: list[TrainingSample]
    rank_batches: list
    values: dict[str, np.ndarray | None]
    """What the learners say of its tokens."""


@dataclass(frozen=True)
class Cost:
    """Seconds for one step."""

    cpu_s: float
    """Processor time of the caller and of the record's thread."""
    in_caller_s: float
    """Time in which the caller waits."""


def written(steps: list[RecordedStep]) -> tuple[list[Cost], int]:
    """Writes these steps. Returns the cost of each, and the bytes of all."""
    costs = []
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(Path(directory) / RECORD, 0)
        for number, step in enumerate(steps, start=1):
            began, cpu = time.perf_counter(), time.process_time()
            for entry in step.groups:
                writer.add(number, entry)
            writer.sent(number, step.rank_batches, step.samples)
            in_caller_s = time.perf_counter() - began
            writer.commit(number, [step.values])
            assert writer.flush(WRITTEN_S)
            costs.append(Cost(time.process_time() - cpu, in_caller_s))
        writer.close(WRITTEN_S)
        assert not writer.failure, writer.failure
        files = (Path(directory) / RECORD / "steps").glob("*.parquet")
        return costs, sum(file.stat().st_size for file in files)


def _step_of(rows: list[dict[str, Any]]) -> RecordedStep:
    """A step of a run as the controller told it. Verdicts of a group are those of its first verifier."""
    of_group: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        of_group.setdefault((row["prompt_id"], row["attempt"], row["group"], row["outcome"]), []).append(row)
    samples, learner, groups = [], [], []
    for own in of_group.values():
        group = _group_of(own)
        groups.append(group)
        for row, sample in zip(own, group.group.samples, strict=True):
            mask = np.array(row["use"], np.uint8) == TRAINED
            if row["learner_logprobs"] is None:
                continue
            samples.append(
                TrainingSample(sample.prompt_ids, sample.response_ids, mask, sample.logprobs, row["advantage"])
            )
            learner.append(np.array(row["learner_logprobs"], np.float32)[mask])
    rank_batches = _packed(samples)
    logprobs = [learner[number] for number in _order(rank_batches)]
    return RecordedStep(groups, samples, rank_batches, {"logprobs": np.concatenate(logprobs), "correction": None})


def _group_of(rows: list[dict[str, Any]]) -> RecordedGroup:
    first = rows[0]
    effects = [tuple(effect.values()) for effect in first["effects"] or ()]
    cost = TokenStatistics(len(first["prompt_ids"]), 0, first["generation_s"], first["began"], effects=effects)
    result = GenerationResult(
        [_sample_of(row) for row in rows], first["index"], first["prompt_id"], first["issue_version"], 0, cost
    )
    scores = np.array([math.nan if row["score"] is None else row["score"] for row in rows], np.float32)
    read = [verdict["read"] if (verdict := next(iter(row["verdicts"]), None)) else None for row in rows]
    group = ScoredGroup(result, first["dataset"], scores, readings=(tuple(Reading(text) for text in read),))
    return RecordedGroup(
        group, scores, first["row"], first["source"], json.loads(first["ground_truth"]), first["outcome"], 0, 1, 0.0
    )


def _sample_of(row: dict[str, Any]) -> Sample:
    versions = np.array(row["version"], np.int32)
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    spans = [
        (int(versions[start]), int(size)) for start, size in zip(starts, np.diff([*starts, len(versions)]), strict=True)
    ]
    return Sample(
        np.array(row["prompt_ids"], np.int32),
        np.array(row["response_ids"], np.int32),
        np.array(row["engine_logprobs"], np.float32),
        row["finish_reason"],
        spans,
        loss_mask=np.isin(row["use"], NOT_SAMPLED, invert=True),
        group=row["group"],
        kind=row["kind"],
        number=row["number"],
        weight=row["weight"],
        is_judged=row["is_judged"],
        answer_start=row["answer_start"],
        environment_reward=row["environment_reward"],
        goes_on=row["goes_on"],
        parent=row["parent"],
    )


def _packed(samples: list[TrainingSample]) -> list:
    return prepare_collated_data_for_workers(
        samples, dp_world_size=1, pack_length=16_384, rows=1, layout="packed", pad_token_id=0
    )


def _order(rank_batches: list) -> list[int]:
    return [
        number
        for mini_batches in rank_batches
        for mini_batch in mini_batches
        for numbers in mini_batch.samples_of_micro_batches
        for number in numbers
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--like", type=Path, metavar="DIR", help="output folder of a run that has a record")
    options = parser.parse_args()
    if options.like:
        print(json.dumps(measure_like(options.like), indent=1))
    else:
        print(json.dumps(measure(options.prompts, options.samples, options.tokens), indent=1))
