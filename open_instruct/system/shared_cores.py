"""Divides the cores of one machine among the learners and engines that compute at the same time, on CPU.

The number of threads of a process that computes is the number of cores divided by the number of processes that compute now.
Example: on 2 cores an engine and a learner have one thread each, and the learner has both cores while the engine waits for
weights. All processes map the same small file, and each process writes in its own byte of the file whether it computes.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from open_instruct.device import num_cores

FILE_NAME = "cores"
"""Name of the file among the files of a run."""
NUM_PLACES = 256
"""Size of the file in bytes. Processes whose numbers differ by this share a byte."""


@dataclass(frozen=True)
class CorePlace:
    """Position of this process among the run's processes, for `SharedCores`: learners first, then engines."""

    number: int = 0
    num_workers: int = 1
    """Number of processes that compute when this process computes; more than 1 if an engine has workers of its own."""


ALONE = CorePlace()


class SharedCores:
    """One process's share of the cores of its machine. Only the thread that computes calls it.

    Without `file` no cores are shared, and the number of threads does not change.
    """

    def __init__(self, file: Path | None = None, place: CorePlace = ALONE) -> None:
        self._byte, self._num_workers = place.number % NUM_PLACES, place.num_workers
        self._num_cores = num_cores()
        self._computing: mmap.mmap | None = None
        """Number of workers that compute, for each place."""
        if file is not None:
            self._computing = _mapped(file)
            self.rest()  # an earlier process at this place may have died without resetting the byte

    def compute(self) -> None:
        """From now on this process computes, with its share of the cores. Call it again before each piece of work, because the
        share changes."""
        if self._computing is None:
            return
        self._computing[self._byte] = self._num_workers
        import torch

        share = max(self._num_cores // sum(self._computing[:]), 1)
        if share != torch.get_num_threads():  # the setting of the calling thread
            torch.set_num_threads(share)

    def rest(self) -> None:
        """This process computes nothing until the next `compute`, so the other processes get its cores."""
        if self._computing is not None:
            self._computing[self._byte] = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """`compute` at the beginning of the block, `rest` at its end."""
        self.compute()
        try:
            yield
        finally:
            self.rest()


def _mapped(file: Path) -> mmap.mmap:
    """The file, mapped. A new file is created with all bytes 0."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, NUM_PLACES)
        return mmap.mmap(descriptor, NUM_PLACES)
    finally:
        os.close(descriptor)
