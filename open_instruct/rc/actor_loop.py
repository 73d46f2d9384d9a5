"""The main loop of reasoning-cache rollouts: keeps worker processes busy, writes their results, and reports progress.

    states ─► RCActorLoop ── problem_queue ──► workers: schedule_rollouts ─► servers
                 ▲   (bounded)                     │
                 └──────── result_queue (bounded) ◄┘
                 └─► stream, live line, statistics

The loop fills the problem queue with states, then waits for results. Both queues are bounded: the loop waits while the problem
queue is full, and workers wait while the result queue is full. Every trajectory is either written to the stream or counted as
dropped.
"""

import itertools
import logging
import logging.handlers
import multiprocessing
import queue
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from open_instruct.engines.openai_client import ServedModel
from open_instruct.rc import worker as rc_worker
from open_instruct.rc.options import RCOptions, split_urls
from open_instruct.rc.scheduler import NOT_SCORED, POLICY_ERROR, REJECTED
from open_instruct.rc.statistics import RolloutProgress, RolloutStatistics, Throughput
from open_instruct.rc.stream import EntryTooLarge, StreamWriter
from open_instruct.rc.worker import WorkerEnded, WorkerOptions, WorkerStarted
from open_instruct.report.live_line import ProgressLine
from open_instruct.report.tracker import Tracker, TrackerOptions, run_id_at
from open_instruct.report.trackers import make_tracker
from open_instruct.system.processes import is_stopped
from open_instruct.workflows.rc.state import InferenceProblemState, RCSettings
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, Problem, RolloutResult

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Longest wait for a result before the problem queue is filled up again."""
LOOK_S = 0.2
"""Seconds from one check of the workers to the next."""
STOPPED_S = 12.0
"""Seconds that a worker may be stopped (SIGSTOP) before the run ends."""
SHUTDOWN_S = 10.0
"""How long workers may take to end by themselves."""
ENTRY_TOO_LARGE = "entry_too_large"


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Phase:
    """A part of the run: all its problems are worked on with the same sampling, and their results are written to one stream."""

    name: str
    """Name of the stream."""
    problems: list[Problem]
    settings: RCSettings
    num_samples: int
    attempts: int
    one_long_turn: bool = False
    """Make a control for each trajectory: one turn that may spend the tokens of the whole trajectory."""

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, controls included."""
        return len(self.problems) * self.num_samples * self.attempts * (2 if self.one_long_turn else 1)

    def states(self) -> Iterator[InferenceProblemState]:
        """The start of a trajectory for each attempt, problem and sample, in this order. Each trajectory's control follows it."""
        long_turn = self.settings.as_one_long_turn()
        for attempt, problem, sample in itertools.product(range(self.attempts), self.problems, range(self.num_samples)):
            yield InferenceProblemState(problem, self.settings, attempt, sample)
            if self.one_long_turn:
                yield InferenceProblemState(problem, long_turn, attempt, sample, is_one_long_turn=True)


