"""The owner's side of scorers (`scorers.py`): what is asked of them, and which replies are believed."""

import json
import math
import pickle
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from open_instruct.scored_groups import Reading
from open_instruct.system.cells.cells import Cell, UnavailableError
from open_instruct.system.cells.framing import Frames, framed
from open_instruct.verifiers.scorers import MAX_FAILURE, MAX_READING, MAX_REPLY_BYTES

AHEAD_BYTES = 2**16
"""Most bytes of several responses that are sent to a scorer at once. A socket holds more, so sending never waits."""
SECRET_DIGITS = 16


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
    """The owner's handle on one scorer."""

    cell: Cell
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
        self.cell.connection.sendall(data)

    def receive(self) -> Iterator[tuple[int, Scored]]:
        """The complete replies so far, each with its number. Raises `OSError`, `EOFError` or `ValueError` if the scorer has
        ended or a reply is bad. A bad reply belongs to the response that is being scored."""
        for reply in self._replies.add(self.cell.connection.recv(MAX_REPLY_BYTES, socket.MSG_DONTWAIT)):
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
