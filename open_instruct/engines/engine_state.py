"""What an engine may do now: one answer from all that can hold it back.

            admits requests   steps   left by
serving     yes               yes     sleep, an update, `drain`, `stop`
asleep      yes, and wakes    -       a request; told to sleep, or without weights: `wake_up`, an update
draining    no                yes     `open`, or its time limit
updating    no                no      the end of the update
stopped     no                no      -

With `--inflight_updates` and the transport `ray_object` an update collects weights while the engine goes on as if it served.
"""

import threading
import time

from open_instruct.engines.engine_sleep import EngineSleep
from open_instruct.engines.weight_receiver import WeightReceiver


class EngineState:
    """The state of one engine actor. `sleep` and `receiver` say what they do; draining and stopping are held here."""

    def __init__(self, sleep: EngineSleep, receiver: WeightReceiver, stopping: threading.Event) -> None:
        self._sleep = sleep
        self._receiver = receiver
        self._stopping = stopping
        self._drains_until = 0.0
        """Monotonic time until which no request is admitted; 0 while the engine is open."""

    @property
    def name(self) -> str:
        """`stopped`, `updating`, `draining`, `asleep` or `serving`: the first that holds."""
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
    def shall_generate(self) -> bool:
        """Whether an engine that has requests and takes no step has a fault."""
        return self._sleep.may_admit and not self._receiver.is_under_way

    def drain(self, timeout_s: float) -> None:
        """Admit no request until `open`, at most for `timeout_s`."""
        self._drains_until = time.monotonic() + timeout_s

    def open(self) -> None:
        self._drains_until = 0.0
