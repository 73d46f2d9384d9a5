"""Scores responses in processes of their own, which can be killed and which can do nothing but compute.

A response is what a model wrote: a verifier may hang on it, eat the memory, take its process along, or run it. None of that may
stop a run, cost the neighbours their score, or reach anything outside. So:

    submit() ─► queue of groups ─► thread ──┬─ asks ─► keeper: one process; has loaded the verifiers, never sees a response
                                            │             └─ forks scorers, in the jail of `sandbox.py`
                                            └─ response ─► scorer ─ one line of JSON ─► thread

    a response takes longer than `timeout_s`     its scorer is killed: not scored, "timeout"
    its scorer ends                              once more in a fresh scorer; then not scored, "crash"
    it is slow (`PATIENCE_S`)                    the others of its group go on beside it, in further scorers

*Not scored* is None and not 0: nothing is known about such a response. A scorer ends with the first response that was slow, and
after `GROUPS_PER_SCORER` groups, so that what a response did to its process does not stay. The keeper is a fresh interpreter and
not a child of `multiprocessing`, which would import the parent's main module again: in a Ray actor that is Ray itself.
"""

import gc
import json
import logging
import math
import os
import pickle
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from open_instruct.system.processes import is_stopped
from open_instruct.verifiers.sandbox import (
    Jail,
    be_killed_first,
    die_with_parent,
    environment,
    has_filters,
    landlock_version,
    limit_resources,
    limit_to_computing,
    python_files,
    restrict_calls,
    restrict_files,
)
from open_instruct.verifiers.verifiers import (
    VerificationResult,
    import_verifiers,
    prepare_label,
    prepare_verifier,
    score_response,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest that the keeper may take to start and to load its verifiers, or to answer."""
START_ATTEMPTS = 3
POLL_S = 0.5
STOPPED_S = 3.0
"""A keeper that is stopped (SIGSTOP, a frozen container) for so long while somebody waits for it is replaced."""
MAX_SLOW_GROUPS = 16
"""Groups that may be held up by slow responses alone, beside those that compute."""
GROUPS_PER_SCORER = 16
"""Forking one takes as long as scoring some hundred short answers."""
PATIENCE_S = 0.25
"""After this long the others of a group stop waiting for a response."""
MAX_SIDE_BY_SIDE = 8
"""Scorers of one group that compute, once one of its responses was slow; those that are slow themselves do not count."""
MAX_SLOW = 64
"""Slow scorers of one group that there may be at once."""
MAX_REPLY_BYTES = 4096
MAX_FAILURE = 500
"""Longest text of an error, in characters."""
ScoreFunction = Callable[[str, object, list[int], str, str | None], VerificationResult]
"""Of a row's `dataset` and ground truth, and of a response's token ids, text and prompt."""


@dataclass(frozen=True)
class Scored:
    """The score of one response."""

    score: float | None
    """In [0, 1]; 0 where the verifier raised; None where it gave no answer: not scored."""
    failure: str | None = None
    """`timeout`, `crash`, `unavailable: <why>` (not scored) or `error: <exception>` (0); None if the verifier answered."""
    cost: float = 0.0
    """US dollars, as the verifier says."""


class VerifierPool:
    """Scores groups of responses, `num_workers` groups side by side.

    A response may take `timeout_s` seconds. `counts` holds how many were not scored, or made their verifier raise, so far: by
    `timeout`, `crash`, `unavailable` and `error`. `ready` lists `dataset` columns whose verifiers are loaded at the start:
    loading a reasoning-gym scorer takes a second or more. Rows of one that cannot be loaded are not scored, `unavailable`.
    `modules` are those of `--verifier_modules`.
    `score` is a function of a module, for it is passed by name. Any thread may use the pool; who makes it, closes it.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        ready: Collection[str] = (),
        modules: Sequence[str] = (),
        score: ScoreFunction = score_response,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"a verifier pool needs workers and time, got {num_workers} workers and {timeout_s} s")
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._start = _Start(score, tuple(ready), tuple(modules), Jail(cpu_s=math.ceil(timeout_s) + 60))
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held by the thread that speaks to the keeper, or replaces it."""
        self._closed = False
        self._num_waiting = 0
        self._idle: list[_Scorer] = []
        self._refused: dict[str, str] = {}
        """Columns of `ready` whose verifier a keeper could not load, and why."""
        self._keeper = _Keeper(self._start, self._refused)
        self._may_compute = threading.Semaphore(num_workers)
        self._threads = ThreadPoolExecutor(num_workers + MAX_SLOW_GROUPS, thread_name_prefix="verifier")

    def submit(
        self,
        dataset: str,
        ground_truth: object,
        token_ids: list[list[int]],
        texts: list[str],
        query: str | None = None,
    ) -> Future[list[Scored]]:
        """Queues the G responses to the prompt `query`; the future gives their scores in order.

        Submit several groups to keep all workers busy. The future raises `RuntimeError` if the pool is closed meanwhile.
        """
        assert len(token_ids) == len(texts), (len(token_ids), len(texts))
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            self._num_waiting += 1
            job = _Job(dataset, ground_truth, token_ids, texts, query)
            future = self._threads.submit(self._score_group, job)
        future.add_done_callback(lambda _: self._forget_one())
        return future

    def score_group(
        self,
        dataset: str,
        ground_truth: object,
        token_ids: list[list[int]],
        texts: list[str],
        query: str | None = None,
    ) -> list[Scored]:
        """`submit`, and wait: no longer than everything that is queued may take."""
        future = self.submit(dataset, ground_truth, token_ids, texts, query)
        of_a_group = len(texts) * self.timeout_s + START_ATTEMPTS * START_TIMEOUT_S
        return future.result(timeout=(self._num_waiting + 1) * of_a_group)

    def close(self) -> None:
        """Ends all processes at once; groups that are not scored yet are given up. May be called twice."""
        with self._lock:
            self._closed = True
            self._keeper.kill()  # and the kernel its scorers
            for scorer in self._idle:
                scorer.kill()
            self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_one(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _score_group(self, job: "_Job") -> list[Scored]:
        """Runs in one of the threads."""
        self._may_compute.acquire()
        turn = _Turn(self._may_compute)
        try:
            scored = _Group(job, self._borrow, self._give_back, self.timeout_s, turn.end).score()
        finally:
            turn.end()
        failures = Counter(one.failure.partition(":")[0] for one in scored if one.failure)
        with self._lock:
            self.counts += failures
        return scored

    def _borrow(self, job: "_Job") -> "_Scorer":
        """A scorer that is at nothing. Raises `_UnavailableError` if none can be had, `RuntimeError` if the pool is closed."""
        while True:
            _raise_if_refused(job, self._refused)
            with self._lock:
                scorer = self._idle.pop() if self._idle else None
            if scorer is None:
                return self._fork(job)
            if scorer.is_alive():
                return scorer
            scorer.kill()

    def _give_back(self, scorer: "_Scorer") -> None:
        scorer.num_groups += 1
        with self._lock:
            if not self._closed and scorer.num_groups < GROUPS_PER_SCORER:
                self._idle.append(scorer)
                return
        scorer.kill()

    def _fork(self, job: "_Job") -> "_Scorer":
        with self._asking:
            for attempt in range(START_ATTEMPTS):
                try:
                    return self._keeper.fork(job)
                except _RefusedError:
                    raise
                except _UnavailableError as err:
                    if attempt == START_ATTEMPTS - 1:
                        raise
                    logger.warning("the verifiers' process is started again: %s", err)
                    self._replace_keeper()
        raise AssertionError("the last attempt returns or raises")

    def _replace_keeper(self) -> None:
        with self._lock:
            self._keeper.kill()
            if self._closed:
                raise RuntimeError("the verifier pool was closed while it scored a group")
            self._keeper = _Keeper(self._start, self._refused)


class _Turn:
    """A group's right to compute, which it gives back once."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore: threading.Semaphore | None = semaphore

    def end(self) -> None:
        semaphore, self._semaphore = self._semaphore, None
        if semaphore is not None:
            semaphore.release()


