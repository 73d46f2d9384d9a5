"""The belt between the rollout side and the learners: a bounded queue of samples with version and time.

    producers ── put, put_batch ──► MessageQueue (a Ray actor around a SampleBuffer) ──► get ── consumers
                 wait while it is full                                                   wait until enough is there

Nothing is evicted: a full queue makes its producers wait, and what has expired is set aside for its owner, who issues the prompts
again. Arrays of up to 200 KB travel inside their message, as bytes. Larger payloads do not pass through the actor: the producer
stores them once in Ray's object store, a small message goes through the queue, and the consumer reads them where they lie. (They
die with the producer that stored them.)
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from open_instruct.config import GRPOConfig
from open_instruct.packed_arrays import Packed, num_array_bytes, pack, unpack, without_tensors

SMALL_BYTES = 50_000
"""Batches below this travel inside the message: cheaper than an object of their own."""
HALF_BYTES = 100_000
"""An argument or a result of up to 100 KiB goes from process to process without Ray's object store, in half the time. So the
arrays of a payload go as two."""
CLOCK_TICK_S = 0.01
REPLY_S = 30.0
"""Beyond a caller's own timeout, how long the queue actor may take to answer."""
NUM_REMEMBERED = 1000
"""Ids of the last messages, by which one that is put again is known."""


@dataclass(frozen=True)
class QueueItem:
    """One message with what the queue has to know of it."""

    payload: Any
    version: int
    """Oldest weights that sampled a token of it."""
    num_samples: int
    num_bytes: int
    message_id: str = ""
    """The same when the same message is put again, because no answer came: it is taken once. Empty: a message of its own."""
    created_at: float = field(default=0.0, compare=False)
    """When it came, by the clock of the queue."""


class QueueFull(TimeoutError):
    """There was no room in time. The messages that it does not count as taken were not put."""


