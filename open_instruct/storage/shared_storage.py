"""Whether the nodes of the learners and that of the driver share the directories of a run, found out before anything is trained.

    driver writes `.probe-<random>` into the directory ─► learner's node sees it, writes an answer beside it ─► driver sees that

On disks of their own the learners' shards of a checkpoint would lie on several nodes, and no run could go on from them.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from open_instruct.storage.checkpoints import POLL_S, StorageNotShared, sync_to_disk

SEEN_S = 10.0
"""How long a file that another node has written may take to be seen."""


@contextmanager
def probe(directory: Path) -> Iterator[Path]:
    """A small file in the directory, whose name nobody can know who does not see it; gone afterwards, with the answers."""
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
    """On another node: whether the probe at `path` is there; if so, an answer is written beside it."""
    if not _is_seen(Path(path)):
        return False
    _answer_of(Path(path), node).touch()
    return True


def judge(path: Path, answers: dict[str, bool]) -> None:
    """`answers`: what `answer` returned, by node. Raises `StorageNotShared` that names the nodes with disks of their own."""
    apart = [node for node, saw in answers.items() if not (saw and _is_seen(_answer_of(path, node)))]
    if apart:
        raise StorageNotShared(
            f"{path.parent} on the driver's node is another directory than on {', '.join(apart)}, where learners are to write "
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
