"""Scores responses in separate processes, which can be killed and can only compute.

A response is text that a model wrote. On such a text a verifier may hang, use up the memory, crash its process, or even run the
text as code. None of that may stop a run, cost other responses their score, or reach anything outside the process. Therefore:

    submit() ─► queue of groups ─► thread ──┬─ asks ─► fork server: one process; has loaded the verifiers, never sees a response
                                            │             └─ forks scorers, in the jail of `sandbox.py`
                                            └─ responses ─► scorer ─ a line of JSON for each ─► thread

    a response takes longer than `timeout_s`     its scorer is killed: not scored, "timeout"
    its scorer ends                              tried once more in a fresh scorer; then not scored, "crash"
    it takes longer than `PATIENCE_S`            it is slow: further scorers go on with the other responses of its group

*Not scored* is None and not 0, because nothing is known about such a response. A scorer ends after its first slow response, and
after `GROUPS_PER_SCORER` groups, so that no damage that a response did to its process lasts. The fork server is a fresh
interpreter and not a child of `multiprocessing`, because such a child imports the parent's main module again, and in a Ray actor
that is Ray.
"""

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.device import num_cores
from open_instruct.system.cells.cells import START_S, Cells
from open_instruct.system.sandbox import ONE_THREAD, Jail, environment
from open_instruct.verifiers.group_scoring import GroupScoring
from open_instruct.verifiers.outside_scoring import OutsideScoring
from open_instruct.verifiers.registry import outside_verifier, score_response
from open_instruct.verifiers.scorers import ScoreFunction, Scoring
from open_instruct.verifiers.scoring_processes import Scored, Scorer, ScoringJob, raise_if_refused

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
MAX_SLOW_GROUPS = 16
"""Groups that may wait only for slow responses, in addition to the groups that compute."""
FEWEST_WORKERS, MOST_WORKERS = 2, 16
"""Limits of the default number of workers, for any number of cores."""
GROUPS_PER_SCORER = 64
"""Groups that a scorer scores before a fresh one replaces it. To fork a scorer costs as much as to score 100 short answers."""


