"""Decides in one place what an engine may do now, from everything that can hold it back.

            admits requests   steps   left by
serving     yes               yes     sleep, an update, `drain`, `stop`
asleep      yes, and wakes    -       a request; asleep on request, or without weights: `wake_up`, an update
draining    no                yes     `open`, or its time limit
updating    no                no      the end of the update
stopped     no                no      -

With `--inflight_updates` and the transport `ray_object` the engine generates as in `serving` while an update collects weights.
"""

import threading
import time

from open_instruct.engines.engine_sleep import EngineSleep
from open_instruct.engines.weight_receiver import WeightReceiver


class EngineState:
    """The state of one engine actor, from its sleep, its weight updates, its drain (which is kept here) and `stopping`."""

    def __init__(self, sleep: EngineSleep, receiver: WeightReceiver, stopping: threading.Event) -> None:
        self._sleep = sleep
        self._receiver = receiver
        self._stopping = stopping
        self._drains_until = 0.0
        """Monotonic time until which no request is admitted; 0 while the engine is open."""

    @property
    def name(self) -> str:
        """`stopped`, `updating`, `draining`, `asleep` or `serving`: the first of these states that holds."""
        if self._stopping.is_set():
            return "stopped"
        if self._receiver.is_under_way or self._receiver.is_paused:
            return "updating"
        if self._drains_until:
            return "draining"
        return "asleep" if self._sleep.is_asleep else "serving"

    @property
    def may_step(self) -> bool:
        """No engine is stepped while its weights change."""
        return not self._receiver.is_paused

    @property
    def may_admit(self) -> bool:
        return self.may_step and time.monotonic() >= self._drains_until and self._sleep.may_admit

    @property
    def may_fall_asleep(self) -> bool:
        """No engine falls asleep between the begin of an update and its end, because sleep releases the memory of the weights."""
        return not self._receiver.is_under_way

    @property
    def shall_generate(self) -> bool:
        """Whether an engine that has requests must make steps. If it then makes none, the engine is faulty."""
        return self._sleep.may_admit and not self._receiver.is_under_way

    def drain(self, timeout_s: float) -> None:
        """Admit no request until `open`, at most for `timeout_s`."""
        self._drains_until = time.monotonic() + timeout_s

    def open(self) -> None:
        self._drains_until = 0.0
