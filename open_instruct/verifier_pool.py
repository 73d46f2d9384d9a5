"""Scores responses in processes of their own, which can be killed.

A verifier may hang in a regular expression, eat the stack or take its process along; none of that may stop a run or
cost the neighbours their score. So each of `num_workers` threads here drives one plain child process over a socket:

    submit() ─► queue of groups ─► thread ── group ──► worker process: score, send, score, send, …
                                      ▲──── score ─────────┘
                                      silence for timeout_s: "timeout", kill it; its end: "crash"; in both cases
                                      a new worker goes on with the next response

The worker answers response by response, so it is known which one it died of. It is a fresh interpreter and not a child
of `multiprocessing`, which would import the parent's main module again: in a Ray actor that is Ray itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from open_instruct.ground_truth_utils import VerificationResult, prepare_verifier, score_response

START_TIMEOUT_S = 120.0
"""Longest that a worker process may take to start and to ready its verifiers."""
ScoreFunction = Callable[[str, object, list[int], str], VerificationResult]


@dataclass(frozen=True)
class Scored:
    """The score of one response."""

    score: float
    """In [0, 1]; 0 where scoring failed."""
    failure: str | None = None
    """`timeout`, `crash` or `error: <exception>`; None if the verifier answered."""


class VerifierPool:
    """Scores groups of responses on `num_workers` processes.

    A response may take `timeout_s` seconds; one that takes longer, raises or ends its process scores 0 with a named
    `failure`. `counts` holds how many did so far, by `timeout`, `crash` and `error`. `ready` lists `dataset` columns
    whose verifiers are loaded as a worker starts, outside the timeout: loading a reasoning-gym scorer takes a second or
    more. `score` is a function of a module, for it is passed by name. Any thread may use the pool; who makes it, closes
    it.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        ready: Collection[str] = (),
        score: ScoreFunction = score_response,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"a verifier pool needs workers and time, got {num_workers} workers and {timeout_s} s")
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._score = score
        self._ready = tuple(ready)
        self._lock = threading.Lock()
        self._closed = False
        self._num_waiting = 0
        self._idle = [_Worker(self._score, self._ready) for _ in range(num_workers)]
        self._workers = set(self._idle)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verifier")

    def submit(
        self, dataset: str, ground_truth: object, token_ids: list[list[int]], texts: list[str]
    ) -> Future[list[Scored]]:
        """Queues the G responses to one prompt; the future gives their scores in order.

        A group is scored by one worker: submit several groups to keep all of them busy. The future raises
        `RuntimeError` if the pool is closed meanwhile or if a worker cannot be started.
        """
        assert len(token_ids) == len(texts), (len(token_ids), len(texts))
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            self._num_waiting += len(texts)
            future = self._threads.submit(self._score_group, dataset, ground_truth, token_ids, texts)
        future.add_done_callback(lambda _: self._forget(len(texts)))
        return future

    def score_group(
        self, dataset: str, ground_truth: object, token_ids: list[list[int]], texts: list[str]
    ) -> list[Scored]:
        """`submit`, and wait: no longer than everything that is queued may take."""
        future = self.submit(dataset, ground_truth, token_ids, texts)
        return future.result(timeout=(self._num_waiting + 1) * (self.timeout_s + START_TIMEOUT_S))

    def close(self) -> None:
        """Ends all workers at once; groups that are not scored yet are given up. May be called twice."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, num_responses: int) -> None:
        with self._lock:
            self._num_waiting -= num_responses

    def _score_group(
        self, dataset: str, ground_truth: object, token_ids: list[list[int]], texts: list[str]
    ) -> list[Scored]:
        """Runs in one of the threads, of which there are as many as workers: an idle worker is always there."""
        with self._lock:
            worker = self._idle.pop()
        scored: list[Scored] = []
        try:
            if not worker.alive:
                worker = self._replace(worker)
            while len(scored) < len(texts):
                done = len(scored)
                scored += worker.score(dataset, ground_truth, token_ids[done:], texts[done:], self.timeout_s)
                if not worker.alive:
                    worker = self._replace(worker)
        finally:
            with self._lock:
                self._idle.append(worker)
        failures = Counter(one.failure.partition(":")[0] for one in scored if one.failure)
        with self._lock:
            self.counts += failures
        return scored

    def _replace(self, worker: "_Worker") -> "_Worker":
        worker.kill()
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool was closed while it scored a group")
            fresh = _Worker(self._score, self._ready)
            self._workers = (self._workers - {worker}) | {fresh}
        return fresh


class _Worker:
    """One child process and the socket to it. Starts at once; whoever scores first waits until it is ready."""

    def __init__(self, score: ScoreFunction, ready: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # libraries greet on import
                env=_child_environment(),
            )
        self._socket = Connection(ours.detach())
        self._socket.send((score, ready))
        self._is_ready = False
        self._given_up = False

    @property
    def alive(self) -> bool:
        return not self._given_up and self._process.poll() is None

    def score(
        self, dataset: str, ground_truth: object, token_ids: list[list[int]], texts: list[str], timeout_s: float
    ) -> list[Scored]:
        """Scores up to and including the first response that the worker does not survive."""
        self._wait_until_ready()
        scored: list[Scored] = []
        try:
            self._socket.send((dataset, ground_truth, token_ids, texts, timeout_s))
            for _ in texts:
                if not self._socket.poll(timeout_s):
                    self._given_up = True
                    return [*scored, Scored(0.0, "timeout")]
                scored.append(Scored(*self._socket.recv()))
        except (EOFError, OSError):
            self._given_up = True
            scored.append(Scored(0.0, "crash"))
        return scored

    def kill(self) -> None:
        self._given_up = True
        self._process.kill()
        self._process.wait(timeout=10)

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            answer = (
                self._socket.recv()
                if self._socket.poll(START_TIMEOUT_S)
                else f"no sign of life for {START_TIMEOUT_S} s"
            )
        except (EOFError, OSError):
            answer = "it ended; its standard error says why"
        if answer != "ready":
            raise RuntimeError(f"a verifier process could not be started: {answer}")
        self._is_ready = True


_CHILD = "import sys; from open_instruct.verifier_pool import work; work(int(sys.argv[1]))"


def _child_environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # What the parent can import, the child can: the score function travels by name.
    return os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def work(descriptor: int) -> None:
    """The child process: scores what comes over the socket until that closes, which the parent's death does."""
    # Ctrl-C and a job queue's SIGTERM reach the whole process group; when workers end is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        score, ready = connection.recv()
        for dataset in ready:
            prepare_verifier(dataset)
        connection.send("ready")
        while True:
            dataset, ground_truth, token_ids, texts, timeout_s = connection.recv()
            for ids, text in zip(token_ids, texts, strict=True):
                # The parent ends a response that takes too long; where the parent is gone, the kernel does, even in the
                # midst of a C function that never lets go of the interpreter.
                signal.setitimer(signal.ITIMER_REAL, timeout_s + 5)
                connection.send(_score_safely(score, dataset, ground_truth, ids, text))
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (EOFError, OSError):
        return


def _score_safely(
    score: ScoreFunction, dataset: str, ground_truth: object, token_ids: list[int], text: str
) -> tuple[float, str | None]:
    try:
        return score(dataset, ground_truth, token_ids, text).score, None
    except Exception as err:  # isolation is what this process is for: the error is reported, counted and scores 0
        return 0.0, f"error: {type(err).__name__}: {err}"[:500]