class SampleBuffer:
    """A bounded first-in-first-out buffer that never waits. Thread-safe; pure, with a clock from outside.

    Args:
        max_queue_size: room, in samples.
        max_staleness: items whose version lies more than this behind `set_version` have expired.
        max_age_s: so have items older than this, in seconds of `clock`.
    """

    def __init__(
        self,
        max_queue_size: int,
        *,
        max_staleness: int | None = None,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_queue_size = max_queue_size
        self.version = 0
        self._max_staleness = max_staleness
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._items: deque[QueueItem] = deque()
        self._expired: list[QueueItem] = []
        self._num_samples = 0
        self._num_bytes = self._max_bytes = 0
        self._oldest_version = self._oldest_created = math.inf
        """No item is older; those that were taken may have been."""
        self._total_produced = self._total_consumed = self._num_expired = 0
        self._message_ids: OrderedDict[str, None] = OrderedDict()
        """Of the last messages that were taken, wherever they are now."""

    def try_put(self, items: Sequence[QueueItem]) -> int:
        """Take items from the front of `items` while there is room, which what has expired does not take up; how many were taken.

        One that was taken before, by its `message_id`, counts as taken and is not put a second time.

        Raises:
            ValueError: an item that is larger than the whole queue.
        """
        with self._lock:
            self._set_expired_aside()
            for number, item in enumerate(items):
                if item.message_id in self._message_ids:
                    continue
                if item.num_samples > self.max_queue_size:
                    raise ValueError(
                        f"{item.num_samples} samples in one message, the queue holds {self.max_queue_size}: "
                        "raise --max_queue_size"
                    )
                if self._num_samples + item.num_samples > self.max_queue_size:
                    return number
                item = replace(item, created_at=self._clock())
                self._items.append(item)
                self._oldest_version = min(self._oldest_version, item.version)
                self._oldest_created = min(self._oldest_created, item.created_at)
                self._count(item, 1)
                self._total_produced += item.num_samples
                self._remember(item.message_id)
            return len(items)

    def try_get(self, min_batch_count: int = 1, max_batch_count: int | None = None) -> list[QueueItem] | None:
        """The oldest items that have not expired, `max_batch_count` at most; None while they are fewer than `min_batch_count`."""
        with self._lock:
            self._set_expired_aside()
            if len(self._items) < min_batch_count:
                return None
            number = len(self._items) if max_batch_count is None else min(max_batch_count, len(self._items))
            taken = [self._items.popleft() for _ in range(number)]
            for item in taken:
                self._count(item, -1)
                self._total_consumed += item.num_samples
            return taken

    def set_version(self, version: int) -> None:
        """Weights of `version` are being trained: expiry is judged by it."""
        with self._lock:
            self.version = version

    def take_expired(self) -> list[QueueItem]:
        """What has expired since the last call; nobody else gets it."""
        with self._lock:
            self._set_expired_aside()
            expired, self._expired = self._expired, []
            return expired

    def seconds_to_expiry(self) -> float:
        """Until the next item is too old; not 0 then, but time enough for the clock to have passed it."""
        with self._lock:
            if self._max_age_s is None or not self._items:
                return math.inf
            oldest = min(item.created_at for item in self._items)
            return max(0.0, oldest + self._max_age_s - self._clock()) + CLOCK_TICK_S

    def statistics(self) -> dict[str, int]:
        """Samples: `queue_size`, `total_produced` = `total_consumed` + `dropped_samples` (expired) + `queue_size`. Bytes held
        now and at most: `memory_bytes`, `max_memory_bytes`."""
        with self._lock:
            return {
                "queue_size": self._num_samples,
                "total_produced": self._total_produced,
                "total_consumed": self._total_consumed,
                "dropped_samples": self._num_expired,
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

    def _set_expired_aside(self) -> None:
        """Looks at the items only when one of them may have expired: this runs with every put and get."""
        now = self._clock()
        if not self._has_expired(self._oldest_version, self._oldest_created, now):
            return
        kept: deque[QueueItem] = deque()
        for item in self._items:
            if not self._has_expired(item.version, item.created_at, now):
                kept.append(item)
                continue
            self._count(item, -1)
            self._num_expired += item.num_samples
            self._expired.append(item)
        self._items = kept
        self._oldest_version = min((item.version for item in kept), default=math.inf)
        self._oldest_created = min((item.created_at for item in kept), default=math.inf)

    def _has_expired(self, version: float, created_at: float, now: float) -> bool:
        too_stale = self._max_staleness is not None and self.version - version > self._max_staleness
        return too_stale or (self._max_age_s is not None and now - created_at > self._max_age_s)


def default_queue_size(args: GRPOConfig) -> int:
    """Room for every sample that the staleness bound lets wait: one batch for each step ahead, and the one being trained."""
    if args.max_queue_size is not None:
        return args.max_queue_size
    return (args.staleness_bound + 1) * args.num_unique_prompts_rollout * args.max_responses_per_prompt


# --- payloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A payload in Ray's object store, or a part of one."""

    ref: Any
    index: int | None = None
    """Position, where the object is a batch of payloads."""


def load(items: Sequence[QueueItem]) -> list[Any]:
    """The payloads of `items`; each stored object is fetched once, without a copy: arrays come out read-only."""
    refs = list(dict.fromkeys(item.payload.ref for item in items if isinstance(item.payload, Stored)))
    objects = dict(zip(refs, ray.get(refs, timeout=REPLY_S), strict=True)) if refs else {}
    return [_loaded(objects, item.payload) for item in items]


def _loaded(objects: dict[Any, Any], payload: Any) -> Any:
    if isinstance(payload, Packed):
        return unpack(payload.skeleton, payload.halves)
    if not isinstance(payload, Stored):
        return payload
    stored = objects[payload.ref]
    return stored if payload.index is None else stored[payload.index]


def _set_halves_apart(items: list[QueueItem]) -> tuple[list[QueueItem], list[bytes], list[bytes]]:
    """The items without the bytes of their packed payloads, and these: two results, each small enough to travel at once."""
    packed = [item.payload.halves for item in items if isinstance(item.payload, Packed)]
    if not packed:
        return items, [], []
    light = [_with_halves(item, ()) if isinstance(item.payload, Packed) else item for item in items]
    return light, [halves[0] for halves in packed], [halves[1] for halves in packed]


def _put_halves_back(items: list[QueueItem], first: list[bytes], second: list[bytes]) -> list[QueueItem]:
    halves = zip(first, second, strict=True)
    return [_with_halves(item, next(halves)) if isinstance(item.payload, Packed) else item for item in items]


def _with_halves(item: QueueItem, halves: tuple[bytes, ...]) -> QueueItem:
    return replace(item, payload=Packed(item.payload.skeleton, halves))


# --- the actor and its client -----------------------------------------------------------------------------------------


class _QueueActor:
    """A `SampleBuffer` whose callers wait. One event loop, so no two calls run at once."""

    def __init__(self, max_queue_size: int, max_staleness: int | None, max_age_s: float | None) -> None:
        self._buffer = SampleBuffer(max_queue_size, max_staleness=max_staleness, max_age_s=max_age_s)
        self._changed = asyncio.Condition()
        self._num_put_waits = 0
        self._put_wait_s = 0.0

    async def put(self, item: QueueItem, num_parts: int | None, timeout: float, *halves: bytes) -> int:
        """Put an item, or a batch whose parts are items of their own; how many fitted in before the timeout.

        `halves` are those of a packed payload.
        """
        if halves:
            item = _with_halves(item, halves)
        items = [item] if num_parts is None else _parts(item, num_parts)
        taken = self._buffer.try_put(items)
        if taken < len(items):
            taken += await self._put_rest(items[taken:], timeout)
        async with self._changed:
            self._changed.notify_all()
        return taken

    async def _put_rest(self, items: list[QueueItem], timeout: float) -> int:
        started, taken = time.perf_counter(), 0
        self._num_put_waits += 1
        async with self._changed:
            while taken < len(items) and (left := started + timeout - time.perf_counter()) > 0:
                await self._change(
                    min(left, self._buffer.seconds_to_expiry())
                )  # age makes room without telling anybody
                if number := self._buffer.try_put(items[taken:]):
                    taken += number
                    self._changed.notify_all()
        self._put_wait_s += time.perf_counter() - started
        return taken

    async def get(self, min_batch_count: int, max_batch_count: int | None, timeout: float) -> list | None:
        items = self._buffer.try_get(min_batch_count, max_batch_count)
        deadline = time.perf_counter() + timeout
        async with self._changed:
            while items is None and (left := deadline - time.perf_counter()) > 0:
                await self._change(left)
                items = self._buffer.try_get(min_batch_count, max_batch_count)
            if items is not None:
                self._changed.notify_all()
        return items

    async def _change(self, timeout: float) -> None:
        """Wait until somebody has changed the buffer, or `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    @ray.method(num_returns=3)
    async def get_apart(
        self, min_batch_count: int, max_batch_count: int | None, timeout: float
    ) -> tuple[list | None, list, list]:
        """`get`, with the two halves of packed payloads as results of their own."""
        items = await self.get(min_batch_count, max_batch_count, timeout)
        return (None, [], []) if items is None else _set_halves_apart(items)

    async def set_version(self, version: int) -> None:
        self._buffer.set_version(version)
        async with self._changed:
            self._changed.notify_all()

    async def take_expired(self) -> list[QueueItem]:
        expired = self._buffer.take_expired()
        async with self._changed:
            self._changed.notify_all()
        return expired

    async def statistics(self) -> dict[str, float]:
        return {**self._buffer.statistics(), "put_waits": self._num_put_waits, "put_wait_s": self._put_wait_s}


def _parts(batch: QueueItem, num_parts: int) -> list[QueueItem]:
    """The items of a batch: each is one payload of the stored list."""
    stored = batch.payload
    payloads = [Stored(stored.ref, index) for index in range(num_parts)] if isinstance(stored, Stored) else stored
    return [replace(batch, payload=payload, num_bytes=batch.num_bytes // num_parts) for payload in payloads]


class MessageQueue:
    """A handle on the queue; may be given to any actor or task.

    Every call has a deadline: its own `timeout` in seconds and a little more for the answer.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    @classmethod
    def create(
        cls,
        max_queue_size: int,
        *,
        max_staleness: int | None = None,
        max_age_s: float | None = None,
        actor_options: dict[str, Any] | None = None,
    ) -> "MessageQueue":
        """Start the actor; see `SampleBuffer` for the bounds."""
        options = {"num_cpus": 0, "max_concurrency": 1000, **(actor_options or {})}
        return cls(ray.remote(_QueueActor).options(**options).remote(max_queue_size, max_staleness, max_age_s))

    def put(
        self,
        payload: Any,
        *,
        version: int = 0,
        num_samples: int = 1,
        timeout: float = REPLY_S,
        message_id: str = "",
    ) -> None:
        """Put one message; waits while the queue is full. With a `message_id` the same message may be put again after any error.

        Raises:
            QueueFull: there was no room in time; nothing was put.
            TimeoutError: the queue did not answer; it is not known whether the message was put.
        """
        payload = without_tensors(payload)
        num_bytes = num_array_bytes(payload)
        packed = pack(payload) if 0 < num_bytes <= 2 * HALF_BYTES else None
        if packed is not None and max(map(len, packed.halves)) <= HALF_BYTES:
            carried, halves = Packed(packed.skeleton, ()), packed.halves
        else:
            carried, halves = payload if num_bytes < SMALL_BYTES else Stored(ray.put(payload)), ()
        self._put(QueueItem(carried, version, num_samples, num_bytes, message_id), None, timeout, *halves)

    def put_batch(self, payloads: Sequence[Any], *, version: int = 0, timeout: float = REPLY_S) -> None:
        """Put several samples in one call, stored as one object; each is got by itself.

        Raises:
            QueueFull: not all found room in time; it says how many did, from the front.
            TimeoutError: the queue did not answer; it is not known which were put.
        """
        payloads = without_tensors(list(payloads))
        num_bytes = num_array_bytes(payloads)
        carried = payloads if num_bytes < SMALL_BYTES else Stored(ray.put(payloads))
        self._put(QueueItem(carried, version, 1, num_bytes), len(payloads), timeout)

    def _put(self, item: QueueItem, num_parts: int | None, timeout: float, *halves: bytes) -> None:
        wanted = 1 if num_parts is None else num_parts
        answer = self.actor.put.remote(item, num_parts, timeout, *halves)
        try:
            taken = ray.get(answer, timeout=timeout + REPLY_S)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the message queue did not answer for {timeout + REPLY_S:g} s: its process or node is gone or busy, and it is "
                "not known whether it took the message"
            ) from error
        if taken < wanted:
            raise QueueFull(f"the message queue took {taken} of {wanted} messages in {timeout:g} s: it is full")

    def get(
        self, min_batch_count: int = 1, timeout: float = REPLY_S, *, max_batch_count: int | None = None
    ) -> list | None:
        """The payloads that are there, oldest first: at least `min_batch_count`, or None when there are not so many in time."""
        refs = self.actor.get_apart.remote(min_batch_count, max_batch_count, timeout)
        items, first, second = ray.get(refs, timeout=timeout + REPLY_S)
        return None if items is None else load(_put_halves_back(items, first, second))

    def get_ref(self, min_batch_count: int = 1, timeout: float = REPLY_S, *, max_batch_count: int | None = None) -> Any:
        """`get` for one who waits for several things at once: a reference to the items or None; `load` gives their payloads."""
        return self.actor.get.remote(min_batch_count, max_batch_count, timeout)

    def set_version(self, version: int) -> None:
        ray.get(self.actor.set_version.remote(version), timeout=REPLY_S)

    def take_expired(self) -> list[Any]:
        """Payloads that have expired: the one who put them issues their prompts again."""
        return load(ray.get(self.actor.take_expired.remote(), timeout=REPLY_S))

    def get_statistics(self) -> dict[str, float]:
        """See `SampleBuffer.statistics`; and how often and long producers waited for room."""
        return ray.get(self.get_statistics_ref(), timeout=REPLY_S)

    def get_statistics_ref(self) -> Any:
        return self.actor.statistics.remote()

    def qsize(self) -> int:
        """Samples in the queue."""
        return int(self.get_statistics()["queue_size"])

    def shutdown(self) -> None:
        ray.kill(self.actor)
