"""Calls from other threads that the engine thread runs between two steps."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from open_instruct.engines.vllm_engine import EngineCoreLost
from open_instruct.system.short_lived_thread import run_in_short_lived_thread


class ControlCalls:
    """One thread owns the engine and steps it. Other threads post commands here, because a lock around each step would starve
    them.

    Args:
        engine_id: for messages.
        lock: notified when a command is posted.
        timeout_s: how long a caller waits.
    """

    def __init__(self, engine_id: int, lock: threading.Condition, *, timeout_s: float) -> None:
        self.is_served = False
        """Whether a thread runs the commands. If none does, each command gets a thread of its own."""
        self._engine_id = engine_id
        self._lock = lock
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[Callable[[], object], Future]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def run(self, command: Callable[[], Any]) -> Any:
        """Run `command` between two engine steps and return what it returns.

        Raises `TimeoutError` if the engine thread does not begin the command in time (the command then never runs), or does not
        finish it in time.
        """
        reply: Future = Future()
        with self._lock:
            is_served = self.is_served
            if is_served:
                self._waiting.append((command, reply))
                self._lock.notify_all()
        if not is_served:
            return run_in_short_lived_thread(command)
        try:
            return reply.result(timeout=self._timeout_s)
        except TimeoutError as error:
            if reply.done():
                raise  # the command itself raised it
            did_not = "take up" if reply.cancel() else "finish"
            raise TimeoutError(
                f"engine {self._engine_id}: the engine thread did not {did_not} a control call for {self._timeout_s:g} s"
            ) from error

    def serve(self) -> None:
        """Run all waiting commands; called by the engine thread. The command's caller gets its error. `EngineCoreLost` is also
        raised here, because it means that the engine itself is lost."""
        while self._waiting:
            command, reply = self._waiting.popleft()
            if not reply.set_running_or_notify_cancel():
                continue  # its caller has given up
            try:
                reply.set_result(command())
            except EngineCoreLost as error:
                reply.set_exception(error)
                raise
            except Exception as error:
                reply.set_exception(error)

    def close(self) -> None:
        """The engine thread ends. Callers that still wait get `EngineCoreLost`, because this engine can only be replaced."""
        with self._lock:
            self.is_served = False
            self._lock.notify_all()
            while self._waiting:
                _, reply = self._waiting.popleft()
                if reply.set_running_or_notify_cancel():
                    reply.set_exception(EngineCoreLost(f"engine {self._engine_id} has stopped"))
