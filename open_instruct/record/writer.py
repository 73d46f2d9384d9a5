"""Writes the record of samples, in a thread of its own in the controller.

    a step takes groups ─► add ─► open/000012.log          after a second, if the step is not trained by then
    its batch is sent   ─► sent                            which token went to which learner
    it is trained       ─► commit ─► steps/000012.parquet  whole or not at all; then the log goes
    it is issued, lost …   ─► note ─► prompts.jsonl
    an evaluation ends  ─► measured ─► evaluations/000020_default.parquet

What cannot be written is left out with a warning, and the run goes on.
"""

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from open_instruct.data_types import MiniBatch, TrainingSample
from open_instruct.record import open_log
from open_instruct.record.journal import line_of, open_for_lines
from open_instruct.record.places import RecordPlaces
from open_instruct.record.samples import RecordedGroup, TrainedTokens, rows_of
from open_instruct.record.schema import PARQUET_OPTIONS, SAMPLES, with_all_columns
from open_instruct.scored_groups import CONSUMED
from open_instruct.storage.atomic_file import _replaced
from open_instruct.storage.output_directory import describe

logger = logging.getLogger(__name__)

POLL_S = 0.05
LOG_AFTER_S = 1.0
"""How long a scored group may wait for others before it is written to the log; a crash loses as much."""
MOST_WAITING_BYTES = 2**30
"""Bytes of tokens that may wait to be written. On a disk that is too slow the record leaves out steps beyond that."""
BYTES_PER_TOKEN = 32
"""Ids, log-probs and masks, in a sample and in the batch."""
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
    carried_ids: list[str] = field(default_factory=list)
    """Prompts whose tokens only the record of an earlier start holds."""


class Exports(Protocol):
    """Writes other files from the rows of the record. The record's thread calls it."""

    def logged(self, training_step: int, table: pa.Table) -> None:
        """The log of an open step has these further rows."""

    def committed(self, training_step: int, table: pa.Table) -> None:
        """A step is trained, and these are its rows."""


