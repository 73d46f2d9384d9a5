"""The parent's side of the fork server and the scorers (`fork_server.py`): starts, asks, watches and kills them."""

import json
import logging
import math
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from open_instruct.scored_groups import Reading
from open_instruct.system.cells.framing import Frames, framed
from open_instruct.system.processes import is_stopped
from open_instruct.system.sandbox import (
    environment,
)
from open_instruct.verifiers.fork_server import MAX_FAILURE, MAX_READING, MAX_REPLY_BYTES, ForkServerStart

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest time that the fork server may take to start and load its verifiers, or to answer."""
POLL_S = 0.5
AHEAD_BYTES = 2**16
"""Most bytes of several responses that are sent to a scorer at once. A socket holds more, so sending never waits."""
SECRET_DIGITS = 16
SEND_S = 5
"""Longest wait, in whole seconds, for the fork server to read a message. A socket holds some 200 KB."""
STOPPED_S = 3.0
"""A fork server that is stopped (SIGSTOP, a frozen container) for this long while a thread waits for it is replaced."""


@dataclass(frozen=True)
class Scored:
    """The score of one response."""

    score: float | None
    """In [0, 1]; None (not scored) if the verifier gave none."""
    failure: str | None = None
    """Why there is no score: `timeout`, `crash`, `unavailable: <why>` or `error: <exception>`."""
    cost: float = 0.0
    """US dollars, as reported by the verifier."""
    reading: Reading = field(default_factory=Reading, compare=False)
    """What the verifier says of the response, for people."""


class UnavailableError(Exception):
    """The fork server cannot provide a scorer; the message says why."""


class RefusedError(UnavailableError):
    """No fork server can provide a scorer, because the verifier of these rows cannot be loaded."""


def raise_if_refused(job: "ScoringJob", refusals: Mapping[str, str]) -> None:
    """Raises `RefusedError` for a row of a refused verifier. An idle scorer must not score it either, because the verifier may
    refuse this machine."""
    if job.dataset in refusals:
        raise RefusedError(refusals[job.dataset])


@dataclass(frozen=True)
class ScoringJob:
    """The responses to one row."""

    dataset: str
    ground_truth: object
    token_ids: list[list[int]]
    texts: list[str]
    queries: Sequence[str | None]
    """For each response, the prompt as a verifier gets it."""


@dataclass(eq=False)
class Scorer:
    """The parent's handle on one forked process."""

    process: int
    """File descriptor (pidfd) of the process. Unlike a process id, it never comes to mean another process."""
    socket: socket.socket
    queue: deque[tuple[int, str]] = field(default_factory=deque)
    """The responses that were sent and have no reply yet, in order: number within the group, and the secret with which the reply
    must begin. Each response has a new secret, so anything that a response writes cannot pass for the reply to the next one."""
    since: float = 0.0
    """Time (monotonic) from which the scorer could score the first response in `queue`."""
    is_slow: bool = False
    num_groups: int = 0
    """Groups scored so far."""
    _replies: Frames = field(default_factory=partial(Frames, MAX_REPLY_BYTES))

    @property
    def number(self) -> int | None:
        """Number within the group of the response that is being scored; None if the scorer is idle."""
        return self.queue[0][0] if self.queue else None

    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return not poll.poll(0)

    def send(self, numbers: deque[int], job: ScoringJob, *, limit: int) -> None:
        """Send an idle scorer the first waiting response, and as many further responses as fit, so that the two processes need
        not wake each other for every response."""
        data, digits = b"", secrets.token_hex(limit * SECRET_DIGITS // 2)  # one call, because each is a system call
        while numbers and len(self.queue) < limit:
            number, secret = numbers[0], digits[len(self.queue) * SECRET_DIGITS :][:SECRET_DIGITS]
            response = (job.dataset, job.ground_truth, job.token_ids[number], job.texts[number], job.queries[number])
            payload = pickle.dumps((secret, response))
            if data and len(data) + len(payload) > AHEAD_BYTES:
                break
            data += framed(payload)
            self.queue.append((numbers.popleft(), secret))
        self.since, self.is_slow = time.monotonic(), False
        self.socket.sendall(data)

    def receive(self) -> Iterator[tuple[int, Scored]]:
        """The complete replies so far, each with its number. Raises `OSError`, `EOFError` or `ValueError` if the scorer has
        ended or a reply is bad. A bad reply belongs to the response that is being scored."""
        for reply in self._replies.add(self.socket.recv(MAX_REPLY_BYTES, socket.MSG_DONTWAIT)):
            yield self._take(reply)

    def _take(self, reply: bytes) -> tuple[int, Scored]:
        if not self.queue:
            raise ValueError("nothing was asked")
        number, secret = self.queue[0]
        echo, _, content = reply.partition(b" ")
        if echo != secret.encode():
            raise ValueError("not the reply to what was asked")
        result = _checked(json.loads(content))
        self.queue.popleft()
        self.since = time.monotonic()
        return number, result

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        os.close(self.process)
        self.socket.close()


def _checked(reply: Any) -> Scored:
    """The reply as a `Scored`. Every part is checked, because the sender has processed what a model wrote."""
    if not isinstance(reply, list) or len(reply) != 5:
        raise ValueError("not a reply")
    score, failure, cost, *reading = reply
    is_number = isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= 1
    if not is_number and (score is not None or failure is None):
        raise ValueError("not a score")
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise ValueError("not a cost")
    if failure is not None and (not isinstance(failure, str) or len(failure) > MAX_FAILURE):
        raise ValueError("not a failure")
    if not all(text is None or (isinstance(text, str) and len(text) <= MAX_READING) for text in reading):
        raise ValueError("not a reading")
    return Scored(float(score) if is_number else None, failure, float(cost), Reading(*reading))


class ForkServer:
    """The parent's handle on the process that forks scorers. It starts at once; the first `fork` waits until it is ready."""

    def __init__(self, start: ForkServerStart, refusals: dict[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._refused = refusals
        """Verifiers that cannot be loaded, with the reasons. This fork server adds the verifiers that it cannot load."""
        self._problem = ""
        """Why no process could be started."""
        try:
            self._socket, peer = socket.socketpair()
            self._connection = Connection(os.dup(self._socket.fileno()))
            with peer:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _FORK_SERVER, str(peer.fileno())],
                    pass_fds=[peer.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # some libraries print on import
                    env=_environment(),
                )
        except OSError as err:  # no memory, or too many processes or files
            self._problem = f"{type(err).__name__}: {err}"
            return
        with suppress(OSError):  # the process ended at once; the first `fork` reports it
            self._connection.send(start)

    def fork(self, job: ScoringJob) -> Scorer:
        self._wait_until_ready()
        raise_if_refused(job, self._refused)
        try:
            ours, theirs = socket.socketpair()
        except OSError as err:
            raise UnavailableError(f"no connection to a scorer ({err})") from err
        try:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
                self._connection.send((job.dataset, job.ground_truth))
            pid = self._answer()
            if not isinstance(pid, int):
                raise UnavailableError(str(pid))
            return Scorer(os.pidfd_open(pid), ours)
        except OSError as err:
            ours.close()
            raise UnavailableError(f"the process of the verifiers has ended ({err})") from err
        except BaseException:
            ours.close()
            raise

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a busy kernel ends the process later
                self._process.wait(timeout=10)

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        if self._problem:
            raise UnavailableError(f"a verifier process could not be started: {self._problem}")
        refusals = self._answer()
        if not isinstance(refusals, dict):
            raise UnavailableError(f"a verifier process could not be started: {refusals}")
        for dataset, reason in refusals.items():
            logger.warning("rows of %r are not scored, because their verifier cannot be loaded: %s", dataset, reason)
        self._refused |= refusals
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._is_ready = True

    def _answer(self) -> object:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        stopped_since: float | None = None
        try:
            while not self._connection.poll(POLL_S):
                now = time.monotonic()
                if now > deadline:
                    return f"no sign of life for {START_TIMEOUT_S:g} s"
                stopped_since = (stopped_since or now) if is_stopped(psutil.Process(self._process.pid)) else None
                if stopped_since is not None and now - stopped_since > STOPPED_S:
                    return f"it has been stopped for {STOPPED_S:g} s"
            return self._connection.recv()
        except psutil.Error:
            return "it ended; its standard error says why"
        except (EOFError, OSError):
            return "it ended; its standard error says why"


_FORK_SERVER = "import sys; from open_instruct.verifiers.fork_server import keep; keep(int(sys.argv[1]))"


def _environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # The fork server must be able to import everything that the parent can, because the score function is passed by name.
    return environment(one_thread | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
