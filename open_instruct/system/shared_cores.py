"""Cores that learners and engines of one machine share while they compute at the same time, on CPU.

A process that computes takes as many threads as there are cores, divided by the processes that compute now. Example: on 2 cores
an engine and a learner have one thread each, and the learner has both cores while the engine waits for weights. All of them have
one small file mapped, in which each says in a byte of its own whether it computes.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from open_instruct.device import num_cores

FILE_NAME = "cores"
"""Of the file, among the files of a run."""
NUM_PLACES = 256
"""Bytes of the file. Processes whose numbers are this far apart share a byte."""


@dataclass(frozen=True)
class CorePlace:
    """Which of the run's processes this process is, for `SharedCores`: learners first, then engines."""

    number: int = 0
    num_workers: int = 1
    """Processes that compute where this process says so; more than one where an engine has workers of its own."""


ALONE = CorePlace()


class SharedCores:
    """One process's share of the cores of its machine. The thread that computes calls it.

    Without `file` nothing is shared, and the threads stay as they are.
    """

    def __init__(self, file: Path | None = None, place: CorePlace = ALONE) -> None:
        self._byte, self._num_workers = place.number % NUM_PLACES, place.num_workers
        self._num_cores = num_cores()
        self._computing: mmap.mmap | None = None
        """Of each place, the number of workers that compute."""
        if file is not None:
            self._computing = _mapped(file)
            self.rest()  # a process that died here before can have left its byte

    def compute(self) -> None:
        """This process computes from now on, with its share of the cores. Call it again before each piece of work, because the
        share changes."""
        if self._computing is None:
            return
        self._computing[self._byte] = self._num_workers
        import torch

        share = max(self._num_cores // sum(self._computing[:]), 1)
        if share != torch.get_num_threads():  # of the calling thread
            torch.set_num_threads(share)

    def rest(self) -> None:
        """This process computes nothing until the next `compute`, so the others have its cores."""
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
    """The file, which is made if it is new: then all its bytes are 0."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, NUM_PLACES)
        return mmap.mmap(descriptor, NUM_PLACES)
    finally:
        os.close(descriptor)