class RecordWriter:
    """The record of samples of one run. All calls return at once.

    Args:
        directory: the folder of the record, such as `output/record`.
        training_step: the last step that is trained. What the folder holds of later steps is moved to `undone/`.
        keep_steps: keep the samples of this many steps, the newest; None: of all.
        exports: gets what is written. If it fails, it gets nothing any more, with one warning.
    """

    def __init__(
        self,
        directory: Path,
        training_step: int,
        *,
        keep_steps: int | None = None,
        exports: Exports | None = None,
    ) -> None:
        self._places = RecordPlaces(directory)
        self._start = 1
        self._keep_steps = keep_steps
        self._exports = exports
        self._steps: defaultdict[int, _OpenStep] = defaultdict(_OpenStep)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._dropped_steps: set[int] = set()
        """Steps that are not recorded because the disk was too slow."""
        self._lock = threading.Lock()
        self._lines: IO[bytes] | None = None
        """`prompts.jsonl`, once there is a line."""
        self._has_warned = False
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
        self._put_for(training_step, lambda: self._add(training_step, entry), _size_of([entry]))

    def carry_over(self, training_step: int, prompt_id: str) -> None:
        """A resumed step has left out this prompt, whose tokens only the record of an earlier start holds."""
        self._put_for(training_step, lambda: self._steps[training_step].carried_ids.append(prompt_id))

    def sent(self, training_step: int, rank_batches: list[list[MiniBatch]], samples: Sequence[TrainingSample]) -> None:
        """A batch of the step, or a partial batch, goes to the learners."""
        order = [[mini_batch.samples_of_micro_batches for mini_batch in own] for own in rank_batches]
        self._put_for(training_step, lambda: self._steps[training_step].partial_batches.append((order, samples)))

    def commit(self, training_step: int, values: LearnerValues | None = None) -> None:
        """The step is trained. `values`: what the learners say of its tokens; None: not known."""
        self._put_for(training_step, lambda: self._commit(training_step, values))

    def measured(self, version: int, set_name: str, groups: Sequence[RecordedGroup]) -> None:
        """An evaluation set was measured."""
        path = self._places.evaluation(version, set_name)
        self._put(lambda: _write_table(path, [rows_of(groups, start=self._start)]), _size_of(groups))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written, or the record has failed; False if neither came within `timeout_s`."""
        flushed = threading.Event()

        def log_all() -> None:
            self._log(math.inf)
            flushed.set()

        self._put(log_all)
        ends_at = time.monotonic() + timeout_s
        while not flushed.wait(POLL_S) and not self.failure:  # a record that has failed does nothing any more
            if time.monotonic() > ends_at:
                return False
        return True

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s`, and end the thread."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the record: the disk of %s is slow; what waits is not written", self._places.root)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _put(self, task: Callable[[], None], num_bytes: int = 0) -> bool:
        """Put a task that holds `num_bytes` until it is done. False if there is no room for it, so that it is left out."""
        if self.failure:
            return True
        with self._lock:
            if num_bytes and self._waiting_bytes + num_bytes > MOST_WAITING_BYTES:
                if not self._has_warned:
                    logger.warning("the record: the disk of %s is too slow, so steps are left out", self._places.root)
                self._has_warned = True
                return False
            self._waiting_bytes += num_bytes

        def do() -> None:
            with self._lock:
                self._waiting_bytes -= num_bytes
            task()

        self._tasks.put(do)
        return True

    def _put_for(self, training_step: int, task: Callable[[], None], num_bytes: int = 0) -> None:
        """Put a task for a step. A step for which there is no room once is left out as a whole."""

        def do_unless_dropped() -> None:
            if training_step not in self._dropped_steps:
                task()
            elif self._steps.pop(training_step, None) is not None:
                self._places.open_log(training_step).unlink(missing_ok=True)

        if training_step not in self._dropped_steps and not self._put(do_unless_dropped, num_bytes):
            self._dropped_steps.add(training_step)

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
        for step in self._places.make(training_step, self._start):
            _write_table(self._places.step(step), list(open_log.read(self._places.open_log(step))))
            self._places.open_log(step).unlink()

    def _note(self, event: Mapping[str, object]) -> None:
        if self._lines is None:
            self._lines = open_for_lines(self._places.prompts)
        self._lines.write(line_of({"start": self._start, **event}, has_free_text="cause" in event))

    def _add(self, training_step: int, entry: RecordedGroup) -> None:
        step = self._steps[training_step]
        step.unlogged.append(entry)
        step.unlogged_since = min(step.unlogged_since, time.monotonic())

    def _log(self, until: float) -> None:
        """Write groups into the logs of steps where the first of them came before `until`."""
        for training_step, step in self._steps.items():
            if step.unlogged and step.unlogged_since <= until:
                rows = rows_of(step.unlogged, start=self._start)
                self._append(training_step, rows)
                self._export(lambda exports, n=training_step, own=rows: exports.logged(n, pa.table(own)))
                step.logged += [entry for entry in step.unlogged if entry.outcome == CONSUMED]
                step.unlogged, step.unlogged_since = [], math.inf

    def _append(self, training_step: int, rows: pa.RecordBatch) -> None:
        with open(self._places.open_log(training_step), "ab", buffering=0) as file:
            open_log.append(file, rows)

    def _commit(self, training_step: int, values: LearnerValues | None) -> None:
        path, log = self._places.step(training_step), self._places.open_log(training_step)
        if training_step not in self._steps and path.exists():
            return  # it was committed before
        step = self._steps.pop(training_step, _OpenStep())
        if values is not None and not _fits(step, values):
            logger.warning("the record of step %d lacks the learners' log-probs: their number is wrong", training_step)
            values = None
        trained = dict(_trained_tokens(step, values))
        batches = list(self._carried(training_step, step.carried_ids))
        batches += [_left_out(batch) for batch in open_log.read(log)] if log.exists() else []
        batches.append(rows_of([*step.logged, *step.unlogged], trained, start=self._start))
        _write_table(path, batches)
        log.unlink(missing_ok=True)
        table = pa.Table.from_batches(batches, SAMPLES)
        self._export(lambda exports: exports.committed(training_step, table))
        if self._keep_steps is not None:
            for old_step, old_path in self._places.steps().items():
                if old_step <= training_step - self._keep_steps:
                    old_path.unlink()

    def _export(self, write: Callable[[Exports], None]) -> None:
        if self._exports is None:
            return
        try:
            write(self._exports)
        except Exception as error:  # what is made from the record must not end it
            self._exports = None
            reason = describe(error) if isinstance(error, OSError) else repr(error)
            logger.warning("nothing is exported from the record any more, and the run goes on: %s", reason)
            logger.debug("traceback", exc_info=error)

    def _carried(self, training_step: int, prompt_ids: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of these prompts from what earlier starts have left of the step."""
        missing = set(prompt_ids)
        for path in self._places.undone(training_step) if missing else []:
            batches = (
                open_log.read(path) if path.suffix == ".log" else with_all_columns(pq.read_table(path)).to_batches()
            )
            for batch in batches:
                rows = batch.filter(pc.field("prompt_id").isin(pa.array(sorted(missing), pa.string())))
                yield rows
                missing.difference_update(rows["prompt_id"].to_pylist())
        if missing:
            logger.warning(
                "the record of step %d lacks %d prompts that it left out before a resume", training_step, len(missing)
            )


def _size_of(entries: Sequence[RecordedGroup]) -> int:
    """Bytes of the tokens of these groups, about."""
    num_tokens = sum(len(sample.response_ids) for entry in entries for sample in entry.group.samples)
    return BYTES_PER_TOKEN * num_tokens


def _fits(step: _OpenStep, values: LearnerValues) -> bool:
    """Whether the learners have said something of each trained token, and of no other."""
    num_tokens = [0] * len(values)
    for rank_batches, samples in step.partial_batches:
        if len(rank_batches) != len(values):
            return False
        for rank, mini_batches in enumerate(rank_batches):
            numbers = [number for micros in mini_batches for own in micros for number in own]
            num_tokens[rank] += sum(samples[number].num_trained for number in numbers)
    lengths = [[len(array) for array in own.values() if array is not None] for own in values]
    return all(set(own) <= {number} for own, number in zip(lengths, num_tokens, strict=True))


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


def _left_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of groups that no step trains on."""
    return batch.filter(pc.field("outcome") != CONSUMED)


def _write_table(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write a file that is there whole or not at all."""
    with _replaced(path) as file:
        pq.write_table(pa.Table.from_batches(batches, SAMPLES), file, **PARQUET_OPTIONS)
