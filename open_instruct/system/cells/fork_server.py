"""The fork server, a process that loads code once, and the cells that it forks.

    owner ── a kind, then orders, each with a socket ──► fork server: loads; never sees what a model wrote ── forks ──► cell
      └──────────────────── messages over that socket (`framing.py`), which the cell serves ──────────────────────────────┘

What the owner sends to the fork server is pickled; nothing that comes back is. A cell holds its socket and nothing else. Cells of
a kind with a jail go into the jail before they serve, and can start no process. Other cells are killed with everything that they
have started (`reaper.py`). `cells.py` is the owner's side.
"""

import fcntl
import gc
import os
import pickle
import resource
import select
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from open_instruct.system.cells.framing import packed, receive, send
from open_instruct.system.cells.reaper import Reaper, become_subreaper, die_with_parent, end_children, reap
from open_instruct.system.sandbox import Jail, be_killed_first, confine_calls, confine_files, python_files

CHANNEL = 3
"""File descriptor of a cell's socket."""
MOST_DESCRIPTORS = 2**16
LONGEST_ERROR = 500


class CellKind(ABC):
    """What a cell is for. It is passed to the fork server by pickle, as is every order.

    `load`, `prepare` and `serve` run in other processes than the one that made the kind.
    """

    name: str
    """In the plural, for messages."""
    jail: Jail | None = None
    """Where cells are shut in. `readable` is made by the fork server."""

    @abstractmethod
    def load(self) -> Mapping[str, Any]:
        """Load what all cells share. Runs once, in the fork server. Returns what the owner must know, as JSON."""

    def read_modules(self) -> Sequence[str]:
        """Loaded modules whose files a cell in a jail may read."""
        return ["open_instruct"]

    def prepare(self, order: Any) -> bool:
        """Load what cells for this order share. Runs in the fork server, before the fork. Returns whether so much was loaded that
        the memory must be tidied up."""
        return False

    def settle(self) -> None:  # noqa: B027 - most kinds have nothing to settle
        """Runs in a cell before it goes into its jail."""

    @abstractmethod
    def serve(self) -> None:
        """Serve the owner's messages over `CHANNEL` until it closes. Runs in a cell. May end by any error."""


def keep(descriptor: int) -> None:
    """Run the fork server: fork a cell for every order, until the owner closes the socket or ends."""
    # Ctrl-C and a job queue's SIGTERM reach the whole process group, but only the owner decides when the fork server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    silent = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    with suppress(EOFError, OSError):
        kind: CellKind = pickle.loads(receive(descriptor))
        children = _JailedChildren() if kind.jail is not None else Reaper()
        try:
            try:
                report = kind.load()
            except Exception as error:  # code of a user may raise anything
                send(descriptor, packed({"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}))
                return
            _be_ready(kind, children)
            send(descriptor, packed({"report": report}))
            _fork_for_ever(socket.socket(fileno=descriptor), kind, children, silent)
        finally:
            if kind.jail is None:
                end_children()


class _JailedChildren:
    """Cells that can start no process. The kernel kills them with the fork server."""

    def forked(self, cell: int) -> None:
        """Nothing to note."""

    def have_loaded(self) -> None:
        """Nothing to note."""

    def clear_up(self) -> None:
        reap()


def _be_ready(kind: CellKind, children: "Reaper | _JailedChildren") -> None:
    if kind.jail is not None:
        be_killed_first()
        confine_files(replace(kind.jail, readable=python_files(kind.read_modules())))
    _tidy_up(children)


def _tidy_up(children: "Reaper | _JailedChildren") -> None:
    children.have_loaded()
    gc.collect()
    gc.freeze()  # a garbage collection would copy the pages that the cells share


def _fork_for_ever(listening: socket.socket, kind: CellKind, children: "Reaper | _JailedChildren", silent: int) -> None:
    fork_server = os.getpid()
    waking, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    while True:
        _tell_of_children(telling)
        children.clear_up()
        ready, _, _ = select.select([listening, waking], [], [])
        if waking in ready:
            os.read(waking, 2**12)
        if listening not in ready:
            continue
        _, descriptors, *_ = socket.recv_fds(listening, 1, 1)
        if not descriptors:
            return
        if kind.prepare(pickle.loads(receive(listening.fileno()))):
            _tidy_up(children)
        if cell := os.fork():
            children.forked(cell)
            process = os.pidfd_open(cell)  # unlike the number, it never comes to mean another process
            socket.send_fds(listening, [packed({"pid": cell})], [process])
            os.close(process)
            os.close(descriptors[0])
        else:
            become_cell(kind, descriptors[0], fork_server=fork_server, silent=silent)


def _tell_of_children(descriptor: int) -> None:
    """Have a byte written to the descriptor whenever a child ends. Called before every wait, because code that was loaded since
    the last wait may have installed signal handlers of its own."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


def become_cell(kind: CellKind, connection: int, *, fork_server: int, silent: int) -> None:
    """Make this process, which was just forked, a cell. Its input is empty, and what it prints is discarded."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if kind.jail is None:
            os.setsid()
            become_subreaper()
            with suppress(OSError):
                be_killed_first()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(fork_server)
        hold_only([silent, silent, silent, connection])
        kind.settle()
        if kind.jail is not None:
            confine_calls(kind.jail)
        kind.serve()
    finally:
        os._exit(0)


def hold_only(descriptors: Sequence[int]) -> None:
    """Give these file descriptors the numbers from 0 on, and close all others. From 3 on, programs do not inherit them."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 2 * len(descriptors)) for descriptor in descriptors]
    for number, copy in enumerate(copies):
        os.dup2(copy, number, inheritable=number < CHANNEL)
    os.closerange(len(copies), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_DESCRIPTORS))
