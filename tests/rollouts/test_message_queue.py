"""The queue of batches: bounded, in order, nothing evicted, nothing too old handed out."""

import threading
import time
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from conftest import make_args
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ray.exceptions import GetTimeoutError

from open_instruct.data_types import RolloutBatch
from open_instruct.rollouts import message_queue
from open_instruct.rollouts.message_queue import (
    MessageQueue,
    QueueFull,
    QueueItem,
    SampleBuffer,
    StaleMessage,
    default_queue_size,
    num_array_bytes,
)


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


def test_bytes_of_arrays_are_counted_wherever_they_lie() -> None:
    batch = RolloutBatch(
        1, [{"tokens": np.zeros(5, np.int64)}, (np.ones(2), "text")], metrics={"histogram": [np.ones(3)]}
    )
    assert num_array_bytes(batch) == 5 * 8 + 2 * 8 + 3 * 8


# --- the actor --------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(ray_session: Any) -> Any:
    queue = MessageQueue.create(8)
    assert queue.qsize() == 0  # it has started: tests may look at the clock
    yield queue
    queue.shutdown()


def test_batches_come_out_as_they_went_in_and_their_data_is_read_where_it_lies(
    ray_session: Any, queue: MessageQueue
) -> None:
    tokens = np.arange(20_000)
    first = RolloutBatch(1, [ray_session.put(tokens)], metrics={"scores": 0.5}, num_samples=3)
    second = RolloutBatch(1, [], number=1, num_samples=2)
    queue.put(first, num_samples=3, num_bytes=num_array_bytes(tokens))
    queue.put(second, num_samples=2)
    assert queue.qsize() == 5
    assert queue.get_statistics()["memory_bytes"] == tokens.nbytes
    received, last = queue.get(2) or []
    assert (received.metrics, last) == (first.metrics, second)
    [data] = ray_session.get(received.rank_data, timeout=10)
    np.testing.assert_array_equal(data, tokens)
    assert not data.flags.writeable  # it lies in shared memory
    assert queue.get_statistics()["memory_bytes"] == 0


@pytest.mark.parametrize("size", [1, 12_000, 40_000])
def test_arrays_among_the_metrics_reach_the_trainer(ray_session: Any, queue: MessageQueue, size: int) -> None:
    """The trainer waits for a reference to the items; it must find the batch itself in them, however large the arrays are."""
    queue.put(RolloutBatch(1, [], metrics={"histogram": np.arange(size)}))
    [item_of_trainer] = ray_session.get(queue.get_ref(max_batch_count=1), timeout=10)
    assert isinstance(item_of_trainer.payload, RolloutBatch)
    np.testing.assert_array_equal(item_of_trainer.payload.metrics["histogram"], np.arange(size))


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
