"""The queue between the rollout side and the learners: bounded, with messages that know the version of their samples.

    producers ── put ──► MessageQueue (a Ray actor around a SampleBuffer) ──► get ── consumers
                 wait while the queue is full                                 wait until it has enough messages

Nothing is evicted: a full queue makes its producers wait. The controller keeps the staleness bound before it puts a message; the
queue checks the bound again when a message is taken, so that no sample that is too old is ever trained on.

A message is a `RolloutBatch`: references to the data of each learner, which lie in Ray's object store and do not pass through the
queue's process, and the metrics of the step. (Data in the object store is lost when the process that put it there dies.)
"""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from open_instruct.config.grpo_config import GRPOConfig

REPLY_S = 30.0
"""How long the queue actor may take to answer, in addition to a caller's own timeout."""
NUM_REMEMBERED = 1000
"""Number of message ids that are remembered. A message that is put again is recognised by its id."""


@dataclass(frozen=True)
class QueueItem:
    """One message, with the facts that the queue needs about it."""

    payload: Any
    version: int
    """Version of the oldest weights that sampled a token of the message."""
    num_samples: int
    num_bytes: int
    message_id: str = ""
    """Two puts of the same message (the second because the first got no answer) have the same id, and the queue takes the
    message once. Messages with an empty id are always different messages."""


class QueueFull(TimeoutError):
    """There was no room in time. The message was not put."""


class StaleMessage(RuntimeError):
    """A message is older than the staleness bound allows: the controller put it for another step."""


class SampleBuffer:
    """A bounded first-in-first-out buffer that never waits. Thread-safe.

    Args:
        max_queue_size: room, in samples.
        max_staleness: a message may be taken only while its version is at most this far behind `set_version`. With 2, a message
            of version 5 may be taken while the version is 5, 6 or 7. None: always.
    """

    def __init__(self, max_queue_size: int, *, max_staleness: int | None = None) -> None:
        self.max_queue_size = max_queue_size
        self.version = 0
        self._max_staleness = max_staleness
        self._lock = threading.Lock()
        self._items: deque[QueueItem] = deque()
        self._num_samples = 0
        self._num_bytes = self._max_bytes = 0
        self._total_produced = self._total_consumed = self._num_dropped = 0
        self._message_ids: OrderedDict[str, None] = OrderedDict()
        """Ids of the last messages that the queue took, whether or not they have left it since."""

    def try_put(self, item: QueueItem) -> bool:
        """Take a message if there is room for it. Returns whether the message was taken.

        A message whose `message_id` was taken before counts as taken and is not put a second time.

        Raises:
            ValueError: the message is larger than the whole queue.
        """
        with self._lock:
            if item.message_id in self._message_ids:
                self._num_dropped += item.num_samples
                return True
            if item.num_samples > self.max_queue_size:
                raise ValueError(
                    f"{item.num_samples} samples in one message, the queue holds {self.max_queue_size}: "
                    "raise --max_queue_size"
                )
            if self._num_samples + item.num_samples > self.max_queue_size:
                return False
            self._items.append(item)
            self._count(item, 1)
            self._total_produced += item.num_samples
            self._remember(item.message_id)
            return True

    def try_get(self, min_batch_count: int = 1, max_batch_count: int | None = None) -> list[QueueItem] | None:
        """The oldest messages, at most `max_batch_count`; None while the buffer has fewer than `min_batch_count`.

        Raises:
            StaleMessage: one of them is older than `max_staleness` allows. In that case no message is taken.
        """
        with self._lock:
            if len(self._items) < min_batch_count:
                return None
            number = len(self._items) if max_batch_count is None else min(max_batch_count, len(self._items))
            for item in islice(self._items, number):
                self._check_staleness(item)
            items = [self._items.popleft() for _ in range(number)]
            for item in items:
                self._count(item, -1)
                self._total_consumed += item.num_samples
            return items

    def set_version(self, version: int) -> None:
        """The learners train weights of `version`. The age of a message is counted from this version."""
        with self._lock:
            self.version = version

    def statistics(self) -> dict[str, int]:
        """Samples: `total_produced` = `total_consumed` + `queue_size`; `dropped_samples` counts the samples of messages that were
        put a second time. Bytes: `memory_bytes` are held now, `max_memory_bytes` is the maximum so far."""
        with self._lock:
            return {
                "queue_size": self._num_samples,
                "total_produced": self._total_produced,
                "total_consumed": self._total_consumed,
                "dropped_samples": self._num_dropped,
                "memory_bytes": self._num_bytes,
                "max_memory_bytes": self._max_bytes,
            }

    def _remember(self, message_id: str) -> None:
        if message_id:
            self._message_ids[message_id] = None
            if len(self._message_ids) > NUM_REMEMBERED:
                self._message_ids.popitem(last=False)

    def _count(self, item: QueueItem, sign: int) -> None:
        self._num_samples += sign * item.num_samples
        self._num_bytes += sign * item.num_bytes
        self._max_bytes = max(self._max_bytes, self._num_bytes)

    def _check_staleness(self, item: QueueItem) -> None:
        if self._max_staleness is not None and self.version - item.version > self._max_staleness:
            raise StaleMessage(
                f"samples of version {item.version} were about to be trained at version {self.version}, and the staleness bound "
                f"is {self._max_staleness}: the controller put them for another step. This is a defect of the program; the "
                "newest checkpoint is not touched by it"
            )


def default_queue_size(args: GRPOConfig) -> int:
    """Room for every sample that the staleness bound lets wait: one batch for each step ahead, and the batch being trained."""
    if args.max_queue_size is not None:
        return args.max_queue_size
    return (args.staleness_bound + 1) * args.num_unique_prompts_rollout * args.lengths.samples


