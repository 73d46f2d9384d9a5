"""Writes the record of samples, in a thread of its own in the controller.

    a step takes groups ─► add ─► open/000012.log          after a second, if the step is not trained by then
    its batch is sent   ─► sent                            which token went to which learner
    it is trained       ─► commit ─► steps/000012.parquet  whole or not at all; then the log goes
    it is issued, lost …   ─► note ─► prompts.jsonl
    an evaluation ends  ─► measured ─► evaluations/000020_default.parquet

What cannot be written is left out with a warning, and the run goes on.
"""

import json
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.record import open_log
from open_instruct.record.places import RecordPlaces
from open_instruct.record.samples import RecordedGroup, TrainedTokens, rows_of
from open_instruct.record.schema import PARQUET_OPTIONS, SAMPLES
from open_instruct.storage.atomic_file import _replaced
from open_instruct.storage.output_directory import describe

logger = logging.getLogger(__name__)

CONSUMED = "consumed"
"""Outcome of a group that is trained on."""
LOG_AFTER_S = 1.0
"""How long a scored group may wait for others before it is written to the log; a crash loses as much."""
MOST_WAITING = 100_000
"""Responses that may wait to be written. On a disk that is too slow the record leaves out what is beyond."""

Order = list[list[tuple[tuple[int, ...], ...]]]
"""For each rank and mini-batch `MiniBatch.samples_of_micro_batches`."""
LearnerValues = Sequence[dict[str, np.ndarray | None]]
"""For each rank `logprobs` and `correction` of its trained tokens, in the order of its micro-batches."""


@dataclass
class _OpenStep:
    """A step that is not trained yet."""

    unlogged: list[RecordedGroup] = field(default_factory=list)
    """Groups that are not in the log."""
    unlogged_since: float = math.inf
    """Monotonic time of the first of them."""
    logged: list[RecordedGroup] = field(default_factory=list)
    """Groups to train on that are in the log too. Groups that are left out are only there."""
    partial_batches: list[tuple[Order, Sequence[TrainingSample]]] = field(default_factory=list)
    """For each partial batch: the numbers of its samples, and the samples."""


