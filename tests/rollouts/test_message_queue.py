"""The belt: bounded, in order, nothing evicted, nothing too old handed out; arrays travel without being pickled."""

import threading
import time
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import make_args
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ray.exceptions import GetTimeoutError

from open_instruct.rollouts import message_queue
from open_instruct.rollouts.message_queue import (
    HALF_BYTES,
    MessageQueue,
    QueueFull,
    QueueItem,
    SampleBuffer,
    StaleMessage,
    default_queue_size,
    load,
)
from open_instruct.rollouts.packed_arrays import num_array_bytes, pack, unpack, without_tensors


def item(
    payload: Any = None, *, version: int = 0, num_samples: int = 1, num_bytes: int = 10, message_id: str = ""
) -> QueueItem:
    return QueueItem(payload, version, num_samples, num_bytes, message_id)


class BufferMachine(RuleBasedStateMachine):
    """Against a plain list: whatever is put and got in whatever order, some of it twice, while versions go on."""

    ROOM, STALENESS = 10, 2

    def __init__(self) -> None:
        super().__init__()
        self.buffer = SampleBuffer(self.ROOM, max_staleness=self.STALENESS)
        self.expected: list[QueueItem] = []
        self.last: QueueItem | None = None
        self.version = self.produced = self.consumed = self.dropped = 0

    @rule(size=st.integers(1, 4), lag=st.integers(0, 3))
    def put(self, size: int, lag: int) -> None:
        put = item(object(), version=self.version - lag, num_samples=size, message_id=str(self.produced))
        fits = sum(e.num_samples for e in self.expected) + size <= self.ROOM
        assert self.buffer.try_put(put) == fits
        if fits:
            self.expected.append(put)
            self.last = put
            self.produced += size

    @precondition(lambda self: self.last is not None)
    @rule()
    def put_the_last_one_again(self) -> None:
        assert self.last is not None
        assert self.buffer.try_put(self.last)
        self.dropped += self.last.num_samples

    @rule(low=st.integers(1, 4), extra=st.none() | st.integers(0, 3))
    def get(self, low: int, extra: int | None) -> None:
        wanted = len(self.expected) if extra is None else min(low + extra, len(self.expected))
        ahead = self.expected[:wanted]
        if len(self.expected) < low:
            assert self.buffer.try_get(low, None if extra is None else low + extra) is None
        elif any(self.version - one.version > self.STALENESS for one in ahead):
            with pytest.raises(StaleMessage, match="the staleness bound is 2"):
                self.buffer.try_get(low, None if extra is None else low + extra)
        else:
            assert self.buffer.try_get(low, None if extra is None else low + extra) == ahead
            self.consumed += sum(one.num_samples for one in ahead)
            self.expected = self.expected[wanted:]

    @rule(steps=st.integers(0, 1))
    def go_on(self, steps: int) -> None:
        self.version += steps
        self.buffer.set_version(self.version)

    @invariant()
    def counters_balance(self) -> None:
        counts = self.buffer.statistics()
        assert counts["total_produced"] == self.produced
        assert counts["total_consumed"] == self.consumed
        assert counts["dropped_samples"] == self.dropped
        assert counts["queue_size"] == self.produced - self.consumed <= self.ROOM
        assert counts["memory_bytes"] == 10 * len(self.expected)


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBuffer = BufferMachine.TestCase


def test_an_item_larger_than_the_queue_is_an_error() -> None:
    with pytest.raises(ValueError, match="11 samples in one message, the queue holds 10: raise --max_queue_size"):
        SampleBuffer(10).try_put(item(num_samples=11))


def test_message_that_is_put_again_is_taken_once_whether_or_not_it_was_got_meanwhile() -> None:
    buffer = SampleBuffer(2)
    one, other = item("one", message_id="step 1, piece 0"), item("other", message_id="step 1, piece 1")
    assert [buffer.try_put(one), buffer.try_put(one)] == [True, True]
    assert buffer.try_get() == [one]
    assert [buffer.try_put(one), buffer.try_put(other)] == [True, True]
    assert buffer.try_get() == [other]
    assert buffer.statistics()["total_produced"] == 2
    assert buffer.statistics()["dropped_samples"] == 2
    # Without an id each is a message of its own.
    assert [buffer.try_put(item("same")) for _ in range(3)] == [True, True, False]