class _UnavailableError(Exception):
    """The keeper gives no scorer; the text says why."""


class _RefusedError(_UnavailableError):
    """No keeper will: the verifier of these rows cannot be loaded."""


def _raise_if_refused(job: "_Job", refused: Mapping[str, str]) -> None:
    """Also a scorer that is there must not score such a row: its verifier may refuse this machine."""
    if job.dataset in refused:
        raise _RefusedError(refused[job.dataset])


@dataclass(frozen=True)
class _Start:
    """What a keeper is started with."""

    score: ScoreFunction
    ready: tuple[str, ...]
    modules: tuple[str, ...]
    jail: Jail


@dataclass(frozen=True)
class _Job:
    """The responses to one prompt."""

    dataset: str
    ground_truth: object
    token_ids: list[list[int]]
    texts: list[str]
    query: str | None


# --- one group, in a thread of the pool -------------------------------------------------------------------------------


class _Group:
    """Has the responses of one group scored: by one scorer in order, and by further ones beside it where it is held up."""

    def __init__(
        self,
        job: _Job,
        borrow: Callable[[_Job], "_Scorer"],
        give_back: Callable[["_Scorer"], None],
        timeout_s: float,
        let_others_on: Callable[[], None],
    ) -> None:
        self._job = job
        self._let_others_on = let_others_on
        self._borrow = borrow
        self._give_back = give_back
        self._timeout_s = timeout_s
        self._waiting = deque(range(len(job.texts)))
        self._scored: list[Scored | None] = [None] * len(job.texts)
        self._crashed: set[int] = set()
        """Responses that a scorer did not survive once."""
        self._scorers: set[_Scorer] = set()
        self._width = 1

    def score(self) -> list[Scored]:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            try:
                while self._waiting or self._scorers:
                    self._hand_out()
                    self._take_replies()
                    self._look_at_the_clock()
                    if not self._waiting and self._num_slow() == len(self._scorers):
                        self._let_others_on()  # the next group need not wait for what hangs
            finally:
                for scorer in list(self._scorers):
                    self._end(scorer)
        return [one for one in self._scored if one is not None]

    def _hand_out(self) -> None:
        """Give each idle scorer a response, and make more scorers while fewer than wanted are at work."""
        for scorer in [one for one in self._scorers if one.number is None]:
            if self._waiting:
                self._give(scorer)
            else:
                self._leave(scorer)
                self._give_back(scorer)
        while self._waiting and len(self._scorers) - self._num_slow() < self._width and self._num_slow() < MAX_SLOW:
            try:
                scorer = self._borrow(self._job)
            except _UnavailableError as err:
                self._give_up(f"unavailable: {err}"[:MAX_FAILURE])
                return
            scorer.socket.settimeout(self._timeout_s)
            self._scorers.add(scorer)
            self._selector.register(scorer.socket, selectors.EVENT_READ, scorer)
            self._give(scorer)

    def _num_slow(self) -> int:
        return sum(scorer.is_slow for scorer in self._scorers)

    def _give(self, scorer: "_Scorer") -> None:
        number = self._waiting.popleft()
        try:
            scorer.send(number, self._job)
        except OSError:  # it has ended, or is stopped and takes nothing
            self._lose(scorer)

    def _give_up(self, failure: str) -> None:
        for number in self._waiting:
            self._scored[number] = Scored(None, failure)
        self._waiting.clear()

    def _take_replies(self) -> None:
        now = time.monotonic()
        ends = [one.since + (self._timeout_s if one.is_slow else PATIENCE_S) - now for one in self._scorers]
        for key, _ in self._selector.select(max(min(ends, default=0.0), 0.0)):
            scorer: _Scorer = key.data
            try:
                scored = scorer.receive()
            except (OSError, ValueError, RecursionError):  # it has ended, or says what no scorer says
                self._lose(scorer)
                continue
            if scored is not None and scorer.number is not None:
                self._scored[scorer.number] = scored
                scorer.number = None
                if scorer.is_slow:
                    self._end(scorer)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for scorer in [one for one in self._scorers if one.number is not None]:
            assert scorer.number is not None
            if now - scorer.since > self._timeout_s:
                self._scored[scorer.number] = Scored(None, "timeout")
                self._end(scorer)
            elif now - scorer.since > PATIENCE_S and not scorer.is_slow:
                scorer.is_slow = True
                self._width = MAX_SIDE_BY_SIDE

    def _lose(self, scorer: "_Scorer") -> None:
        """A scorer is gone: its response is tried once more."""
        number = scorer.number
        assert number is not None
        if number in self._crashed:
            self._scored[number] = Scored(None, "crash")
        else:
            self._crashed.add(number)
            self._waiting.appendleft(number)
        self._end(scorer)

    def _end(self, scorer: "_Scorer") -> None:
        self._leave(scorer)
        scorer.kill()

    def _leave(self, scorer: "_Scorer") -> None:
        self._scorers.discard(scorer)
        self._selector.unregister(scorer.socket)


