"""Items cross the queue's process unread, and waits and limits are those of Ray's queue."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from ray.util.queue import Empty, Full, Queue

from open_instruct.cluster.pickled_queue import PickledQueue


def made_anew(place: list[int]) -> "WhereUnpickled":
    return WhereUnpickled([*place, os.getpid()])


class WhereUnpickled:
    """Notes the process of every unpickling on its way."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def __reduce__(self) -> tuple:
        return made_anew, (self.pids,)


@pytest.fixture(scope="module")
def queue(ray_session: object) -> Iterator[PickledQueue]:
    del ray_session
    queue = PickledQueue(1, {"num_cpus": 0})
    yield queue
    queue.shutdown()


def test_items_come_out_as_they_went_in(queue: PickledQueue) -> None:
    queue.put({"tokens": [np.arange(5, dtype=np.int32)], "name": "a"}, timeout=30)
    item = queue.get(timeout=30)
    assert item["name"] == "a"
    assert item["tokens"][0].dtype == np.int32
    assert item["tokens"][0].tolist() == [0, 1, 2, 3, 4]


def test_the_queues_process_does_not_read_items(queue: PickledQueue) -> None:
    queue.put(WhereUnpickled([]), timeout=30)
    assert queue.get_nowait().pids == [os.getpid()]


def test_waits_and_limits_are_those_of_rays_queue(queue: PickledQueue) -> None:
    assert isinstance(queue, Queue)
    with pytest.raises(Empty):
        queue.get_nowait()
    with pytest.raises(Empty):
        queue.get(timeout=0.05)
    queue.put_nowait(1)
    with pytest.raises(Full):
        queue.put_nowait(2)
    with pytest.raises(Full):
        queue.put(2, timeout=0.05)
    assert (queue.qsize(), queue.get(timeout=30)) == (1, 1)