def test_message_that_found_no_room_may_be_put_again() -> None:
    buffer = SampleBuffer(1)
    assert buffer.try_put(item("first", message_id="a"))
    assert not buffer.try_put(item("second", message_id="b"))
    buffer.try_get()
    assert buffer.try_put(item("second", message_id="b"))


def test_buffer_remembers_a_bounded_number_of_message_ids() -> None:
    buffer = SampleBuffer(10)
    for number in range(10 * message_queue.NUM_REMEMBERED):
        buffer.try_put(item(message_id=str(number)))
        buffer.try_get()
    assert len(buffer._message_ids) == message_queue.NUM_REMEMBERED


def test_queue_that_does_not_answer_is_not_told_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: object, **__: object) -> None:
        raise GetTimeoutError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(message_queue.ray, "get", no_answer)
    with pytest.raises(
        TimeoutError, match=r"did not answer for 35 s: .* not known whether it took the message"
    ) as told:
        MessageQueue(MagicMock()).put("piece", timeout=5.0)
    assert not isinstance(told.value, QueueFull)


@settings(deadline=None)
@given(bound=st.integers(0, 5))
def test_room_follows_from_staleness_and_batch(bound: int) -> None:
    args = make_args(staleness_threshold=0, max_staleness_allowed=bound)
    assert default_queue_size(args) == (bound + 1) * 16
    args.max_queue_size = 77
    assert default_queue_size(args) == 77


def test_tensors_become_arrays_on_the_same_memory() -> None:
    tensor = torch.arange(5)
    changed = without_tensors({"a": [tensor, 3], "b": (np.ones(2), "text")})
    assert isinstance(changed["a"][0], np.ndarray)
    tensor[0] = 7
    assert changed["a"][0][0] == 7
    assert num_array_bytes(changed) == 5 * 8 + 2 * 8
    assert isinstance(changed["b"], tuple)


class Pair(NamedTuple):
    left: Any
    right: Any


leaves = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.none(),
    arrays(
        st.sampled_from([np.int64, np.int32, np.float32, np.bool_]), array_shapes(min_dims=0, min_side=0, max_side=5)
    ),
)
payloads = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(payload=payloads)
def test_what_is_packed_comes_out_as_it_was(payload: Any) -> None:
    packed = pack(payload)
    again = unpack(packed.skeleton, packed.halves)
    assert_same(again, payload)
    assert num_array_bytes(packed.skeleton) == 0


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert not one.flags.writeable
        assert one.flags.aligned
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def test_the_documents_sample_is_packed_in_halves_that_ray_sends_at_once() -> None:
    sample = {str(n): np.arange(length) for n, length in enumerate([3072, 3072, 3072, 1024, 2048, 2048])}
    halves = pack(sample).halves
    assert sum(map(len, halves)) == 114_688
    assert max(map(len, halves)) <= HALF_BYTES


def test_strided_arrays_and_those_of_objects() -> None:
    strange = {"every other": np.arange(10)[::2], "transposed": np.ones((2, 3)).T, "objects": np.array([{}, "a"])}
    packed = pack(strange)
    again = unpack(packed.skeleton, packed.halves)
    assert again["objects"] is strange["objects"]
    np.testing.assert_array_equal(again["every other"], [0, 2, 4, 6, 8])
    assert again["transposed"].shape == (3, 2)


# --- the actor --------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(ray_session: Any) -> Any:
    queue = MessageQueue.create(8)
    assert queue.qsize() == 0  # it has started: tests may look at the clock
    yield queue
    queue.shutdown()


def test_large_and_small_payloads_come_out_as_they_went_in(queue: MessageQueue) -> None:
    large = {"tokens": torch.arange(20_000), "name": "large"}
    queue.put(large, version=3)
    queue.put({"tokens": np.arange(3)})
    queue.put([np.full(20_000, i) for i in range(3)], num_samples=3)
    queue.put(["a", "b"], num_samples=2)
    assert queue.qsize() == 7
    statistics = queue.get_statistics()
    assert statistics["memory_bytes"] == pytest.approx((20_000 * 4 + 3) * 8, abs=8)
    first, small, several, words = queue.get(4) or []
    assert first["name"] == "large"
    np.testing.assert_array_equal(first["tokens"], np.arange(20_000))
    assert not first["tokens"].flags.writeable  # it lies in shared memory
    assert small["tokens"].tolist() == [0, 1, 2]
    assert [part[0] for part in several] == [0, 1, 2]
    assert words == ["a", "b"]
    assert queue.get_statistics()["memory_bytes"] == 0


