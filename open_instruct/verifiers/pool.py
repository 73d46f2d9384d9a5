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

import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from open_instruct.verifiers.group_scoring import GroupScoring
from open_instruct.verifiers.keeper import KeeperStart, ScoreFunction
from open_instruct.verifiers.sandbox import (
    Jail,
)
from open_instruct.verifiers.scoring_processes import (
    START_TIMEOUT_S,
    Keeper,
    RefusedError,
    Scored,
    Scorer,
    ScoringJob,
    UnavailableError,
    raise_if_refused,
)
from open_instruct.verifiers.verifiers import (
    score_response,
)

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
MAX_SLOW_GROUPS = 16
"""Groups that may be held up by slow responses alone, beside those that compute."""
GROUPS_PER_SCORER = 16
"""Forking one takes as long as scoring some hundred short answers."""


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
        self._start = KeeperStart(score, tuple(ready), tuple(modules), Jail(cpu_s=math.ceil(timeout_s) + 60))
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Held by the thread that speaks to the keeper, or replaces it."""
        self._closed = False
        self._num_waiting = 0
        self._idle: list[Scorer] = []
        self._refused: dict[str, str] = {}
        """Columns of `ready` whose verifier a keeper could not load, and why."""
        self._keeper = Keeper(self._start, self._refused)
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
            job = ScoringJob(dataset, ground_truth, token_ids, texts, query)
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

    def _score_group(self, job: "ScoringJob") -> list[Scored]:
        """Runs in one of the threads."""
        self._may_compute.acquire()
        turn = _Turn(self._may_compute)
        try:
            scored = GroupScoring(job, self._borrow, self._give_back, self.timeout_s, turn.end).score()
        finally:
            turn.end()
        failures = Counter(one.failure.partition(":")[0] for one in scored if one.failure)
        with self._lock:
            self.counts += failures
        return scored

    def _borrow(self, job: "ScoringJob") -> "Scorer":
        """A scorer that is at nothing. Raises `UnavailableError` if none can be had, `RuntimeError` if the pool is closed."""
        while True:
            raise_if_refused(job, self._refused)
            with self._lock:
                scorer = self._idle.pop() if self._idle else None
            if scorer is None:
                return self._fork(job)
            if scorer.is_alive():
                return scorer
            scorer.kill()

    def _give_back(self, scorer: "Scorer") -> None:
        scorer.num_groups += 1
        with self._lock:
            if not self._closed and scorer.num_groups < GROUPS_PER_SCORER:
                self._idle.append(scorer)
                return
        scorer.kill()

    def _fork(self, job: "ScoringJob") -> "Scorer":
        with self._asking:
            for attempt in range(START_ATTEMPTS):
                try:
                    return self._keeper.fork(job)
                except RefusedError:
                    raise
                except UnavailableError as err:
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
            self._keeper = Keeper(self._start, self._refused)


class _Turn:
    """A group's right to compute, which it gives back once."""

    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore: threading.Semaphore | None = semaphore

    def end(self) -> None:
        semaphore, self._semaphore = self._semaphore, None
        if semaphore is not None:
            semaphore.release()
