"""A Ray queue in this process."""

import queue
from typing import Any

from ray.util.queue import Empty, Full


class FakeQueue:
    """The part of `ray.util.queue.Queue` that controller and engines use, in this process."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: queue.Queue[Any] = queue.Queue(maxsize)

    def put(self, item: Any, timeout: float) -> None:
        try:
            self._items.put(item, timeout=timeout)
        except queue.Full:
            raise Full from None

    def get(self, timeout: float) -> Any:
        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            raise Empty from None

    def get_nowait(self) -> Any:
        return self.get(timeout=0)

    def qsize(self) -> int:
        return self._items.qsize()

    def empty(self) -> bool:
        return self._items.empty()