def test_payloads_of_every_size_keep_their_places(ray_session: Any, queue: MessageQueue) -> None:
    """Without arrays, in halves, in halves that cannot be even, in the object store; got together, one by one, by reference."""
    sent = [
        np.zeros(0),
        "text",
        np.arange(5),
        np.arange(12_000),
        np.arange(20_000),
        np.arange(30_000),
        ray_session.put(7),
    ]

    def check(got: list[Any] | None) -> None:
        assert got is not None
        assert got[1] == "text"
        assert [got[i].size for i in (0, 2, 3, 4, 5)] == [0, 5, 12_000, 20_000, 30_000]
        assert [one[-1] for one in got[2:6]] == [4, 11_999, 19_999, 29_999]
        assert ray_session.get(got[6], timeout=10) == 7

    for one in sent:
        queue.put(one)
    check(queue.get(7))
    for one in sent:
        queue.put(one)
    check([(queue.get(max_batch_count=1) or [])[0] for _ in sent])
    for one in sent:
        queue.put(one)
    check(load(ray_session.get(queue.get_ref(7), timeout=10)))


def test_an_empty_queue_answers_none_in_time(queue: MessageQueue) -> None:
    def seconds() -> float:
        started = time.monotonic()
        assert queue.get(timeout=1.0) is None
        return time.monotonic() - started

    # The quickest of three: a machine that does other work answers late.
    assert 0.9 <= min(seconds() for _ in range(3)) <= 2.0
    queue.put("one")
    assert queue.get(min_batch_count=2, timeout=0.2) is None  # and what is there stays
    assert queue.get() == ["one"]


def test_a_full_queue_makes_its_producer_wait_and_then_say_so(queue: MessageQueue) -> None:
    for number in range(8):
        queue.put(number)
    with pytest.raises(QueueFull, match=r"took no message in 0.3 s: it is full"):
        queue.put("too much", timeout=0.3)
    waiting = threading.Thread(target=lambda: queue.put("patient", timeout=20))
    waiting.start()
    time.sleep(0.3)
    assert queue.get(1, max_batch_count=1) == [0]
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert queue.get(8) == [*range(1, 8), "patient"]
    assert queue.get_statistics()["put_waits"] == 2
    queue.put("patient again", message_id="a")
    queue.put("patient again", message_id="a")
    assert queue.get(1) == ["patient again"]


def test_nothing_is_lost_or_doubled_between_many_producers_and_consumers(ray_session: Any, queue: MessageQueue) -> None:
    @ray_session.remote(num_cpus=0)
    def produce(number: int) -> None:
        for i in range(30):
            queue.put((number, i), timeout=60)

    @ray_session.remote(num_cpus=0)
    def consume() -> list[Any]:
        got: list[Any] = []
        while (batch := queue.get(1, timeout=3.0, max_batch_count=2)) is not None:
            got += batch
        return got

    consumers = [consume.remote() for _ in range(2)]
    ray_session.get([produce.remote(number) for number in range(3)], timeout=60)
    got = [one for part in ray_session.get(consumers, timeout=60) for one in part]
    assert sorted(got) == [(number, i) for number in range(3) for i in range(30)]


def test_what_is_too_old_is_told_and_not_handed_out(ray_session: Any) -> None:
    queue = MessageQueue.create(8, max_staleness=3)
    queue.put("old", version=1)
    queue.set_version(4)
    assert queue.get(1, timeout=1) == ["old"]
    queue.put("old", version=1)
    queue.set_version(5)
    words = "samples of version 1 were about to be trained at version 5, and the staleness bound is 3"
    with pytest.raises(StaleMessage, match=words):
        queue.get(1, timeout=1)
    with pytest.raises(StaleMessage, match=words):
        ray_session.get(queue.get_ref(1), timeout=10)
    queue.shutdown()
