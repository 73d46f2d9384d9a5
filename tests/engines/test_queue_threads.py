"""When finished groups leave an engine actor."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args
from ray.util.queue import Full

from open_instruct.engines.queue_threads import QueueThreads
from open_instruct.engines.request_tracker import RequestTracker
from open_instruct.engines.vllm_engine import GATHER_S
from open_instruct.run.rollout_manager import GATHER_IN_TURNS_S, engine_options
from open_instruct.system.work_threads import WorkThreads


class Pushed:
    """Stands for the results queue: what was put, one list for each call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.is_full = False

    def put(self, results: list[Any], timeout: float) -> None:
        if self.is_full:
            time.sleep(timeout / 100)
            raise Full
        self.calls.append([result.prompt_id for result in results])


class Pusher:
    """The pusher thread with rollouts `a` to `c` under way."""

    def __init__(self, gather_s: float) -> None:
        self.threads = WorkThreads("engine 0")
        self.work = RequestTracker(self.threads.lock, max_num_seqs=8, max_tokens=1e9)
        self.pushed = Pushed()
        queues: tuple[Any, Any] = (None, self.pushed)
        self.queues = QueueThreads(self.threads, self.work, *queues, lambda _: None, gather_s=gather_s)
        self.work.take_in([SimpleNamespace(prompt_id=prompt_id, issue_version=0) for prompt_id in "abc"])  # type: ignore[misc]
        self.threads.start(self.queues.push_results)

    def finish(self, prompt_id: str) -> None:
        self.queues.hand_over(SimpleNamespace(prompt_id=prompt_id))  # type: ignore[arg-type]


@contextmanager
def pusher(gather_s: float) -> Iterator[Pusher]:
    pusher = Pusher(gather_s)
    try:
        yield pusher
    finally:
        pusher.threads.stop()
        pusher.threads.join(5.0)


def comes_true(condition: Any, within_s: float = 5.0) -> bool:
    ends_at = time.monotonic() + within_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.002)
    return bool(condition())


def test_groups_that_finish_one_after_another_leave_together() -> None:
    with pusher(gather_s=30.0) as busy:
        for prompt_id in "abc":
            busy.finish(prompt_id)
            time.sleep(0.05)
        assert comes_true(lambda: busy.pushed.calls)
        assert busy.pushed.calls == [["a", "b", "c"]]


def test_a_group_does_not_wait_long_for_others() -> None:
    with pusher(gather_s=0.05) as busy:
        busy.finish("a")
        assert comes_true(lambda: busy.pushed.calls == [["a"]])
        assert comes_true(lambda: busy.work.prompt_ids == ["b", "c"])


def test_what_is_finished_leaves_an_engine_that_ends() -> None:
    with pusher(gather_s=30.0) as busy:
        busy.finish("a")
        time.sleep(0.05)
        assert busy.pushed.calls == []  # it waits for the others
        busy.threads.stop()
        assert comes_true(lambda: busy.pushed.calls == [["a"]])


def test_a_full_queue_does_not_keep_an_engine_from_ending() -> None:
    with pusher(gather_s=30.0) as busy:
        busy.pushed.is_full = True
        for prompt_id in "abc":
            busy.finish(prompt_id)
        busy.threads.stop()
        [thread] = busy.threads._running
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "handovers_are_rare"),
    [
        ({"async_steps": 0}, True),
        ({"async_steps": 1}, False),
        ({"async_steps": 0, "streaming": True}, False),
    ],
)
def test_groups_are_gathered_for_longer_where_learners_wait_for_all(
    options: dict[str, Any], *, handovers_are_rare: bool
) -> None:
    args = make_args(**options)
    made = engine_options(args, args.device, seed=1, max_model_len=64)
    assert made.gather_s == (GATHER_IN_TURNS_S if handovers_are_rare else GATHER_S)