@dataclass(eq=False)
class _Scorer:
    """One forked process, as the parent sees it."""

    process: int
    """File descriptor of the process: another process may get its number, but not this."""
    socket: socket.socket
    number: int | None = None
    """The response that it is at."""
    since: float = 0.0
    is_slow: bool = False
    num_groups: int = 0
    """That it has scored."""
    _buffer: bytearray = field(default_factory=bytearray)

    def is_alive(self) -> bool:
        ended = select.poll()
        ended.register(self.process, select.POLLIN)
        return not ended.poll(0)

    def send(self, number: int, job: _Job) -> None:
        self.number, self.since, self.is_slow = number, time.monotonic(), False
        payload = pickle.dumps((job.dataset, job.ground_truth, job.token_ids[number], job.texts[number], job.query))
        self.socket.sendall(struct.pack("!Q", len(payload)) + payload)

    def receive(self) -> Scored | None:
        """What has come, once it is whole. Raises `OSError` or `ValueError` where the scorer has ended or talks nonsense."""
        data = self.socket.recv(MAX_REPLY_BYTES, socket.MSG_DONTWAIT)
        self._buffer += data
        if not data or len(self._buffer) > MAX_REPLY_BYTES:
            raise OSError("no reply, or too much of one")
        if not self._buffer.endswith(b"\n"):
            return None
        reply = json.loads(self._buffer)
        self._buffer.clear()
        return _checked(reply)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        os.close(self.process)
        self.socket.close()


