"""How many samples per second reach a learner through the message queue, beside Ray's queue and the TransferQueue package.

    python benchmarks/queue_throughput.py
    python benchmarks/queue_throughput.py --json out/queues.json --num_rounds 5

A sample is six int64 arrays (3 x 3072, 1024, 2 x 2048 numbers: 114,688 bytes), as in the document of the fully async policy.
  plain           ray.util.queue.Queue with a dict of torch tensors, one sample per call
  plain_batches   the same queue, a batch of samples per call
  message_queue   this project's MessageQueue as a run uses it: arrays of a batch go into Ray's object store, the message holds
                  the reference, and the consumer reads the arrays by it, as a learner does
  transfer_queue  TransferQueue 0.1.11 with its default storage; put by key, got by key, cleared (clearing is part of a get)
Producers are Ray actors that put side by side; the consumer is the driver. Each round goes through all of them in turns; the
figures are medians over rounds, after a first that is not counted (it touches the shared memory for the first time).
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import print_table, write_json
from open_instruct.data_types import RolloutBatch
from open_instruct.rollouts.message_queue import MessageQueue, num_array_bytes

FIELDS = {
    "attention_mask": 3072,
    "input_ids": 3072,
    "position_ids": 3072,
    "prompts": 1024,
    "response_mask": 2048,
    "responses": 2048,
}
SAMPLE_BYTES = 8 * sum(FIELDS.values())
TIMEOUT_S = 120.0
NUM_SINGLE = 64
"""Samples that are moved one by one in a round."""
OPERATIONS = ("put", "get", "put+get")


def make_sample(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.integers(0, 150_000, length) for name, length in FIELDS.items()}


def as_tensors(sample: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in sample.items()}


class Carrier(Protocol):
    """One way from producers to the consumer. Used in producers (put) and in the driver (get); pickled to get there."""

    name: str
    batch: int
    """Samples per call."""

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None: ...
    def get(self, keys: list[str]) -> list[Any]:
        """The arrays or tensors of these samples, or of the oldest ones where the queue has no keys."""
        ...


class Plain:
    """Ray's queue with pickled tensors."""

    def __init__(self, capacity: int, batch: int) -> None:
        from ray.util.queue import Queue

        self.name, self.batch = "plain" if batch == 1 else "plain_batches", batch
        self.queue = Queue(maxsize=capacity, actor_options={"num_cpus": 0})

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        if self.batch == 1:
            self.queue.put(as_tensors(samples[0]), timeout=TIMEOUT_S)
        else:
            self.queue.put_nowait_batch([as_tensors(sample) for sample in samples])

    def get(self, keys: list[str]) -> list[Any]:
        if self.batch == 1:
            return list(self.queue.get(timeout=TIMEOUT_S).values())
        return [tensor for sample in self.queue.get_nowait_batch(len(keys)) for tensor in sample.values()]


class Messages:
    """This project's queue, as `BatchProducer` and the learners use it."""

    name = "message_queue"

    def __init__(self, capacity: int, batch: int) -> None:
        self.batch = batch
        self.queue = MessageQueue.create(capacity)

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        batch = RolloutBatch(1, [ray.put(list(samples))], num_samples=len(samples))
        self.queue.put(batch, num_samples=len(samples), num_bytes=num_array_bytes(samples), timeout=TIMEOUT_S)

    def get(self, keys: list[str]) -> list[Any]:
        [item] = ray.get(self.queue.get_ref(1, TIMEOUT_S, max_batch_count=1), timeout=2 * TIMEOUT_S)
        [samples] = ray.get(item.payload.rank_data, timeout=TIMEOUT_S)
        return [array for sample in samples for array in sample.values()]


class Transfer:
    """The TransferQueue package, by its key-value calls."""

    name = "transfer_queue"
    partition = "train"

    def __init__(self, batch: int) -> None:
        import transfer_queue

        self.batch = batch
        transfer_queue.init()

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        import torch
        import transfer_queue
        from tensordict import TensorDict

        columns = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in FIELDS}
        transfer_queue.kv_batch_put(keys, self.partition, TensorDict(columns, batch_size=len(keys)))

    def get(self, keys: list[str]) -> list[Any]:
        import transfer_queue

        columns = transfer_queue.kv_batch_get(keys, self.partition)
        transfer_queue.kv_clear(keys, self.partition)
        return [tensor for name in FIELDS for tensor in columns[name]]


