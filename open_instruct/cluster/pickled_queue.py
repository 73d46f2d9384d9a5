"""A Ray queue whose items pass through the queue's process as bytes.

    put ─ pickle ─► bytes ─► the queue's process, which reads nothing ─► bytes ─ unpickle ─► get

`ray.util.queue.Queue` unpickles each item in its process and pickles it again, and Ray keeps each array of an item as a separate
buffer. For results, which have three small arrays for each response, that takes twice as long.
"""

import pickle
from typing import Any

from ray.util.queue import Queue


class PickledQueue(Queue):
    """`put`, `get` and their callers (`put_nowait`, `get_nowait`) work as in Ray's queue. Items must be of importable classes."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL), block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return pickle.loads(super().get(block, timeout))
