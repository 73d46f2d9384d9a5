"""Reasoning-cache (RC) rollouts against any OpenAI-compatible server: think, summarise, think again.

    python -m open_instruct.rc_actor --config-name test_rc output_dir=out/rc
    python -m open_instruct.rc_actor --config-name test_rc output_dir=out/rc actor.num_reasoning_steps=5 me.llm_urls=http://localhost:8000/v1

    data sets ─► RCActorLoop ── problem_queue ──► worker processes: schedule_rollouts ─► HTTP servers
                     ▲  InferenceProblemStates (bounded)     turns, one at a time per trajectory
                     └────────────── result_queue (bounded) ◄──┘
                     └─► output_dir/streams/actor.jsonl, one line a turn; live line; summary.json

The loop puts as many states as the first queue takes and waits for results; full queues make everybody wait. The file
(`conf/rc_base.yaml` holds every key) is composed by hydra. Start the same command again after an interruption: trajectories
that are in the stream are not made again. Exit code 0 done, 1 failed, 2 mistakes in the options, 85 ended by SIGTERM, 130 by
Ctrl-C.
"""

import asyncio
import json
import logging
import logging.handlers
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from open_instruct import rc_worker, yaml_door
from open_instruct.cli import UsageError, fail_with
from open_instruct.logger_utils import (
    ProgressLine,
    Tracker,
    TrackerOptions,
    make_tracker,
    setup_logging,
    to_json_value,
    write_atomically,
)
from open_instruct.openai_client import ServedModel, ServerProblem, find_model
from open_instruct.rc_evaluation import evaluate
from open_instruct.rc_options import RCOptions, SamplingOptions, option_keys, read_options, split_urls
from open_instruct.rc_scheduler import PROMPT_TOO_LONG
from open_instruct.rc_state import InferenceProblemState, RCSettings
from open_instruct.rc_statistics import RolloutProgress, RolloutStatistics, Throughput, format_table
from open_instruct.rc_stream import EntryTooLarge, StreamWriter, read_trajectories, resume_stream
from open_instruct.rc_types import REASONING, SUMMARIZATION, Problem, RolloutResult
from open_instruct.rc_worker import WorkerEnded, WorkerOptions, WorkerStarted, load_dotted
from open_instruct.yaml_door import Door

logger = logging.getLogger("open_instruct.rc_actor")

PROGRAM = "rc_actor.py"
DOOR = Door(PROGRAM, __doc__, "rc_base", "section.key=value", option_keys)
POLL_S = 0.05
"""Longest wait for a result before the queue of problems is looked after."""
SHUTDOWN_S = 10.0
"""How long workers may take to end by themselves."""
EVALUATION = "eval"
"""Name of the stream of an evaluation."""
ENTRY_TOO_LARGE = "entry_too_large"


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


