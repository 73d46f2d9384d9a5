"""Holds the warnings of an actor until the driver fetches them for the user's log. Pure.

Ray writes an actor's log to a file in Ray's session directory, and that directory ends with the run. So an actor holds
its warnings, and the driver fetches them about every second while it waits, and together with the actor's statistics.
"""

import logging
from collections import deque

MAX_HELD = 20
"""Only the newest warnings are held, at most this many, so that memory is bounded when the driver does not fetch them."""


class HeldWarnings(logging.StreamHandler):
    """Writes warnings of this package to stderr, as usual, and also holds the warnings until `take` is called. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._held: deque[str] = deque(maxlen=MAX_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self._held.append(record.getMessage())

    def take(self) -> list[str]:
        """The warnings since the last call, oldest first."""
        with self.lock:  # type: ignore[union-attr]
            warnings = list(self._held)
            self._held.clear()
            return warnings

    def install(self) -> None:
        logging.getLogger("open_instruct").addHandler(self)

    def remove(self) -> None:
        logging.getLogger("open_instruct").removeHandler(self)
