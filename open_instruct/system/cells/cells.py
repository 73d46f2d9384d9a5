"""The owner's side of cells (`fork_server.py`): starts the fork server, orders cells, asks, watches and kills them."""

import asyncio
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from open_instruct.system.cells.fork_server import CellKind
from open_instruct.system.cells.framing import BadMessage, Frames, framed, receive_async, unpacked
from open_instruct.system.processes import is_stopped

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 120.0
"""Longest time that a fork server may take to start and load its code, or to answer."""
POLL_S = 0.5
SEND_S = 5
"""Longest wait, in whole seconds, for the fork server to read a message. A socket holds some 200 KB."""
STOPPED_S = 3.0
"""A fork server that is stopped (SIGSTOP, a frozen container) for this long while a thread waits for it is replaced."""
END_S = 5.0
"""Longest time that a fork server may take to end its cells before it is killed."""
MOST_ANSWER_BYTES = 2**22
"""Of an answer of the fork server."""
_FORK_SERVER = "import sys; from open_instruct.system.cells.fork_server import keep; keep(int(sys.argv[1]))"


class UnavailableError(Exception):
    """The fork server cannot provide a cell; the message says why."""


class CellEnded(Exception):
    """A cell has ended, or has answered what is no answer; the message says which."""


class Cell:
    """The owner's handle on one forked process."""

    def __init__(self, process: int, pid: int, connection: socket.socket, *, leads_group: bool = False) -> None:
        self._process = process
        """File descriptor (pidfd) of the process. Unlike a process id, it never comes to mean another process."""
        self.pid = pid
        self.connection = connection
        self._leads_group = leads_group
        self.is_killed = False

    def is_alive(self) -> bool:
        if self.is_killed:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    async def ask(self, message: bytes, deadline_s: float | None = None, *, most_bytes: int) -> dict[str, Any]:
        """The answer to a message that has its length in front.

        Any failure ends the cell, because its state is then unknown. So does the end of the caller, because an answer may still
        come, which the next request must not read.

        Raises:
            TimeoutError: no answer came in time.
            CellEnded: the cell has ended, or has sent what is no answer.
        """
        loop = asyncio.get_running_loop()
        if self.is_killed:
            raise CellEnded("its process has ended")
        try:
            async with asyncio.timeout(deadline_s):
                await loop.sock_sendall(self.connection, message)
                return unpacked(await receive_async(lambda size: loop.sock_recv(self.connection, size), most_bytes))
        except TimeoutError:
            self.kill()
            raise
        except (OSError, BadMessage, EOFError) as error:
            self.kill()
            raise CellEnded("its process ended" if isinstance(error, ConnectionError) else str(error)) from error
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the process, and its group if it leads one. May be called twice."""
        if self.is_killed:
            return
        self.is_killed = True
        with suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                signal.pidfd_send_signal(self._process, 0)  # the number still means this process
                os.killpg(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        os.close(self._process)
        self.connection.close()


class Cells:
    """Forks cells of one kind, which the caller kills. A fork server that fails is started again.

    Args:
        variables: the environment of the fork server and its cells, without the paths that Python imports from.
        attempts: how often a cell is tried.
    """

    def __init__(self, kind: CellKind, variables: Mapping[str, str], *, attempts: int = 2) -> None:
        self._kind = kind
        self._variables = dict(variables)
        self._attempts = attempts
        self._asking = threading.Lock()
        """Held by the thread that speaks to the fork server or replaces it."""
        self._changing = threading.Lock()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="cells")
        self._fork_server = _ForkServer(kind, self._variables)

    def report(self) -> Mapping[str, Any]:
        """What the fork server says of what it has loaded. Waits until it has. Raises as `fork`."""
        return self._tried(lambda fork_server: fork_server.wait_until_ready())

    def fork(self, order: object = None) -> Cell:
        """A new cell. Any thread may call this.

        Raises:
            UnavailableError: no cell can be forked.
            RuntimeError: the cells are closed.
        """
        return self._tried(lambda fork_server: fork_server.fork(order))

    async def fork_async(self, order: object = None) -> Cell:
        """As `fork`, for an event loop. The cell's socket does not block."""
        future = self._threads.submit(self.fork, order)
        try:
            cell = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_kill_cell)
            raise
        cell.connection.setblocking(False)
        return cell

    def close(self) -> None:
        """End the fork server, and with it its cells. May be called twice, and from any thread."""
        with self._changing:
            self._is_closed = True
            self._fork_server.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tried(self, work: "Callable[[_ForkServer], T]") -> T:
        with self._asking:
            for attempt in range(1, self._attempts + 1):
                try:
                    return work(self._fork_server)
                except UnavailableError as error:
                    if attempt == self._attempts:
                        raise
                    logger.warning("the process that forks %s failed and is started again: %s", self._kind.name, error)
                    self._replace()
        raise AssertionError("the last attempt returns or raises")

    def _replace(self) -> None:
        with self._changing:
            self._fork_server.end()
            if self._is_closed:
                raise RuntimeError(f"the {self._kind.name} are closed")
            self._fork_server = _ForkServer(self._kind, self._variables)