def default_workers() -> int:
    """How many groups compute at once if the user does not say: a quarter of the number of cores, within limits."""
    return min(max(num_cores() // 4, FEWEST_WORKERS), MOST_WORKERS)


class VerifierPool:
    """Scores groups of responses, `num_workers` groups in parallel. Any thread may use the pool; its creator closes it.

    Args:
        num_workers: groups that compute at once.
        timeout_s: seconds that one response may take.
        ready: values of the `dataset` column whose verifiers are loaded at the start, because loading a reasoning-gym scorer
            takes a second or more. Rows whose verifier cannot be loaded are not scored, `unavailable`.
        modules: as `--verifier_modules`.
        config: options of the verifiers.
        score: a function at the top level of a module, because it is passed to other processes by name.

    Responses to rows of a verifier that scores outside the jail go to `OutsideScoring` instead.

    `counts` holds how many responses so far were not scored, by cause: `timeout`, `crash`, `unavailable`, `error`.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        ready: Collection[str] = (),
        modules: Sequence[str] = (),
        config: VerifierConfig | None = None,
        score: ScoreFunction = score_response,
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"a verifier pool needs workers and time, got {num_workers} workers and {timeout_s} s")
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self._outside = OutsideScoring(timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self._num_waiting = 0
        self._idle: list[Scorer] = []
        self._refused: dict[str, str] = {}
        """Values of `ready` whose verifier a fork server could not load, with the reasons."""
        jail = Jail(cpu_s=math.ceil(timeout_s) + 60, is_whole=False)  # tasks that need all parts are refused elsewhere
        scoring = Scoring(score, tuple(ready), tuple(modules), config or VerifierConfig(), jail)
        self._cells = Cells(scoring, environment(ONE_THREAD), attempts=START_ATTEMPTS)
        self._num_workers = num_workers
        self._num_computing = 0
        """Threads that score groups, without those that only wait for slow responses."""
        self._queued: deque[tuple[ScoringJob, Future[list[Scored]]]] = deque()
        self._threads = ThreadPoolExecutor(num_workers + MAX_SLOW_GROUPS, thread_name_prefix="verifier")

    def submit(
        self,
        dataset: str,
        ground_truth: object,
        token_ids: list[list[int]],
        texts: list[str],
        query: str | Sequence[str] | None = None,
    ) -> Future[list[Scored]]:
        """Queues the G responses to the prompt `query`. Returns a future of their scores, in order. `query` may also be a prompt
        for each response.

        Submit several groups to keep all workers busy. The future raises `RuntimeError` if the pool is closed in the meantime.
        """
        assert len(token_ids) == len(texts), (len(token_ids), len(texts))
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            self._num_waiting += 1
            queries = [query] * len(texts) if query is None or isinstance(query, str) else query
            job = ScoringJob(dataset, ground_truth, token_ids, texts, queries)
            verifier = outside_verifier(dataset)
            future = self._outside.submit(verifier, job) if verifier else self._queue(job)
        future.add_done_callback(self._count)
        return future

    def score_group(
        self,
        dataset: str,
        ground_truth: object,
        token_ids: list[list[int]],
        texts: list[str],
        query: str | None = None,
    ) -> list[Scored]:
        """`submit`, and wait for the scores, at most as long as all queued groups together may take."""
        future = self.submit(dataset, ground_truth, token_ids, texts, query)
        seconds = len(texts) * self.timeout_s + START_ATTEMPTS * START_S
        return future.result(timeout=(self._num_waiting + 1) * seconds)

    def close(self) -> None:
        """Ends all processes at once; groups that are not scored yet are given up. May be called twice."""
        with self._lock:
            self._closed = True
            for scorer in self._idle:
                scorer.cell.kill()
            self._idle.clear()
            futures = [future for _, future in self._queued]
            self._queued.clear()
        self._cells.close()
        for future in futures:
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._outside.close()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, future: Future[list[Scored]]) -> None:
        results = [] if future.cancelled() or future.exception() else future.result()
        failures = Counter(result.failure.partition(":")[0] for result in results if result.failure)
        with self._lock:
            self._num_waiting -= 1
            self.counts += failures

    def _queue(self, job: "ScoringJob") -> Future[list[Scored]]:
        """Queue a group. The caller holds the lock."""
        future: Future[list[Scored]] = Future()
        self._queued.append((job, future))
        self._start_thread()
        return future

    def _start_thread(self) -> None:
        """Start one more scoring thread if a group waits and fewer than `num_workers` compute. The caller holds the lock."""
        if self._queued and self._num_computing < self._num_workers and not self._closed:
            self._num_computing += 1
            self._threads.submit(self._score_groups)

    def _score_groups(self) -> None:
        """Runs in a thread: scores one group after another, until no group waits or another thread takes this thread's place.

        Groups wait in a queue and not in threads of their own, because those would have to wake each other for every group.
        """
        computes = True

        def let_others_on() -> None:
            nonlocal computes
            if computes:
                computes = False
                with self._lock:
                    self._num_computing -= 1
                    self._start_thread()

        while computes and (group := self._next_group()) is not None:
            job, future = group
            if not future.set_running_or_notify_cancel():
                continue
            try:
                results = GroupScoring(job, self._borrow, self._give_back, self.timeout_s, let_others_on).score()
            except BaseException as error:  # raised again where the scores are awaited
                future.set_exception(error)
            else:
                future.set_result(results)

    def _next_group(self) -> "tuple[ScoringJob, Future[list[Scored]]] | None":
        """The next queued group. None: no group waits, and the calling thread no longer counts as computing."""
        with self._lock:
            if self._queued:
                return self._queued.popleft()
            self._num_computing -= 1
            return None

    def _borrow(self, job: "ScoringJob") -> "Scorer":
        """An idle scorer, or a new one. Raises `UnavailableError` if none can be forked, `RuntimeError` if the pool is closed."""
        while True:
            raise_if_refused(job, self._refused)
            with self._lock:
                scorer = self._idle.pop() if self._idle else None
            if scorer is None:
                return self._fork(job)
            if scorer.cell.is_alive():
                return scorer
            scorer.cell.kill()

    def _give_back(self, scorer: "Scorer") -> None:
        scorer.num_groups += 1
        with self._lock:
            if not self._closed and scorer.num_groups < GROUPS_PER_SCORER:
                self._idle.append(scorer)
                return
        scorer.cell.kill()

    def _fork(self, job: "ScoringJob") -> "Scorer":
        for dataset, reason in self._cells.report().items():
            if dataset not in self._refused:
                logger.warning(
                    "rows of %r are not scored, because their verifier cannot be loaded: %s", dataset, reason
                )
                self._refused[dataset] = reason
        raise_if_refused(job, self._refused)
        return Scorer(self._cells.fork((job.dataset, job.ground_truth)))
