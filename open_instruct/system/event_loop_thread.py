"""An event loop in a separate thread, for calls that wait for servers and processes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
CLOSE_S = 5.0
"""Seconds that calls may take to end after `close`."""


class EventLoopThread:
    """An event loop in a thread, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """A future for the result of the coroutine that `call` returns. Raises `RuntimeError` after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Cancel all calls, await `last`, and end the thread. Takes at most about 10 s, whatever a call does."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end(last), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)
        if not thread.is_alive():
            loop.close()


async def _end(last: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await last()