def _kill_cell(future: "Future[Cell]") -> None:
    """Kill a cell that nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().kill()


class _ForkServer:
    """The owner's handle on a fork server. It starts at once; the first order waits until it is ready."""

    def __init__(self, kind: CellKind, variables: Mapping[str, str]) -> None:
        self._is_jailed = kind.jail is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._report: Mapping[str, Any] | None = None
        self._problem = ""
        """Why no process could be started."""
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # in a notebook the first one is empty
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _FORK_SERVER, str(theirs.fileno()), type(kind).__module__],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # some libraries print on import
                    env={**variables, "PYTHONPATH": paths},
                )
        except OSError as error:  # no memory, or too many processes or files
            self._problem = f"{type(error).__name__}: {error}"
            return
        with suppress(OSError):  # the process ended at once; the first order reports it
            self._socket.sendall(framed(pickle.dumps(kind)))

    def wait_until_ready(self) -> Mapping[str, Any]:
        """The report of `CellKind.load`. Raises `UnavailableError`."""
        if self._report is not None:
            return self._report
        try:
            if self._problem:
                raise UnavailableError(self._problem)
            answer, _ = self._answer()
            if "error" in answer:
                raise UnavailableError(answer["error"])
        except UnavailableError as error:
            raise UnavailableError(f"no process could be started: {error}") from error
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._report = report = answer["report"]
        return report

    def fork(self, order: object) -> Cell:
        self.wait_until_ready()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise UnavailableError(f"no connection to a cell ({error})") from error
        try:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
                self._socket.sendall(framed(pickle.dumps(order)))
            answer, (process,) = self._answer()
            return Cell(process, answer["pid"], ours, leads_group=not self._is_jailed)
        except OSError as error:
            ours.close()
            raise UnavailableError(f"the process that forks cells has ended ({error})") from error
        except BaseException:
            ours.close()
            raise

    def end(self) -> None:
        """End the fork server, its cells, and all that these have started."""
        if self._process is None:
            return
        if self._report is None or self._is_jailed:
            self._process.kill()  # the kernel then kills its cells, if there are any
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for _ in range(2):
            with suppress(subprocess.TimeoutExpired):  # a busy kernel ends the process later
                self._process.wait(END_S)
                return
            self._process.kill()

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        """The next answer, and the file descriptors that came with it."""
        frames, descriptors = Frames(MOST_ANSWER_BYTES), []
        try:
            while True:
                self._wait_for_answer()
                part, received, *_ = socket.recv_fds(self._socket, frames.missing, 1)
                descriptors += received
                for content in frames.add(part):
                    return unpacked(content), descriptors
        except (psutil.Error, EOFError, OSError) as error:
            raise UnavailableError("it ended; its standard error says why") from error

    def _wait_for_answer(self) -> None:
        assert self._process is not None
        deadline, stopped_since = time.monotonic() + START_S, None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not poll.poll(1000 * POLL_S):
            now = time.monotonic()
            if now > deadline:
                raise UnavailableError(f"no sign of life for {START_S:g} s")
            stopped_since = (stopped_since or now) if is_stopped(psutil.Process(self._process.pid)) else None
            if stopped_since is not None and now - stopped_since > STOPPED_S:
                raise UnavailableError(f"it has been stopped for {STOPPED_S:g} s")