def _checked(reply: Any) -> Scored:
    """A reply as it should be; who sends it has seen what a model wrote."""
    if not isinstance(reply, list) or len(reply) != 3:
        raise ValueError("not a reply")
    score, failure, cost = reply
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise ValueError("not a score")
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise ValueError("not a cost")
    if failure is not None and (not isinstance(failure, str) or len(failure) > MAX_FAILURE):
        raise ValueError("not a failure")
    return Scored(float(score), failure, float(cost))


# --- the keeper, as the parent sees it --------------------------------------------------------------------------------


class _Keeper:
    """The process that forks scorers. Starts at once; who asks first waits until it is ready."""

    def __init__(self, start: _Start, refused: dict[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._refused = refused
        """The keeper adds what it cannot load."""
        self._problem = ""
        """Why there is no process."""
        try:
            self._socket, theirs = socket.socketpair()
            self._connection = Connection(os.dup(self._socket.fileno()))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _KEEPER, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # libraries greet on import
                    env=_environment(),
                )
        except OSError as err:  # no memory, or too many processes or files
            self._problem = f"{type(err).__name__}: {err}"
            return
        with suppress(OSError):  # it has ended at once; who asks hears of it
            self._connection.send(start)

    def fork(self, job: _Job) -> _Scorer:
        self._wait_until_ready()
        _raise_if_refused(job, self._refused)
        try:
            ours, theirs = socket.socketpair()
        except OSError as err:
            raise _UnavailableError(f"no connection to a scorer ({err})") from err
        try:
            with theirs:
                socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
                self._connection.send((job.dataset, job.ground_truth))
            pid = self._answer()
            if not isinstance(pid, int):
                raise _UnavailableError(str(pid))
            return _Scorer(os.pidfd_open(pid), ours)
        except OSError as err:
            ours.close()
            raise _UnavailableError(f"the process of the verifiers has ended ({err})") from err
        except BaseException:
            ours.close()
            raise

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a kernel that is busy ends it later
                self._process.wait(timeout=10)

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        if self._problem:
            raise _UnavailableError(f"a verifier process could not be started: {self._problem}")
        refused = self._answer()
        if not isinstance(refused, dict):
            raise _UnavailableError(f"a verifier process could not be started: {refused}")
        for dataset, reason in refused.items():
            logger.warning("rows of %r are not scored, because their verifier cannot be loaded: %s", dataset, reason)
        self._refused |= refused
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


_KEEPER = "import sys; from open_instruct.verifiers.pool import keep; keep(int(sys.argv[1]))"


def _environment() -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # What the parent can import, the keeper can: the score function travels by name.
    return environment(one_thread | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})


