"""When finished groups leave an engine actor."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.engines import queue_threads
from open_instruct.engines.held_work import HeldWork
from open_instruct.engines.queue_threads import QueueThreads
from open_instruct.system.work_threads import WorkThreads

LONG_S = 30.0


class Pushed:
    """Stands for the results queue: what was put, one list for each call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def put(self, results: list[Any], timeout: float) -> None:
        del timeout
        self.calls.append([result.prompt_id for result in results])


class Pusher:
    """The pusher thread with rollouts `a` to `c` under way."""

    def __init__(self) -> None:
        self.threads = WorkThreads("engine 0")
        self.work = HeldWork(self.threads.lock, max_num_seqs=8, max_tokens=1e9)
        self.pushed = Pushed()
        self.queues = QueueThreads(self.threads, self.work, None, self.pushed, lambda _: None)  # type: ignore[arg-type]
        for prompt_id in "abc":
            self.work.begin_rollout(SimpleNamespace(prompt_id=prompt_id))  # type: ignore[arg-type]
        self.threads.start(self.queues.push_results)

    def finish(self, prompt_id: str) -> None:
        self.queues.hand_over(SimpleNamespace(prompt_id=prompt_id))  # type: ignore[arg-type]


@pytest.fixture
def pusher() -> Iterator[Pusher]:
    pusher = Pusher()
    yield pusher
    pusher.threads.stop()
    pusher.threads.join(5.0)


def comes_true(condition: Any, within_s: float = 5.0) -> bool:
    ends_at = time.monotonic() + within_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.002)
    return bool(condition())


def test_groups_that_finish_one_after_another_leave_together(pusher: Pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_threads, "GATHER_S", LONG_S)
    for prompt_id in "abc":
        pusher.finish(prompt_id)
        time.sleep(0.05)
    assert comes_true(lambda: pusher.pushed.calls)
    assert pusher.pushed.calls == [["a", "b", "c"]]


def test_a_group_does_not_wait_long_for_others(pusher: Pusher) -> None:
    pusher.finish("a")
    assert comes_true(lambda: pusher.pushed.calls == [["a"]])
    assert comes_true(lambda: pusher.work.prompt_ids == ["b", "c"])
