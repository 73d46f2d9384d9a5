"""Background threads of one actor. They share a lock, an error in any of them ends the run, and they end together."""

import threading
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.5
"""Longest wait of a background thread before it checks whether it should stop."""


class ThreadFailed(RuntimeError):
    """A thread of an actor has failed. The text names the actor and the error."""


class WorkThreads:
    """The threads, and the lock that guards their shared data. `owner` is the name of the actor in messages.

    `raise_error` raises the error of a thread in its caller, which need not watch the threads.
    """

    def __init__(self, owner: str) -> None:
        self.lock = threading.Condition()
        """Notified after every event for which a thread or a caller may wait."""
        self.stopping = threading.Event()
        self._owner = owner
        self._error: BaseException | None = None
        self._running: list[threading.Thread] = []

    @property
    def has_started(self) -> bool:
        return bool(self._running)

    def start(self, *works: Callable[[], None]) -> None:
        """Run each function of `works` in a thread that has the function's name."""
        for work in works:
            thread = threading.Thread(target=self._guard, args=(work,), name=work.__name__, daemon=True)
            thread.start()
            self._running.append(thread)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if not self.stopping.is_set():
                self.fail(error)
                raise

    def fail(self, error: BaseException) -> None:
        """The next `raise_error` raises `error`."""
        with self.lock:
            self._error = error
            self.lock.notify_all()

    def raise_error(self) -> None:
        """Raises `ThreadFailed` if a thread has failed."""
        if self._error is not None:
            text = ", ".join([f"{type(self._error).__name__}: {self._error}", *getattr(self._error, "__notes__", [])])
            raise ThreadFailed(f"{self._owner} failed: {text}") from self._error

    def wait_for(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait until `condition` is true. Returns whether it was within `timeout_s` seconds. Raises `ThreadFailed` if a thread
        fails before."""
        with self.lock:
            came_true = self.lock.wait_for(lambda: self._error is not None or condition(), timeout_s)
            self.raise_error()
            return bool(came_true)

    def stop(self) -> None:
        """Tell every thread to end. `join` waits for them."""
        self.stopping.set()
        with self.lock:
            self.lock.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, all together at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._running:
            thread.join(timeout=max(deadline - time.monotonic(), 0))