class RCActorLoop:
    """Keeps the workers busy and writes their results. Call `run` once."""

    def __init__(
        self,
        phase: Phase,
        options: RCOptions,
        model: ServedModel,
        stream: StreamWriter,
        statistics: RolloutStatistics,
        trajectory_ids: set[str],
    ) -> None:
        self._phase = phase
        self._options = options
        self._model = model
        self._stream = stream
        self._statistics = statistics
        self._waiting = (state for state in phase.states() if state.trajectory_id not in trajectory_ids)
        self._next: InferenceProblemState | None = next(self._waiting, None)
        self._num_sentinels = options.actor.rollout_workers
        self.started_at: float | None = None
        """When the first worker was ready (monotonic time)."""
        self.wall_seconds = 0.0
        """Seconds from `started_at` to the last result."""
        self._looked_at = 0.0
        self._stopped_since: dict[str, float] = {}
        """When each stopped worker was first seen stopped, by its name."""
        self._num_out = 0
        """Trajectories that were given to the workers and have no result yet."""
        self._num_failures = 0
        """Trajectories in a row with a failure that a retry does not cure."""
        self._throughput = Throughput(options.actor.throughput_window_size)
        context = multiprocessing.get_context("spawn")
        self._context = context
        self._problem_queue: Any = context.Queue(options.actor.problem_queue_size)
        self._result_queue: Any = context.Queue(options.actor.result_queue_size)
        self._log_queue: Any = context.Queue()
        self._stopping = context.Event()
        self._workers: list[Any] = []

    def run(self) -> None:
        """Roll out all states. Each one is either written to the stream or counted as dropped.

        Raises:
            RunFailed: a worker died, servers are gone for good, or too many trajectories failed in a row.
        """
        if self._next is None:
            return
        tracker = self._make_tracker()
        listener = logging.handlers.QueueListener(self._log_queue, _ToLoggers())
        listener.start()
        first_step = self._statistics.num_done
        try:
            self._start_workers()
            with ProgressLine(self._phase.num_trajectories, first_step=first_step, unit="trajectory") as line:
                for result in self._results():
                    self._num_out -= 1
                    self._publish(result)
                    line.update(self._progress())
                    tracker.log(self._metrics(), self._statistics.num_done)
            self._raise_if_lost()
        finally:
            self._end_workers()
            listener.stop()
            self._close_queues()
            tracker.finish()

    def _make_tracker(self) -> Tracker:
        output_dir = self._options.run.output_dir
        name = f"{Path(output_dir).name}-{self._phase.name}"
        run_id = run_id_at(Path(output_dir, self._phase.name))
        options = TrackerOptions(self._options.wandb.project, name, run_id, output_dir)
        return make_tracker(["wandb"] if self._options.wandb.use_wandb else [], options, asdict(self._phase.settings))

    def _start_workers(self) -> None:
        for number in range(self._options.actor.rollout_workers):
            queues = (self._problem_queue, self._result_queue, self._log_queue)
            arguments = (self._worker_options(number), *queues, self._stopping)
            worker = self._context.Process(target=rc_worker.work, args=arguments, name=f"rc-worker-{number}")
            worker.start()
            self._workers.append(worker)

    def _worker_options(self, number: int) -> WorkerOptions:
        options = self._options
        slots, extra = divmod(options.actor.llm_max_rollouts, options.actor.rollout_workers)
        urls = split_urls(options.me.llm_urls)
        assert self._model.max_model_len is not None
        return WorkerOptions(
            number=number,
            tokenizer=options.run.model_path,
            model=self._model.name,
            max_model_len=self._model.max_model_len,
            urls={REASONING: urls, SUMMARIZATION: split_urls(options.me.summarization_llm_urls) or urls},
            api_key_urls=split_urls(options.me.api_key_urls),
            num_slots=slots + (number < extra),
            policies={
                REASONING: options.actor.solution_rollout_policy,
                SUMMARIZATION: options.actor.summarization_rollout_policy,
            },
            verifiers=sorted({problem.verifier for problem in self._phase.problems}),
            retry=options.retry,
            max_requeues=options.actor.max_requeues,
        )

    def _results(self) -> Iterator[RolloutResult]:
        """Results, until all workers have ended. Fills the problem queue in between."""
        num_running = len(self._workers)
        while num_running:
            self._fill_problem_queue()
            self._raise_if_dead()
            try:
                message = self._result_queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(message, WorkerStarted):
                self._note_start()
            elif isinstance(message, WorkerEnded):
                if message.error:
                    raise RunFailed(message.error)
                num_running -= 1
            else:
                yield message

    def _note_start(self) -> None:
        """Start the clock of the rollouts when the first worker is ready."""
        if self.started_at is None:
            self.started_at = time.monotonic()
            self._throughput = Throughput(self._options.actor.throughput_window_size)

    def _fill_problem_queue(self) -> None:
        """Put states while the queue has room; after the last state, put a None for each worker, which makes the worker end."""
        try:
            while self._next is not None:
                self._problem_queue.put_nowait(self._next)
                self._num_out += 1
                self._next = next(self._waiting, None)
            while self._num_sentinels:
                self._problem_queue.put_nowait(None)
                self._num_sentinels -= 1
        except queue.Full:
            return

    def _raise_if_dead(self) -> None:
        """Raises `RunFailed` if a worker has died, or has been stopped for more than `STOPPED_S`."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        for worker in self._workers:
            if worker.pid is None or worker.exitcode is not None or not is_stopped(psutil.Process(worker.pid)):
                self._stopped_since.pop(worker.name, None)
            elif now - self._stopped_since.setdefault(worker.name, now) > STOPPED_S:
                raise RunFailed(
                    f"{worker.name} (process {worker.pid}) has been stopped for {STOPPED_S:g} s, by SIGSTOP, a debugger or a "
                    "frozen container. Start the same command again to go on."
                )
            if worker.exitcode not in (None, 0):
                raise RunFailed(
                    f"{worker.name} died (exit code {worker.exitcode}). Start the same command again to go on; "
                    "its last log lines may say why."
                )

    def _raise_if_lost(self) -> None:
        """Raises `RunFailed` if trajectories are gone though all workers have ended: Python's queues only print such errors."""
        if self._num_out:
            raise RunFailed(
                f"{self._num_out} trajectories did not come back from the workers. A problem, or what a rollout policy made of a "
                "turn, holds something that cannot be sent to another process: the error is printed above."
            )

    def _publish(self, result: RolloutResult) -> None:
        """Write a result to the stream, or count it as dropped."""
        result = self._written(result)
        assert self.started_at is not None, "a result from a worker that has not started"
        self.wall_seconds = time.monotonic() - self.started_at
        self._statistics.add_events(result)
        if result.dropped:
            logger.warning("%s dropped (%s): %s", result.trajectory_id, result.dropped, result.cause)
        else:
            self._statistics.add(result.rollouts)
            self._throughput.add(len(result.rollouts), sum(len(turn.response_ids) for turn in result.rollouts))
        self._count_failures(result)

    def _written(self, result: RolloutResult) -> RolloutResult:
        """Write the result to the stream and return it. If the stream cannot take it, the returned result is dropped."""
        if result.dropped:
            return result
        try:
            self._stream.write(result.rollouts)
        except EntryTooLarge as error:
            return replace(result, rollouts=[], dropped=ENTRY_TOO_LARGE, cause=str(error))
        except (TypeError, ValueError) as error:  # a policy's reward or metadata that JSON cannot hold
            return replace(result, rollouts=[], dropped=POLICY_ERROR, cause=f"{type(error).__name__}: {error}")
        return result

    def _count_failures(self, result: RolloutResult) -> None:
        """End the run when too many trajectories in a row fail in a way that will make the next trajectories fail too."""
        if not result.dropped:
            self._num_failures = 0
        elif result.dropped in (REJECTED, POLICY_ERROR, NOT_SCORED):
            self._num_failures += 1
        if self._num_failures >= self._options.actor.max_consecutive_failures:
            raise RunFailed(
                f"{self._num_failures} trajectories in a row failed (actor.max_consecutive_failures), the last one because of: "
                f"{result.cause}"
            )

    def _progress(self) -> RolloutProgress:
        statistics = self._statistics
        return RolloutProgress(
            step=statistics.num_done,
            rates=self._throughput.rates(),
            num_dropped=statistics.dropped.total(),
            num_retries=statistics.num_retries,
            last_accuracy=statistics.last_accuracy(),
        )

    def _metrics(self) -> dict[str, float]:
        accuracy = {
            f"rc/accuracy_cycle_{number}": counts.num_right / counts.num_scored
            for number, counts in self._statistics.cycles.items()
            if counts.num_scored
        }
        dropped = self._statistics.dropped.total()
        return {**self._throughput.rates(), **accuracy, "rc/dropped_trajectories": dropped}

    def _end_workers(self) -> None:
        """Ask the workers to end, and kill workers that do not end within `SHUTDOWN_S`. No process is left behind."""
        self._stopping.set()
        deadline = time.monotonic() + SHUTDOWN_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join(SHUTDOWN_S)

    def _close_queues(self) -> None:
        for bounded_queue in (self._problem_queue, self._result_queue, self._log_queue):
            bounded_queue.cancel_join_thread()
            bounded_queue.close()


class _ToLoggers(logging.Handler):
    """Handles log records of workers as if they were made in this process."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)
