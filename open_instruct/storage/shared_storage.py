"""Checks, before anything is trained, whether the nodes of the learners and the driver's node share the directories of a run.

    driver writes `.probe-<random>` into the directory ─► learner's node sees it, writes an answer next to it ─► driver sees that

If each node wrote to its own disk, the learners' shards of a checkpoint would be on several nodes, and no run could resume from
them.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from open_instruct.storage.checkpoints import POLL_S, StorageNotShared, sync_to_disk

SEEN_S = 10.0
"""How long a file from another node may take to be visible."""


@contextmanager
def probe(directory: Path) -> Iterator[Path]:
    """A small file in the directory, with a random name, so that another node finds the file only if it shares the directory. The
    end of the block removes the file and the answers."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".probe-{uuid.uuid4().hex}"
    path.touch()
    sync_to_disk([path, directory])
    try:
        yield path
    finally:
        for file in directory.glob(f"{path.name}*"):
            file.unlink(missing_ok=True)


def answer(path: str, node: str) -> bool:
    """Called on another node: whether that node sees the probe at `path`. If so, it writes an answer next to the probe."""
    if not _is_seen(Path(path)):
        return False
    _answer_of(Path(path), node).touch()
    return True


def judge(path: Path, answers: dict[str, bool]) -> None:
    """Raises a `StorageNotShared` that names the nodes that do not share the directory. `answers` are the results of `answer` by
    node."""
    apart = [node for node, result in answers.items() if not (result and _is_seen(_answer_of(path, node)))]
    if apart:
        raise StorageNotShared(
            f"{path.parent} on the driver's node is not the same directory as on {', '.join(apart)}, where learners write "
            f"checkpoints and models. Give a directory on storage that all nodes share."
        )


def _answer_of(path: Path, node: str) -> Path:
    return path.with_name(f"{path.name}.{node}")


def _is_seen(path: Path) -> bool:
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