class RecordWriter:
    """The record of samples of one run. All calls return at once.

    Args:
        directory: the folder of the record, such as `output/record`.
        training_step: the last step that is trained. What the folder holds of later steps is moved to `undone/`.
        keep_steps: keep the samples of this many steps, the newest; None: of all.
    """

    def __init__(self, directory: Path, training_step: int, *, keep_steps: int | None = None) -> None:
        self._places = RecordPlaces(directory)
        self._start = 1
        self._keep_steps = keep_steps
        self._steps: defaultdict[int, _OpenStep] = defaultdict(_OpenStep)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._num_left_out = 0
        self._lock = threading.Lock()
        self._lines: IO[bytes] | None = None
        """`prompts.jsonl`, once there is a line."""
        self.failure = ""
        """Why the record ended before the run; "" while it is written."""
        self._tasks.put(lambda: self._begin(training_step))
        self._thread = threading.Thread(target=self._write, name="the record", daemon=True)
        self._thread.start()

    # --- what the controller calls ------------------------------------------------------------------------------------

    def note(self, event: Mapping[str, object]) -> None:
        """Something happened to a prompt: a line of `prompts.jsonl` with `kind`, `prompt_id` and `unix`."""
        self._put(lambda: self._note(event))

    def add(self, training_step: int, entry: RecordedGroup) -> None:
        """A step has taken this group, or has left it out."""
        num_samples = len(entry.group.samples)
        with self._lock:
            if self._num_waiting + num_samples > MOST_WAITING:
                if not self._num_left_out:
                    logger.warning(
                        "the record: the disk of %s is too slow, so responses are left out", self._places.root
                    )
                self._num_left_out += num_samples
                return
            self._num_waiting += num_samples
        self._put(lambda: self._add(training_step, entry, num_samples))

    def carry_over(self, training_step: int, prompt_id: str) -> None:
        """A resumed step has left out this prompt, whose tokens only the record of an earlier start holds."""
        self._put(lambda: self._carry_over(training_step, prompt_id))

    def sent(self, training_step: int, rank_batches: list[list[MiniBatch]], samples: Sequence[TrainingSample]) -> None:
        """A batch of the step, or a partial batch, goes to the learners."""
        order = [[mini_batch.samples_of_micro_batches for mini_batch in own] for own in rank_batches]
        self._put(lambda: self._steps[training_step].partial_batches.append((order, samples)))

    def commit(self, training_step: int, values: LearnerValues | None = None) -> None:
        """The step is trained. `values`: what the learners say of its tokens; None: not known."""
        self._put(lambda: self._commit(training_step, values))

    def measured(self, version: int, set_name: str, groups: Sequence[RecordedGroup]) -> None:
        """An evaluation set was measured."""
        path = self._places.evaluation(version, set_name)
        self._put(lambda: _write_table(path, [rows_of(groups, start=self._start)]))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written; False if that took longer than `timeout_s`."""
        flushed = threading.Event()

        def log_all() -> None:
            self._log(math.inf)
            flushed.set()

        self._put(log_all)
        return flushed.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s`, and end the thread."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the record: the disk of %s is slow; what waits is not written", self._places.root)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def _write(self) -> None:
        while (task := self._next_task()) is not None:
            self._do(task)
            self._do(lambda: self._log(time.monotonic() - LOG_AFTER_S))
        self._do(lambda: self._log(math.inf))
        if self._lines is not None:
            self._lines.close()

    def _next_task(self) -> Callable[[], None] | None:
        """The next task; nothing to do if none comes for a while. None at the end."""
        waits = any(step.unlogged for step in self._steps.values())
        try:
            return self._tasks.get(timeout=LOG_AFTER_S if waits else None)
        except queue.Empty:
            return lambda: None

    def _do(self, task: Callable[[], None]) -> None:
        if self.failure:
            return
        try:
            task()
        except Exception as error:  # a record that cannot be written must not end the run
            self.failure = describe(error) if isinstance(error, OSError) else repr(error)
            self._steps.clear()
            logger.warning("the record ends here and the run goes on without it: %s", self.failure)
            logger.debug("traceback", exc_info=error)

    def _begin(self, training_step: int) -> None:
        self._start = max(1, self._places.num_starts())
        self._places.make(training_step, self._start)

    def _note(self, event: Mapping[str, object]) -> None:
        if self._lines is None:
            self._lines = open(self._places.prompts, "ab", buffering=0)  # noqa: SIM115, closed by the thread
        self._lines.write(json.dumps({"start": self._start, **event}).encode(errors="replace") + b"\n")

    def _add(self, training_step: int, entry: RecordedGroup, num_samples: int) -> None:
        with self._lock:
            self._num_waiting -= num_samples
        step = self._steps[training_step]
        step.unlogged.append(entry)
        step.unlogged_since = min(step.unlogged_since, time.monotonic())

    def _log(self, until: float) -> None:
        """Write groups into the logs of steps where the first of them came before `until`."""
        for training_step, step in self._steps.items():
            if step.unlogged and step.unlogged_since <= until:
                self._append(training_step, rows_of(step.unlogged, start=self._start))
                step.logged += [entry for entry in step.unlogged if entry.outcome == CONSUMED]
                step.unlogged, step.unlogged_since = [], math.inf

    def _append(self, training_step: int, rows: pa.RecordBatch) -> None:
        with open(self._places.open_log(training_step), "ab", buffering=0) as file:
            open_log.append(file, rows)

    def _carry_over(self, training_step: int, prompt_id: str) -> None:
        for path in self._places.undone_open_logs():
            batches = [rows for batch in open_log.read(path) if (rows := _of_prompt(batch, prompt_id)).num_rows]
            if batches:
                self._append(training_step, batches[-1])
                return

    def _commit(self, training_step: int, values: LearnerValues | None) -> None:
        step = self._steps.pop(training_step, _OpenStep())
        trained = dict(_trained_tokens(step, values))
        log = self._places.open_log(training_step)
        batches = [_left_out(batch) for batch in open_log.read(log)] if log.exists() else []
        batches.append(rows_of([*step.logged, *step.unlogged], trained, start=self._start))
        _write_table(self._places.step(training_step), batches)
        log.unlink(missing_ok=True)
        if self._keep_steps is not None:
            self._places.step(training_step - self._keep_steps).unlink(missing_ok=True)


def _trained_tokens(step: _OpenStep, values: LearnerValues | None) -> Iterator[tuple[int, TrainedTokens]]:
    """What the learners did with each sample, by the `id` of its tokens."""
    readers = None if values is None else [_Reader(own) for own in values]
    for rank_batches, samples in step.partial_batches:
        for rank, mini_batches in enumerate(rank_batches):
            for number, micro_batches in enumerate(mini_batches):
                for micro_number, numbers in enumerate(micro_batches):
                    for position, sample_number in enumerate(numbers):
                        sample = samples[sample_number]
                        own = {} if readers is None else readers[rank].take(sample.num_trained)
                        tokens = TrainedTokens(sample, rank, number, micro_number, position, **own)
                        yield id(sample.response), tokens


class _Reader:
    """Gives the values of the next tokens of a rank."""

    def __init__(self, values: dict[str, np.ndarray | None]) -> None:
        self._values = values
        self._at = 0

    def take(self, number: int) -> dict[str, np.ndarray | None]:
        begins, self._at = self._at, self._at + number
        return {name: None if array is None else array[begins : self._at] for name, array in self._values.items()}


def _of_prompt(batch: pa.RecordBatch, prompt_id: str) -> pa.RecordBatch:
    return batch.filter(pc.field("prompt_id") == prompt_id)


def _left_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of groups that no step trains on."""
    return batch.filter(pc.field("outcome") != CONSUMED)


def _write_table(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write a file that is there whole or not at all."""
    with _replaced(path) as file:
        pq.write_table(pa.Table.from_batches(batches, SAMPLES), file, **PARQUET_OPTIONS)
