"""How many samples per second the message queue moves, beside Ray's queue with pickled tensors and the TransferQueue package.

    python benchmarks/queue_throughput.py
    python benchmarks/queue_throughput.py --json out/queues.json --num_rounds 5

A sample is six int64 arrays (3 x 3072, 1024, 2 x 2048 numbers: 114,688 bytes), as in the document of the fully async policy.
  plain           ray.util.queue.Queue with a dict of torch tensors
  belt            this project's MessageQueue; a batch is one message, as a piece of a training step is
  transfer_queue  TransferQueue 0.1.11 with its default storage; put by key, got by key, cleared (clearing is part of a get)
Producers are Ray actors that put side by side; the consumer is the driver. Each round goes through all three in turns; the
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
from open_instruct.rollouts.message_queue import MessageQueue

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
OPERATIONS = ("put", "get", "put_batch", "get_batch")


def make_sample(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.integers(0, 150_000, length) for name, length in FIELDS.items()}


def as_tensors(sample: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in sample.items()}


class Carrier(Protocol):
    """One of the three queues. Used in producers (put) and in the driver (get); pickled to get there."""

    name: str

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None: ...
    def put_batch(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None: ...
    def get(self, keys: list[str]) -> None: ...
    def get_batch(self, keys: list[str]) -> None: ...


class Plain:
    """Ray's queue; tensors are pickled one sample at a time, or several in one call."""

    name = "plain"

    def __init__(self, capacity: int) -> None:
        from ray.util.queue import Queue

        self.queue = Queue(maxsize=capacity, actor_options={"num_cpus": 0})

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        for sample in samples:
            self.queue.put(as_tensors(sample), timeout=TIMEOUT_S)

    def put_batch(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        self.queue.put_nowait_batch([as_tensors(sample) for sample in samples])

    def get(self, keys: list[str]) -> None:
        for _ in keys:
            self.queue.get(timeout=TIMEOUT_S)

    def get_batch(self, keys: list[str]) -> None:
        assert len(self.queue.get_nowait_batch(len(keys))) == len(keys)


class Belt:
    """The project's own."""

    name = "belt"

    def __init__(self, capacity: int) -> None:
        self.queue = MessageQueue.create(capacity)

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        for sample in samples:
            self.queue.put(sample, timeout=TIMEOUT_S)

    def put_batch(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        self.queue.put(list(samples), num_samples=len(samples), timeout=TIMEOUT_S)

    def get(self, keys: list[str]) -> None:
        for _ in keys:
            assert self.queue.get(1, TIMEOUT_S, max_batch_count=1) is not None

    def get_batch(self, keys: list[str]) -> None:
        [got] = self.queue.get(1, TIMEOUT_S, max_batch_count=1) or [[]]
        assert len(got) == len(keys)


class Transfer:
    """The TransferQueue package, by its key-value calls."""

    name = "transfer_queue"
    partition = "train"

    def __init__(self) -> None:
        import transfer_queue

        transfer_queue.init()

    def put(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        import transfer_queue

        for key, sample in zip(keys, samples, strict=True):
            transfer_queue.kv_put(key, self.partition, as_tensors(sample))

    def put_batch(self, samples: Sequence[dict[str, np.ndarray]], keys: list[str]) -> None:
        import torch
        import transfer_queue
        from tensordict import TensorDict

        columns = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in FIELDS}
        transfer_queue.kv_batch_put(keys, self.partition, TensorDict(columns, batch_size=len(keys)))

    def get(self, keys: list[str]) -> None:
        for key in keys:
            self.get_batch([key])

    def get_batch(self, keys: list[str]) -> None:
        import transfer_queue

        got = transfer_queue.kv_batch_get(keys, self.partition)
        assert len(got) == len(keys)
        transfer_queue.kv_clear(keys, self.partition)


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

    def put(self, carrier: Carrier, keys: list[str], *, batched: bool) -> None:
        step = len(self._samples)
        for start in range(0, len(keys), step):
            own = keys[start : start + step]
            (carrier.put_batch if batched else carrier.put)(self._samples[: len(own)], own)


def measure(
    carrier: Carrier, producers: list[Any], num_samples: int, batch: int, *, batched: bool
) -> tuple[float, float]:
    """Seconds to put and to get `num_samples` samples."""
    share = num_samples // len(producers)
    prefix = time.monotonic_ns()
    keys = [[f"{prefix}-{p}-{i}" for i in range(share)] for p in range(len(producers))]
    started = time.perf_counter()
    refs = [producer.put.remote(carrier, own, batched=batched) for producer, own in zip(producers, keys, strict=True)]
    ray.get(refs, timeout=TIMEOUT_S)
    put_s = time.perf_counter() - started
    flat = [key for own in keys for key in own]
    started = time.perf_counter()
    if batched:
        for start in range(0, len(flat), batch):
            carrier.get_batch(flat[start : start + batch])
    else:
        carrier.get(flat)
    return put_s, time.perf_counter() - started


def run(num_rounds: int, batch: int, producer_counts: list[int]) -> list[dict[str, Any]]:
    """Rows of medians, of each queue and operation and number of producers."""
    largest = max(producer_counts)
    num_batched = max(16, largest) * batch
    actor: Any = Producer  # what the decorator made of it
    producers = [actor.remote(number, batch) for number in range(largest)]
    carriers: list[Any] = [Plain(2 * num_batched), Belt(2 * num_batched)]
    try:
        carriers.append(Transfer())
    except ImportError as error:
        print(f"TransferQueue is not there ({error}): pip install TransferQueue==0.1.11", file=sys.stderr)
    ray.get([p.attach.remote(carrier.name) for carrier in carriers for p in producers], timeout=TIMEOUT_S)
    rates: dict[tuple[str, str, int], list[float]] = {}
    for round_number in range(num_rounds + 1):
        for count in producer_counts:
            for batched, num_samples in ((False, 64), (True, num_batched)):
                for carrier in carriers:
                    seconds = measure(carrier, producers[:count], num_samples, batch, batched=batched)
                    if round_number == 0:
                        continue
                    for operation, spent in zip(("put", "get"), seconds, strict=True):
                        key = (carrier.name, operation + ("_batch" if batched else ""), count)
                        rates.setdefault(key, []).append(num_samples / spent)
    return [
        {
            "queue": name,
            "operation": operation,
            "producers": count,
            "batch": batch if operation.endswith("batch") else 1,
            "samples_per_s": statistics.median(values),
            "samples_per_s_min": min(values),
            "samples_per_s_max": max(values),
            "mb_per_s": statistics.median(values) * SAMPLE_BYTES / 1e6,
        }
        for (name, operation, count), values in sorted(rates.items(), key=lambda one: (one[0][2], one[0][0], one[0][1]))
    ]


def ratios(rows: list[dict[str, Any]], count: int) -> dict[str, float]:
    """What the belt is worth, with `count` producers. Put and get in sequence: 1 / (1 / put + 1 / get)."""
    rate = {(row["queue"], row["operation"]): row["samples_per_s"] for row in rows if row["producers"] == count}

    def both(queue: str, suffix: str = "") -> float:
        return 1 / (1 / rate[queue, f"put{suffix}"] + 1 / rate[queue, f"get{suffix}"])

    result = {
        "belt put in batches / plain single put": rate["belt", "put_batch"] / rate["plain", "put"],
        "belt put+get in batches / plain single put+get": both("belt", "_batch") / both("plain"),
        "belt single put / plain single put": rate["belt", "put"] / rate["plain", "put"],
        "belt single get / plain single get": rate["belt", "get"] / rate["plain", "get"],
    }
    if ("transfer_queue", "put_batch") in rate:
        result["belt / TransferQueue, put+get in batches"] = both("belt", "_batch") / both("transfer_queue", "_batch")
    return result


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
