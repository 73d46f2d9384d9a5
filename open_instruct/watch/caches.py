"""Keeps what was read from files until the files change."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
BUDGET_BYTES = 128 << 20
"""Bytes that a cache keeps."""
SMALL = 1 << 12
"""Bytes that a value counts whose size is not known."""


class FileCache:
    """Values made from files. A value is made again when the modification time or the size of its file has changed.

    Keeps the values that were used last, up to a number of bytes. Several threads may use it.
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[tuple[int, int] | None, int, Any]] = OrderedDict()
        self._num_bytes = 0

    def get(self, path: Path, kind: Hashable, make: Callable[[], T], size: Callable[[T], int] | None = None) -> T:
        """The value of this kind that is made from the file.

        Args:
            make: makes the value; also called for a file that is not there.
            size: bytes of the value.
        """
        key, stamp = (path, kind), stamp_of(path)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0] == stamp:
                self._entries.move_to_end(key)
                return entry[2]
        value = make()
        num_bytes = SMALL if size is None else size(value)
        with self._lock:
            self._num_bytes += num_bytes - self._entries.pop(key, (None, 0, None))[1]
            self._entries[key] = (stamp, num_bytes, value)
            while self._num_bytes > self._budget_bytes and len(self._entries) > 1:
                self._num_bytes -= self._entries.popitem(last=False)[1][1]
        return value


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Modification time in ns and size in bytes; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
