"""Says now and then which parts of a run are being loaded, because loading may take minutes."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from open_instruct.report.live_line import format_duration

logger = logging.getLogger(__name__)

EVERY_S = 15.0
"""Seconds between two lines."""


class LoadingReport(AbstractContextManager["LoadingReport"]):
    """In its block, logs a line every `every_s` seconds with the parts that are not loaded yet. A thread does it, because
    one call may load a part as a whole (`ray.init`)."""

    def __init__(self, *parts: str, every_s: float = EVERY_S) -> None:
        self.parts: Sequence[str] = parts
        """Names of the parts that are not loaded yet. The block replaces them."""
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="loading report", daemon=True)

    def _tell(self) -> None:
        began_at = time.monotonic()
        while not self._ended.wait(self._every_s):
            logger.info("loading for %s: %s", format_duration(time.monotonic() - began_at), " and ".join(self.parts))

    def __enter__(self) -> "LoadingReport":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
