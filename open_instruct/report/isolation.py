"""Keeps what only watches a run from stopping it."""

import contextlib
import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class Isolation(contextlib.AbstractContextManager[None]):
    """Swallows what goes wrong inside it and warns of the first time; for what watches a run and may not stop it."""

    def __init__(self, what: str):
        self.what = what
        self.failed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.failed:
            self.failed = True
            logger.warning("%s failed; the run goes on without: %s: %s", self.what, type(error).__name__, error)
        return True
