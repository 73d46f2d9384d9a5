"""Calls from other threads that the engine thread runs between two steps."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from open_instruct.engines.vllm_engine import EngineCoreLost


class ControlCalls:
    """One thread owns the engine and steps it. Everybody else posts a command here, because a lock around each step would starve
    them.

    Args:
        engine_id: for messages.
        lock: notified when a command comes.
        timeout_s: how long a caller waits.
    """

    def __init__(self, engine_id: int, lock: threading.Condition, *, timeout_s: float) -> None:
        self.is_served = False
        """Whether a thread runs the commands. If none does, the caller runs its command itself."""
        self._engine_id = engine_id
        self._lock = lock
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[Callable[[], object], Future]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def run(self, command: Callable[[], Any]) -> Any:
        """Run `command` between two engine steps and return what it returns. Raises `TimeoutError` if it is not taken up."""
        if not self.is_served:
            return command()
        done: Future = Future()
        with self._lock:
            self._waiting.append((command, done))
            self._lock.notify_all()
        try:
            return done.result(timeout=self._timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"engine {self._engine_id}: the engine thread did not take up a control call for {self._timeout_s:g} s"
            ) from error

    def serve(self) -> None:
        """Run all that wait. Called by the engine thread. An error is the caller's, unless the engine itself is lost."""
        while self._waiting:
            command, done = self._waiting.popleft()
            try:
                done.set_result(command())
            except EngineCoreLost as error:
                done.set_exception(error)
                raise
            except Exception as error:
                done.set_exception(error)

    def close(self) -> None:
        """The engine thread ends: callers that wait get an error."""
        self.is_served = False
        while self._waiting:
            _, done = self._waiting.popleft()
            done.set_exception(RuntimeError(f"engine {self._engine_id} has stopped"))
