"""Reads the record of a run: while it runs, when it has ended, and when it was killed. Writes nothing."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from open_instruct.record import open_log
from open_instruct.record.journal import END, START
from open_instruct.record.places import RECORD, RecordPlaces
from open_instruct.record.schema import RECORD_VERSION, SAMPLES, version_of, with_all_columns


class NoRecord(ValueError):
    """The directory holds no record that this program reads; the text says why and what to do."""


class TornFile(NoRecord):
    """A file of the record is not whole, as a disk that was full or a copy that was cut off leave it. The text names it."""

    def __init__(self, path: Path, output_dir: Path, cause: object) -> None:
        self.path = path
        cause = " ".join(str(cause).split()).rstrip(".")
        super().__init__(f"{path.relative_to(output_dir)} is torn: {cause}; copy it again, or look at another step.")


@dataclass(frozen=True)
class EvaluationFile:
    """One measured evaluation set."""

    version: int
    set: str
    path: Path


class RunRecord:
    """The record of the run in an output directory. Every call reads what is on the disk now.

    Raises `NoRecord` if there is none, or one of a version that this program does not know.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.output_dir = Path(output_dir)
        self.places = RecordPlaces(self.output_dir / RECORD)
        if not self.places.root.is_dir():
            raise NoRecord(
                f"{output_dir} holds no record. Give the --output_dir of a run that was not started with --record False."
            )
        with suppress(FileNotFoundError):  # not written yet
            version = _version_in(self.places.about)
            if version != RECORD_VERSION:
                raise NoRecord(
                    f"{output_dir} has a record of version {version}, this program reads {RECORD_VERSION}. "
                    "Use the version of the project that wrote it."
                )

    # --- samples ------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Trained steps whose samples are there, in order."""
        return list(self.places.steps())

    def open_steps(self) -> list[int]:
        """Steps that are being put together or trained, in order."""
        trained = self.places.steps()
        return [step for step in self.places.open_logs() if step not in trained]

    def samples(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The samples of a step, trained or open; of an open step those that are there. Columns: `schema.SAMPLES`.

        Raises `KeyError` if the record has no such step, and `TornFile` if its file is not whole.
        """
        if (path := self.places.step(step)).exists():
            return self._read_table(path, columns)
        if (path := self.places.open_log(step)).exists():
            table = pa.Table.from_batches(open_log.read(path), SAMPLES)
            return table if columns is None else table.select(list(columns))
        raise KeyError(f"the record has no step {step}")

    def evaluations(self) -> list[EvaluationFile]:
        """The evaluations, in the order of versions."""
        return [
            EvaluationFile(int(version), name, path)
            for path in self.places.evaluations()
            for version, _, name in (path.stem.partition("_"),)
            if version.isdigit()
        ]

    def evaluation(self, version: int, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The samples of an evaluation set at a version. Raises `KeyError` if it was not measured, and `TornFile` if its file is
        not whole."""
        path = self.places.evaluation(version, name)
        if not path.exists():
            raise KeyError(f"the record has no evaluation of {name} at version {version}")
        return self._read_table(path, columns)

    def of_prompt(self, prompt_id: str) -> pa.Table:
        """All samples of a training prompt, also those of attempts that were discarded. Reads a column of every step, because
        `prompts.jsonl` names a prompt only in the step that settled it."""
        steps = [*self.steps(), *self.open_steps()]
        tables = (self.samples(step) for step in steps if prompt_id in self._prompt_ids(step))
        chosen = [table.filter(pc.field("prompt_id") == prompt_id) for table in tables]
        return pa.concat_tables([SAMPLES.empty_table(), *chosen])

    def _prompt_ids(self, step: int) -> set[str]:
        return set(self.samples(step, ["prompt_id"])["prompt_id"].to_pylist())

    def _read_table(self, path: Path, columns: Sequence[str] | None) -> pa.Table:
        try:
            schema = pq.read_schema(path)
            version = version_of(schema)
            if version == RECORD_VERSION:
                names = SAMPLES.names if columns is None else list(columns)
                table = pq.read_table(path, columns=[name for name in names if name in schema.names], use_threads=False)
                return with_all_columns(table).select(names) if table.num_columns < len(names) else table
        except FileNotFoundError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # the disk, not the file
                raise
            raise TornFile(path, self.output_dir, error) from None
        raise NoRecord(f"{path} is of version {version} of the record, this program reads {RECORD_VERSION}.")

    # --- the run ------------------------------------------------------------------------------------------------------

    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run in order, each with `end` (a dictionary, or None if it was killed or still runs)."""
        rows = list(_lines(self.places.starts))
        ends = {row["number"]: row for row in rows if row["kind"] == END}
        return [row | {"end": ends.get(row["number"])} for row in rows if row["kind"] == START]

    def events(self) -> list[dict[str, Any]]:
        """Events of the driver, in order."""
        return list(_lines(self.places.events))

    def prompt_events(self) -> Iterator[dict[str, Any]]:
        """What happened to training prompts, in order: `issued` (attempt, version), `lost` with an engine, `given_up` (engine,
        cause, is_tried_again)."""
        yield from _lines(self.places.prompts)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`."""
        return list(_lines(self.output_dir / "metrics.jsonl"))

    def prompt_rows(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Steps and their prompts, from `prompts.jsonl`."""
        for line in _lines(self.output_dir / "prompts.jsonl"):
            yield line["training_step"], line["prompts"]

    def options(self) -> dict[str, Any]:
        """`options.json`: the command line, and options as given, derived and in force. Empty if there is none.

        Raises `NoRecord` if the file is broken.
        """
        try:
            return json.loads((self.output_dir / "options.json").read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise NoRecord(f"{self.output_dir / 'options.json'} is broken: {error}; copy it again.") from None


def _version_in(path: Path) -> Any:
    """The version that a `record.json` names."""
    try:
        return json.loads(path.read_bytes())["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoRecord(f"{path} is torn: {error!r}; copy it again.") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of JSON. A line that is torn, or being written, is left out."""
    try:
        with open(path, "rb") as file:
            for line in file:
                with suppress(ValueError):
                    row = json.loads(line)
                    if line.endswith(b"\n") and isinstance(row, dict):
                        yield row
    except FileNotFoundError:
        return
