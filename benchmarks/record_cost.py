"""What the record costs: processor time and bytes for each sampled token, without a run around it.

    python benchmarks/record_cost.py                      256 prompts × 8 responses of 400 tokens, half of the groups left out
    python benchmarks/record_cost.py --tokens 2000

Token ids follow Zipf's law over 150,000 words, log-probs of the engine are those of a sampler of 0.6 nats of entropy, and those
of the learner differ by 0.01 nats, as in bfloat16. The first step is not counted, because it loads libraries.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from open_instruct.data_types import GenerationResult, Sample, TokenStatistics, TrainingSample
from open_instruct.record.places import RECORD
from open_instruct.record.samples import RecordedGroup
from open_instruct.record.writer import RecordWriter
from open_instruct.rollouts.packing import prepare_collated_data_for_workers
from open_instruct.scored_groups import ScoredGroup

WORDS = 150_000
NUM_STEPS = 8
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
    trained = groups[::2]
    samples = [
        TrainingSample(sample.prompt_ids, sample.response_ids, np.ones(num_tokens, bool), sample.logprobs, 0.5)
        for group in trained
        for sample in group.samples
    ]
    rank_batches = prepare_collated_data_for_workers(
        samples, dp_world_size=1, pack_length=16_384, rows=1, layout="packed", pad_token_id=0
    )
    engine = np.concatenate([samples[number].logprobs for number in _order(rank_batches)])
    learner = engine + rng.normal(0, 0.01, len(engine)).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(Path(directory) / RECORD, 0)
        seconds, in_caller = [], []
        for step in range(1, NUM_STEPS + 1):
            began, cpu = time.perf_counter(), time.process_time()
            for number, group in enumerate(groups):
                outcome = "zero_std" if number % 2 else "consumed"
                entry = RecordedGroup(group, group.scores, "line 7", "a.jsonl", "42", outcome, 0, step, time.time())
                writer.add(step, entry)
            writer.sent(step, rank_batches, samples)
            in_caller.append(time.perf_counter() - began)
            writer.commit(step, [{"logprobs": learner, "correction": None}])
            assert writer.flush(WRITTEN_S)
            seconds.append(time.process_time() - cpu)
        writer.close(WRITTEN_S)
        num_bytes = (Path(directory) / RECORD / "steps" / "000001.parquet").stat().st_size
    cpu_s, in_caller_s = statistics.median(seconds[1:]), statistics.median(in_caller[1:])
    num_sampled, num_trained = num_prompts * num_samples * num_tokens, len(samples) * num_tokens
    return {
        "sampled_tokens": num_sampled,
        "cpu_s": cpu_s,
        "in_caller_s": in_caller_s,
        "cpu_us_per_sampled_token": 1e6 * cpu_s / num_sampled,
        "cpu_share_at_20000_tokens_per_s": 20_000 * cpu_s / num_sampled,
        "bytes_per_sampled_token": num_bytes / num_sampled,
        "bytes_per_trained_token": num_bytes / num_trained,
    }


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
    options = parser.parse_args()
    print(json.dumps(measure(options.prompts, options.samples, options.tokens), indent=1))