def num_array_bytes(data: Any) -> int:
    """Bytes of all arrays in data of dicts, lists, tuples and dataclasses."""
    return sum(array.nbytes for array in _arrays(data))


def _arrays(data: Any) -> Iterator[np.ndarray]:
    if isinstance(data, np.ndarray):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _arrays(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _arrays(value)
    elif hasattr(data, "__dataclass_fields__"):
        yield from _arrays(vars(data))


# --- the actor and its client -----------------------------------------------------------------------------------------


class _QueueActor:
    """A `SampleBuffer` whose callers wait. One event loop, so no two calls run at once."""

    def __init__(self, max_queue_size: int, max_staleness: int | None) -> None:
        self._buffer = SampleBuffer(max_queue_size, max_staleness=max_staleness)
        self._changed = asyncio.Condition()
        self._num_put_waits = 0
        self._put_wait_s = 0.0

    async def put(self, item: QueueItem, timeout: float) -> bool:
        """Put a message. Returns whether there was room for the message in time."""
        was_put = self._buffer.try_put(item) or await self._put_later(item, timeout)
        async with self._changed:
            self._changed.notify_all()
        return was_put

    async def _put_later(self, item: QueueItem, timeout: float) -> bool:
        started, was_put = time.perf_counter(), False
        self._num_put_waits += 1
        async with self._changed:
            while not was_put and (seconds := started + timeout - time.perf_counter()) > 0:
                await self._change(seconds)
                was_put = self._buffer.try_put(item)
        self._put_wait_s += time.perf_counter() - started
        return was_put

    async def get(self, min_batch_count: int, max_batch_count: int | None, timeout: float) -> list | None:
        items = self._buffer.try_get(min_batch_count, max_batch_count)
        deadline = time.perf_counter() + timeout
        async with self._changed:
            while items is None and (seconds := deadline - time.perf_counter()) > 0:
                await self._change(seconds)
                items = self._buffer.try_get(min_batch_count, max_batch_count)
            if items is not None:
                self._changed.notify_all()
        return items

    async def _change(self, timeout: float) -> None:
        """Wait until another call has changed the buffer, or for `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    async def set_version(self, version: int) -> None:
        self._buffer.set_version(version)
        async with self._changed:
            self._changed.notify_all()

    async def statistics(self) -> dict[str, float]:
        return {**self._buffer.statistics(), "put_waits": self._num_put_waits, "put_wait_s": self._put_wait_s}


class MessageQueue:
    """A handle on the queue, which may be passed to any actor or task.

    Every call has a deadline: its own `timeout` in seconds, plus `REPLY_S` for the answer.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    @classmethod
    def create(
        cls,
        max_queue_size: int,
        *,
        max_staleness: int | None = None,
        actor_options: dict[str, Any] | None = None,
    ) -> "MessageQueue":
        """Start the actor; see `SampleBuffer` for the bounds."""
        options = {"num_cpus": 0, "max_concurrency": 1000, **(actor_options or {})}
        return cls(ray.remote(_QueueActor).options(**options).remote(max_queue_size, max_staleness))

    def put(
        self,
        payload: Any,
        *,
        version: int = 0,
        num_samples: int = 1,
        timeout: float = REPLY_S,
        message_id: str = "",
        num_bytes: int = 0,
    ) -> None:
        """Put one message; waits while the queue is full. With a `message_id` the same message may be put again after any error.

        Args:
            num_bytes: size of the data in Ray's object store that the message refers to. The metric `memory_bytes` sums it up.

        Raises:
            QueueFull: there was no room in time; nothing was put.
            TimeoutError: the queue did not answer; it is not known whether the message was put.
        """
        item = QueueItem(payload, version, num_samples, num_bytes, message_id)
        try:
            was_put = ray.get(self.actor.put.remote(item, timeout), timeout=timeout + REPLY_S)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the message queue did not answer for {timeout + REPLY_S:g} s: its process or node is gone or busy, and it is "
                "not known whether it took the message"
            ) from error
        if not was_put:
            raise QueueFull(f"the message queue took no message in {timeout:g} s: it is full")

    def get(
        self, min_batch_count: int = 1, timeout: float = REPLY_S, *, max_batch_count: int | None = None
    ) -> list | None:
        """The payloads in the queue, oldest first: at least `min_batch_count`, or None if there are not so many in time."""
        items = ray.get(
            self.get_ref(min_batch_count, timeout, max_batch_count=max_batch_count), timeout=timeout + REPLY_S
        )
        return None if items is None else [item.payload for item in items]

    def get_ref(self, min_batch_count: int = 1, timeout: float = REPLY_S, *, max_batch_count: int | None = None) -> Any:
        """Like `get`, for a caller that waits for several things at once: a reference to the `QueueItem`s, or to None."""
        return self.actor.get.remote(min_batch_count, max_batch_count, timeout)

    def set_version(self, version: int) -> None:
        ray.get(self.actor.set_version.remote(version), timeout=REPLY_S)

    def get_statistics(self) -> dict[str, float]:
        """`SampleBuffer.statistics`, and how often and how long producers waited for room."""
        return ray.get(self.get_statistics_ref(), timeout=REPLY_S)

    def get_statistics_ref(self) -> Any:
        return self.actor.statistics.remote()

    def qsize(self) -> int:
        """Number of samples in the queue."""
        return int(self.get_statistics()["queue_size"])

    def shutdown(self) -> None:
        ray.kill(self.actor)
