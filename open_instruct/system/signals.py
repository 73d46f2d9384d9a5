"""Remembers SIGTERM and SIGINT, so that the step loop can check for them wherever it can end."""

import signal
from types import FrameType
from typing import Any

from open_instruct.system.interruption import Interrupted


class Signals:
    """Remembers the first SIGTERM or SIGINT. A second signal ends the process in the usual way."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.is_told = False
        """Whether the signal has been logged or raised already."""
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)

    def raise_if_received(self) -> None:
        if self.received is not None:
            self.is_told = True
            raise Interrupted(self.received)