@ray.remote(num_cpus=0)
class Producer:
    """Puts samples of its own when told."""

    def __init__(self, number: int, batch: int) -> None:
        rng = np.random.default_rng(number)
        self._samples = [make_sample(rng) for _ in range(batch)]

    def attach(self, carrier_name: str) -> None:
        if carrier_name == Transfer.name:
            import transfer_queue

            transfer_queue.init()

    def put(self, carrier: Carrier, keys: list[str]) -> None:
        for start in range(0, len(keys), carrier.batch):
            own = keys[start : start + carrier.batch]
            carrier.put(self._samples[: len(own)], own)


def measure(carrier: Carrier, producers: list[Any], num_samples: int) -> tuple[float, float]:
    """Seconds to put and to get `num_samples` samples. The consumer reads every number that it gets once."""
    share = num_samples // len(producers)
    prefix = time.monotonic_ns()
    keys = [[f"{prefix}-{p}-{i}" for i in range(share)] for p in range(len(producers))]
    started = time.perf_counter()
    ray.get(
        [producer.put.remote(carrier, own) for producer, own in zip(producers, keys, strict=True)], timeout=TIMEOUT_S
    )
    put_s = time.perf_counter() - started
    flat = [key for own in keys for key in own]
    started = time.perf_counter()
    for start in range(0, len(flat), carrier.batch):
        batch = flat[start : start + carrier.batch]
        arrays = carrier.get(batch)
        assert len(arrays) == len(batch) * len(FIELDS)
        sum(int(array.sum()) for array in arrays)
    return put_s, time.perf_counter() - started


def run(num_rounds: int, batch: int, producer_counts: list[int]) -> list[dict[str, Any]]:
    """Rows of medians, of each queue and operation and number of producers."""
    largest = max(producer_counts)
    num_batched = max(16, largest) * batch
    actor: Any = Producer  # what the decorator made of it
    producers = [actor.remote(number, batch) for number in range(largest)]
    carriers: list[Any] = [Plain(NUM_SINGLE, 1), Plain(2 * num_batched, batch), Messages(2 * num_batched, batch)]
    try:
        carriers.append(Transfer(batch))
    except ImportError as error:
        print(f"TransferQueue is not there ({error}): pip install TransferQueue==0.1.11", file=sys.stderr)
    ray.get([p.attach.remote(carrier.name) for carrier in carriers for p in producers], timeout=TIMEOUT_S)
    rates: dict[tuple[str, str, int], list[float]] = {}
    batches = {carrier.name: carrier.batch for carrier in carriers}
    for round_number in range(num_rounds + 1):
        for count in producer_counts:
            for carrier in carriers:
                num_samples = NUM_SINGLE if carrier.batch == 1 else num_batched
                put_s, get_s = measure(carrier, producers[:count], num_samples)
                if round_number == 0:
                    continue
                for operation, seconds in (("put", put_s), ("get", get_s), ("put+get", put_s + get_s)):
                    rates.setdefault((carrier.name, operation, count), []).append(num_samples / seconds)
    return [
        {
            "queue": name,
            "operation": operation,
            "producers": count,
            "batch": batches[name],
            "samples_per_s": statistics.median(values),
            "samples_per_s_min": min(values),
            "samples_per_s_max": max(values),
            "mb_per_s": statistics.median(values) * SAMPLE_BYTES / 1e6,
        }
        for (name, operation, count), values in sorted(rates.items(), key=lambda entry: (entry[0][2], entry[0]))
    ]


def ratios(rows: list[dict[str, Any]], count: int) -> dict[str, float]:
    """How many times as many samples per second pass the message queue as pass each other queue, with `count` producers."""
    rate = {(row["queue"], row["operation"]): row["samples_per_s"] for row in rows if row["producers"] == count}
    return {
        f"message_queue / {queue}, {operation}": rate[Messages.name, operation] / rate[queue, operation]
        for queue in ("plain", "plain_batches", Transfer.name)
        for operation in OPERATIONS
        if (queue, operation) in rate
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 4, 16])
    args = parser.parse_args()
    os.environ.setdefault("TQ_LOGGING_LEVEL", "WARNING")
    # TransferQueue's storage units ask for whole CPUs and wait for ever where there are none left.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)
    rows = run(args.num_rounds, args.batch, args.producers)
    print_table(rows)
    for count in args.producers:
        print(f"\n{count} producers:")
        for name, value in ratios(rows, count).items():
            print(f"  {name}: {value:.2f}")
    write_json(args.json, rows)
    ray.shutdown()


if __name__ == "__main__":
    main()