class Interrupted(Exception):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 85 if number == signal.SIGTERM else 130


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, roll out; the exit code."""
    try:
        options = read_options(yaml_door.compose(DOOR, sys.argv[1:] if argv is None else argv))
        problems = load_problems(options)
    except UsageError as error:
        fail_with(error.mistakes, program=PROGRAM)
    setup_logging(options.run.output_dir)
    try:
        with signals_as_exceptions():
            model = find_servers(options)
            for phase in phases(options, problems):
                run_phase(phase, options, model)
    except (RunFailed, ServerProblem) as error:
        logger.error("%s", error)
        return 1
    except Interrupted as signal_received:
        logger.warning("%s: stopped. Start the same command again to go on.", signal_received)
        return signal_received.exit_code
    return 0


# --- before the run ---------------------------------------------------------------------------------------------------


def load_problems(options: RCOptions) -> dict[str, list[Problem]]:
    """Problems of the training and the test data sets; policies are looked at too.

    Raises:
        UsageError: with all mistakes.
    """
    sys.path.insert(0, os.getcwd())  # loaders and policies may be the user's
    mistakes: list[str] = []
    problems: dict[str, list[Problem]] = {"train": [], "test": []}
    for name in ("solution_rollout_policy", "summarization_rollout_policy"):
        _tried(mistakes, f"actor.{name} ", load_dotted, getattr(options.actor, name))
    load = _tried(mistakes, "dataset_loader ", load_dotted, options.run.dataset_loader)
    test_names = options.test_dataset_names if options.run.eval_every_n_versions else []
    for kind, names in (("train", options.train_dataset_names), ("test", test_names)):
        if names and load is not None:
            problems[kind] = _tried(mistakes, f"{kind}_dataset_names: ", load, names, seed=options.run.seed) or []
    if mistakes:
        raise UsageError(mistakes)
    return problems


def _tried(mistakes: list[str], prefix: str, function: Any, *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except ValueError as error:
        mistakes += [prefix + line for line in str(error).splitlines()]
        return None


def find_servers(options: RCOptions) -> ServedModel:
    """The model that all servers serve; the shortest context of theirs.

    Raises:
        ServerProblem: one does not answer in time, or serves something else.
    """
    urls = list(dict.fromkeys([*split_urls(options.me.llm_urls), *split_urls(options.me.summarization_llm_urls)]))
    key = os.environ.get(rc_worker.KEY_VARIABLE)

    async def ask_all() -> list[ServedModel]:
        return await asyncio.gather(
            *(
                find_model(url, options.run.model_path, api_key=key, timeout_s=options.me.wait_for_server_s)
                for url in urls
            )
        )

    models = asyncio.run(ask_all())
    if len({model.name for model in models}) > 1:
        served = ", ".join(f"{url}: {model.name}" for url, model in zip(urls, models, strict=True))
        raise ServerProblem(f"the servers call their model differently ({served}). Start them with one name.")
    lengths = [model.max_model_len for model in models if model.max_model_len]
    length = options.me.max_model_len or min(lengths, default=None)
    if length is None:
        raise ServerProblem("the servers do not say how many tokens they take. Set me.max_model_len.")
    return ServedModel(models[0].name, min([length, *lengths]))


class signals_as_exceptions:
    """SIGINT and SIGTERM raise `Interrupted` in the main thread; a second one is left to Python."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGINT, signal.SIGTERM)}

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        raise Interrupted(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


# --- phases: an evaluation, and the rollouts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Problems worked on with one kind of sampling, into one stream."""

    name: str
    """Of the stream."""
    problems: list[Problem]
    settings: RCSettings
    num_samples: int
    attempts: int

    @property
    def num_trajectories(self) -> int:
        return len(self.problems) * self.num_samples * self.attempts

    def states(self) -> Iterator[InferenceProblemState]:
        """A trajectory for each attempt, problem and sample, in this order."""
        index = 0
        for attempt in range(self.attempts):
            for problem in self.problems:
                for sample in range(self.num_samples):
                    yield InferenceProblemState(
                        problem, self.settings, index=index, rollout_index=attempt, sample_id=sample
                    )
                    index += 1


def phases(options: RCOptions, problems: Mapping[str, list[Problem]]) -> Iterator[Phase]:
    """The evaluation first, if there is one; then the rollouts."""

    def phase(name: str, kind: str, sampling: SamplingOptions) -> Phase:
        samples = options.actor.num_samples_per_problem
        return Phase(name, problems[kind], options.settings(sampling), samples, options.run.attempts)

    if problems["test"]:
        yield phase(EVALUATION, "test", options.test_llm)
    if problems["train"]:
        yield phase("actor", "train", options.llm)


def run_phase(phase: Phase, options: RCOptions, model: ServedModel) -> dict[str, Any]:
    """Roll out what is not in the phase's stream yet; its summary, which is also written and printed."""
    output_dir = Path(options.run.output_dir)
    path = output_dir / "streams" / f"{phase.name}.jsonl"
    check_same_run(path.with_suffix(".settings.json"), phase, model)
    statistics = RolloutStatistics()
    done = set()
    for trajectory in resume_stream(path):
        statistics.add(trajectory)
        done.add(trajectory[0].trajectory_id)
    if done:
        logger.info("%d of %d trajectories are in %s already", len(done), phase.num_trajectories, path)
    tokens_before = statistics.num_tokens
    with StreamWriter(path, max_entry_bytes=options.actor.shared_memory_entry_size) as stream:
        loop = RCActorLoop(phase, options, model, stream, statistics, done)
        loop.run()
    summary = statistics.summary(
        wall_seconds=loop.wall_seconds, tokens_of_this_run=statistics.num_tokens - tokens_before
    )
    if phase.name == EVALUATION:
        summary["evaluation"] = evaluate(read_trajectories(path))
    name = "summary.json" if phase.name == "actor" else f"{phase.name}_summary.json"
    write_atomically(output_dir / name, json.dumps(to_json_value(summary), indent=2).encode() + b"\n")
    print(format_table(summary), flush=True)
    return summary


def check_same_run(path: Path, phase: Phase, model: ServedModel) -> None:
    """A stream holds trajectories of one kind: what they are sampled with lies beside it.

    Raises:
        RunFailed: it was begun with other settings.
    """
    settings = asdict(phase.settings) | {"model": model.name, "problems": len(phase.problems)}
    if path.exists():
        before = json.loads(path.read_text())
        changed = sorted(name for name in settings.keys() | before.keys() if settings.get(name) != before.get(name))
        if changed:
            raise RunFailed(
                f"{path.parent.parent}: holds a run with another {', '.join(changed)}. Choose another output_dir, or delete it."
            )
    write_atomically(path, json.dumps(settings).encode())


# --- the loop ---------------------------------------------------------------------------------------------------------


class RCActorLoop:
    """Keeps the workers busy and writes what they bring. Use `run` once."""

    def __init__(
        self,
        phase: Phase,
        options: RCOptions,
        model: ServedModel,
        stream: StreamWriter,
        statistics: RolloutStatistics,
        done: set[str],
    ) -> None:
        self._phase = phase
        self._options = options
        self._model = model
        self._stream = stream
        self._statistics = statistics
        self._waiting = (state for state in phase.states() if state.trajectory_id not in done)
        self._next: InferenceProblemState | None = next(self._waiting, None)
        self._num_sentinels = options.actor.rollout_workers
        self.started_at: float | None = None
        """When the first worker was ready (monotonic time)."""
        self.wall_seconds = 0.0
        """From then to the last result."""
        self._num_failures = 0
        """Trajectories in a row that could not be helped."""
        self._throughput = Throughput(options.actor.throughput_window_size)
        context = multiprocessing.get_context("spawn")
        self._context = context
        self._problem_queue: Any = context.Queue(options.actor.problem_queue_size)
        self._result_queue: Any = context.Queue(options.actor.result_queue_size)
        self._log_queue: Any = context.Queue()
        self._stopping = context.Event()
        self._workers: list[Any] = []

    def run(self) -> None:
        """Roll out all states; every one ends in the stream or among the dropped.

        Raises:
            RunFailed: a worker died, servers are gone for good, or too many trajectories failed in a row.
        """
        if self._next is None:
            return
        tracker = self._make_tracker()
        listener = logging.handlers.QueueListener(self._log_queue, _ToLoggers())
        listener.start()
        first = self._statistics.num_done
        try:
            self._start_workers()
            with ProgressLine(self._phase.num_trajectories, first_step=first, unit="trajectory") as line:
                for result in self._results():
                    self._publish(result)
                    line.update(self._progress())
                    tracker.log(self._metrics(), self._statistics.num_done)
            if self.started_at is not None:
                self.wall_seconds = time.monotonic() - self.started_at
        finally:
            self._end_workers()
            listener.stop()
            self._close_queues()
            tracker.finish()

    def _make_tracker(self) -> Tracker:
        output_dir = self._options.run.output_dir
        options = TrackerOptions(self._options.wandb.project, Path(output_dir).name, "rc", output_dir)
        return make_tracker(self._options.wandb.use_wandb, options, asdict(self._phase.settings))

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
        """Results until all workers have ended; puts states meanwhile."""
        num_running = len(self._workers)
        while num_running:
            self._fill_problem_queue()
            try:
                message = self._result_queue.get(timeout=POLL_S)
            except queue.Empty:
                self._raise_if_dead()
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
        """The clock of the rollouts starts with the first worker that is ready."""
        if self.started_at is None:
            self.started_at = time.monotonic()
            self._throughput = Throughput(self._options.actor.throughput_window_size)

    def _fill_problem_queue(self) -> None:
        """States while there is room, then a None for each worker."""
        try:
            while self._next is not None:
                self._problem_queue.put_nowait(self._next)
                self._next = next(self._waiting, None)
            while self._num_sentinels:
                self._problem_queue.put_nowait(None)
                self._num_sentinels -= 1
        except queue.Full:
            return

    def _raise_if_dead(self) -> None:
        for worker in self._workers:
            if worker.exitcode not in (None, 0):
                raise RunFailed(
                    f"{worker.name} died (exit code {worker.exitcode}). Start the same command again to go on; "
                    "its last log lines may say why."
                )

    def _publish(self, result: RolloutResult) -> None:
        """Into the stream or among the dropped."""
        if not result.dropped:
            try:
                self._stream.write(result.rollouts)
            except EntryTooLarge as error:
                result = replace(result, rollouts=[], dropped=ENTRY_TOO_LARGE, cause=str(error))
        self._statistics.add_events(result)
        if result.dropped:
            logger.warning("%s dropped (%s): %s", result.trajectory_id, result.dropped, result.cause)
        else:
            self._statistics.add(result.rollouts)
            self._throughput.add(len(result.rollouts), sum(len(turn.response_ids) for turn in result.rollouts))
        self._count_failures(result)

    def _count_failures(self, result: RolloutResult) -> None:
        may_repeat = (
            result.dropped and not result.is_transient and result.dropped not in (PROMPT_TOO_LONG, ENTRY_TOO_LARGE)
        )
        self._num_failures = self._num_failures + 1 if may_repeat else 0 if not result.dropped else self._num_failures
        if self._num_failures >= self._options.actor.max_consecutive_failures:
            raise RunFailed(
                f"{self._num_failures} trajectories in a row failed (actor.max_consecutive_failures), the last: {result.cause}"
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
        """End the workers, by themselves if they can; nothing is left behind."""
        self._stopping.set()
        deadline = time.monotonic() + SHUTDOWN_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _close_queues(self) -> None:
        for one in (self._problem_queue, self._result_queue, self._log_queue):
            one.cancel_join_thread()
            one.close()


class _ToLoggers(logging.Handler):
    """Records of workers, handled as if they were made here."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(record.name).handle(record)


if __name__ == "__main__":
    raise SystemExit(main())
