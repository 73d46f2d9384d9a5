"""The runs in directories, each with what was read of it so far."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from open_instruct.record.places import RECORD
from open_instruct.record.reader import NoRecord, RunRecord
from open_instruct.watch.caches import FileCache
from open_instruct.watch.decoding import Decoder
from open_instruct.watch.metrics_table import MetricsFile, MetricsTable
from open_instruct.watch.mistakes import Mistake

LEVELS_DOWN = 3
"""How deep runs are looked for in a directory."""
MOST_VALUES = 256 << 20
"""Bytes of small values, counted as 4 KB each."""
METRICS_FILE, OPTIONS_FILE, PROMPTS_FILE = "metrics.jsonl", "options.json", "prompts.jsonl"
Prompts = list[tuple[int, list[dict[str, Any]]]]
"""For each line of `prompts.jsonl` the step, and its prompts: `prompt_id`, `row`, `fate`, …"""


class Run:
    """One run: its record, metrics, options and tokenizer. What was read is kept until its file changes.

    Views are functions of a run and of plain arguments.
    """

    def __init__(self, directory: Path, cache: FileCache) -> None:
        self.directory = directory
        self._cache = cache
        """Tables, of which those are kept that were used last."""
        self._values = FileCache(MOST_VALUES)
        """Small values, of which all are kept that a run has."""
        self._metrics = MetricsFile(directory / METRICS_FILE)

    @cached_property
    def record(self) -> RunRecord:
        """Raises `Mistake` if the run has none."""
        try:
            return RunRecord(self.directory)
        except NoRecord as error:
            raise Mistake(str(error)) from None

    @property
    def has_record(self) -> bool:
        return (self.directory / RECORD).is_dir()

    # --- samples ------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps with samples, trained or open, in order."""
        return sorted({*self.record.steps(), *self.record.open_steps()})

    def is_open(self, step: int) -> bool:
        """Whether the step is not trained yet. Raises `Mistake` if the record does not have it."""
        return self.path_of(step).suffix != ".parquet"

    def table(self, step: int, columns: Sequence[str]) -> pa.Table:
        """Columns of the samples of a step. Raises `Mistake` if the record does not have the step."""
        return self._read(self.path_of(step), columns, lambda: self.record.samples(step, columns))

    def evaluation_table(self, version: int, set_name: str, columns: Sequence[str]) -> pa.Table:
        """Columns of the samples of an evaluation. Raises `Mistake` if it was not measured."""
        path = self.record.places.evaluation(version, set_name)
        if not path.exists():
            raise Mistake(self._no_evaluation(version, set_name))
        return self._read(path, columns, lambda: self.record.evaluation(version, set_name, columns))

    def _read(self, path: Path, columns: Sequence[str], read: Any) -> pa.Table:
        try:
            return self._cache.get(path, tuple(columns), read, lambda table: table.nbytes)
        except (KeyError, OSError):  # the step was trained, or its samples were removed, between two looks
            return self._cache.get(path, tuple(columns), read, lambda table: table.nbytes)

    def path_of(self, step: int) -> Path:
        """The file of a step. Raises `Mistake` if the record does not have it."""
        places = self.record.places
        for path in (places.step(step), places.open_log(step)):
            if path.exists():
                return path
        steps = self.steps()
        if not steps:
            raise Mistake(f"{self.directory} has no samples of any step yet. Wait until its first step has groups.")
        nearest = min(steps, key=lambda other: abs(other - step))
        raise Mistake(
            f"the record has no step {step}. It has {len(steps)} steps from {steps[0]} to {steps[-1]}; the nearest is {nearest}."
        )

    def _no_evaluation(self, version: int, set_name: str) -> str:
        names = ", ".join(f"{file.set} at {file.version}" for file in self.record.evaluations()[-20:])
        return f"the record has no evaluation of {set_name} at version {version}. It has: {names or 'none'}."

    def cached(self, path: Path, kind: str, make: Any) -> Any:
        """What `make` makes from a file, until the file changes."""
        return self._values.get(path, kind, make)

    # --- the run ------------------------------------------------------------------------------------------------------

    def metrics(self) -> MetricsTable:
        return self._metrics.table()

    def prompts(self) -> Prompts:
        """The prompts of all steps."""
        return self.cached(self.directory / PROMPTS_FILE, "prompts", lambda: [*self.record.prompt_rows()])

    def prompt_events(self) -> dict[str, list[dict[str, Any]]]:
        """Issues and failures of training prompts, by prompt."""

        def by_prompt() -> dict[str, list[dict[str, Any]]]:
            events: dict[str, list[dict[str, Any]]] = {}
            for event in self.record.prompt_events():
                events.setdefault(event["prompt_id"], []).append(event)
            return events

        return self.cached(self.record.places.prompts, "prompt events", by_prompt)

    def events(self) -> list[dict[str, Any]]:
        """Events of the driver; none without a record."""
        if not self.has_record:
            return []
        return self.cached(self.record.places.events, "events", self.record.events)

    def starts(self) -> list[dict[str, Any]]:
        """Starts of the run; none without a record."""
        if not self.has_record:
            return []
        return self.cached(self.record.places.starts, "starts", self.record.starts)

    def options(self) -> dict[str, Any]:
        """`options.json`; empty if there is none."""
        path = self.directory / OPTIONS_FILE
        return self.cached(path, "options", lambda: read_options(path))

    def option(self, name: str) -> Any:
        """An option in force; None if it is not known."""
        return self.options().get("in_force", {}).get(name)

    @cached_property
    def decode(self) -> Decoder:
        """The tokenizer of the run."""
        names = [self.option("tokenizer_name_or_path") or self.option("model_name_or_path") or ""]
        started_in = Path(self.options().get("directory", "."))
        models = [self.directory / "model", *sorted(self.directory.glob("step_*"), reverse=True)[:1]]
        return Decoder([self.directory, *(started_in / name for name in names if name), *models], names[0])


def read_options(path: Path) -> dict[str, Any]:
    """The content of an `options.json`; empty if it is not there or not whole."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Runs:
    """The runs that were found in directories, in the order of their names."""

    def __init__(self, directories: Sequence[str | Path]) -> None:
        self._directories = [Path(directory) for directory in directories]
        self._cache = FileCache()
        self._runs: dict[Path, Run] = {}
        for directory in self._directories:
            if not directory.is_dir():
                problem = "is no directory" if directory.exists() else "there is no such directory"
                raise Mistake(
                    f"{directory}: {problem}. Give the --output_dir of a run, or a folder that holds such directories."
                )
        self.refresh()

    def refresh(self) -> list[Run]:
        """Look for runs again. A run keeps its number, and new runs come last."""
        for directory in self._directories:
            for place in _runs_in(directory):
                self._runs.setdefault(place, Run(place, self._cache))
        if not self._runs:
            names = ", ".join(map(str, self._directories))
            raise Mistake(
                f"{names}: no run is in there. Give the --output_dir of a run, or a folder that holds such directories."
            )
        return list(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, number: int) -> Run:
        runs = list(self._runs.values())
        if not 0 <= number < len(runs):
            raise Mistake(
                f"there is no run {number}: {len(runs)} were found, numbered from 0. The view `runs` names them."
            )
        return runs[number]


def _runs_in(directory: Path, levels: int = LEVELS_DOWN) -> list[Path]:
    """Output directories of runs: the directory itself, or those in it."""
    if not directory.is_dir():
        return []
    if any((directory / name).exists() for name in (RECORD, METRICS_FILE, OPTIONS_FILE)):
        return [directory]
    if levels == 0:
        return []
    folders = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for folder in folders for run in _runs_in(folder, levels - 1)]
