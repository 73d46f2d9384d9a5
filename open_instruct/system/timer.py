"""Wall time of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Wall time by phase: `with timer("phase"): …`, then `take()` for the seconds since the last call."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": value for phase, value in seconds.items()}
