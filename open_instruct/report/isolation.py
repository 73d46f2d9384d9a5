"""Keeps code that only watches a run from stopping the run."""

import contextlib
import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class Isolation(contextlib.AbstractContextManager[None]):
    """Swallows errors in its block, and logs a warning for the first error. For code that watches a run and must not stop it."""

    def __init__(self, subject: str):
        self.subject = subject
        self.failed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.failed:
            self.failed = True
            logger.warning("%s failed; the run goes on without it: %s: %s", self.subject, type(error).__name__, error)
        return True
