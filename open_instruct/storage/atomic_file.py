"""Replaces files as a whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from open_instruct.storage.checkpoints import sync_to_disk


def write_atomically(path: str | Path, content: bytes) -> None:
    """Replace the file `path` as a whole, so that every reader finds the old or the new content, even after a kill."""
    with _replaced(Path(path)) as file:
        file.write(content)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `path` when the block ends without an error. Its content is on the disk before it gets the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_to_disk([path.parent])