# --- the keeper and its scorers, in processes of their own ------------------------------------------------------------


def keep(descriptor: int) -> None:
    """The keeper: forks a scorer for whoever asks over the socket, until that closes, which the parent's death does."""
    # Ctrl-C and a job queue's SIGTERM reach the whole process group; when the keeper ends is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    listening = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    try:
        start: _Start = connection.recv()
        import_verifiers(start.modules)
        refused = _load(start.ready)
        be_killed_first()
        silent = os.open(os.devnull, os.O_WRONLY)
        limit_resources(start.jail)
        if landlock_version():  # each part for itself: tasks that need all of them are refused where one is missing
            restrict_files(Jail(readable=python_files(["open_instruct", start.score.__module__])))
        gc.collect()
        gc.freeze()  # collecting would copy the pages that scorers share
        connection.send(refused)
        while True:
            _, descriptors, *_ = socket.recv_fds(listening, 1, 1)
            if not descriptors:
                return
            job = connection.recv()
            _reap()
            _prepare(*job)
            keeper = os.getpid()
            if pid := os.fork():
                os.close(descriptors[0])
                connection.send(pid)
            else:
                _become_scorer(keeper, descriptors[0], silent, start.jail)
                _score(start.score)
    except (EOFError, OSError):
        return


def _load(datasets: Collection[str]) -> dict[str, str]:
    """Load the verifiers of these `dataset` columns; those that cannot be loaded, and why."""
    refused = {}
    for dataset in datasets:
        try:
            prepare_verifier(dataset)
        except Exception as err:  # one that is broken, or refuses this machine, costs the rows of the others nothing
            refused[dataset] = f"{type(err).__name__}: {err}"
    return refused


def _reap() -> None:
    """Take leave of scorers that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prepare(dataset: str, ground_truth: object) -> None:
    """Load here what every scorer of such a row needs, so that not each of them does."""
    with suppress(Exception):  # the scorers meet it again and report it
        prepare_label(dataset, ground_truth)


def _become_scorer(keeper: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Keep nothing but the socket, as number 0, and nowhere to go."""
    try:
        die_with_parent(keeper)
        os.dup2(descriptor, 0)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if has_filters():
            restrict_calls(jail)
        else:
            limit_to_computing(jail)
    except BaseException:
        os._exit(1)


def _score(score: ScoreFunction) -> None:
    """Score what comes until nothing comes any more."""
    try:
        while True:
            response = pickle.loads(_read(struct.unpack("!Q", _read(8))[0]))
            reply = json.dumps(_score_safely(score, *response))
            os.write(0, reply.encode() + b"\n")
    finally:
        os._exit(0)


def _read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, min(size - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _score_safely(score: ScoreFunction, *response: Any) -> tuple[float, str | None, float]:
    """Score, failure and cost: the fields of `Scored`."""
    try:
        result = score(*response)
        return result.score, None, result.cost
    except MemoryError:  # nothing is known of such an answer: as if the process had been killed for it
        os._exit(1)
    except Exception as err:  # isolation is what this process is for: the error is reported, counted and scores 0
        return 0.0, f"error: {type(err).__name__}: {err}"[:MAX_FAILURE], 0.0
