"""A limit on how many calls run at the same time, across event loops. asyncio's semaphore belongs to a single loop."""

import asyncio
import threading
from collections import deque


class CallLimit:
    """At most `capacity` blocks `async with limit:` run at once in this process. Others wait, first come, first served."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._lock = threading.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                was_given = turn not in self._waiting
                if not was_given:
                    self._waiting.remove(turn)
            if was_given:
                self._pass_on()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the call that has waited longest."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_give, turn)
                except RuntimeError:  # the event loop of the waiting call has been closed
                    continue
                return
            self._free += 1


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # the waiting call may have been cancelled meanwhile, and then passes the turn on
        turn.set_result(None)
