"""Where the files of a record lie.

    record/
        record.json                        version of the format
        starts.jsonl, events.jsonl         written by the driver
        prompts.jsonl                      issues and failures of training prompts
        steps/000012.parquet               samples of a trained step, also those that it left out
        open/000013.log                    samples of a step that is not trained yet
        evaluations/000020_default.parquet
        undone/2/                          what start 2 of the run found of steps after its checkpoint

The controller writes everything but what the driver writes. No file has two writers.
"""

import json
import re
import shutil
from pathlib import Path

from open_instruct.record.schema import RECORD_VERSION
from open_instruct.storage.atomic_file import write_atomically

RECORD = "record"
"""Name of the folder in an output directory."""


class RecordPlaces:
    """The paths in the folder of a record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.about = root / "record.json"
        self.starts = root / "starts.jsonl"
        self.events = root / "events.jsonl"
        self.prompts = root / "prompts.jsonl"

    def step(self, training_step: int) -> Path:
        return self.root / "steps" / f"{training_step:06d}.parquet"

    def open_log(self, training_step: int) -> Path:
        return self.root / "open" / f"{training_step:06d}.log"

    def evaluation(self, version: int, set_name: str) -> Path:
        return self.root / "evaluations" / f"{version:06d}_{re.sub(r'[^A-Za-z0-9._-]', '_', set_name)}.parquet"

    def steps(self) -> dict[int, Path]:
        """Trained steps, in order."""
        return _numbered(self.root / "steps", ".parquet")

    def open_logs(self) -> dict[int, Path]:
        """Steps that are not trained yet, in order."""
        return _numbered(self.root / "open", ".log")

    def num_starts(self) -> int:
        """How often the run was started so far."""
        lines = self.starts.read_bytes().splitlines() if self.starts.exists() else []
        return sum(line.startswith(b'{"kind": "start"') for line in lines)

    def evaluations(self) -> list[Path]:
        return sorted((self.root / "evaluations").glob("[0-9]*_*.parquet"))

    def undone(self, training_step: int) -> list[Path]:
        """What earlier starts of the run have left of a step, the newest first: logs and Parquet files."""
        names = f"open/{training_step:06d}.log", f"steps/{training_step:06d}.parquet"
        starts = sorted(self.root.glob("undone/*"), key=lambda path: int(path.name), reverse=True)
        return [path for start in starts for name in names if (path := start / name).exists()]

    def make(self, training_step: int, start: int) -> list[int]:
        """Make the folders, and move what they hold of later steps and versions to `undone/`. Returns trained steps that have
        only their log, because the run was killed before their file was written."""
        for name in ("steps", "open", "evaluations"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        write_atomically(self.about, json.dumps({"version": RECORD_VERSION}).encode() + b"\n")
        steps, logs = self.steps(), self.open_logs()
        later = [path for step, path in [*steps.items(), *logs.items()] if step > training_step]
        later += [path for path in self.evaluations() if int(path.stem.partition("_")[0]) > training_step]
        for path in later:
            moved = self.root / "undone" / str(start) / path.relative_to(self.root)
            moved.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, moved)
        for step, path in logs.items():
            if step <= training_step and step in steps:
                path.unlink()
        return [step for step in logs if step <= training_step and step not in steps]


def _numbered(folder: Path, suffix: str) -> dict[int, Path]:
    paths = {int(path.stem): path for path in folder.glob(f"*{suffix}") if path.stem.isdigit()}
    return dict(sorted(paths.items()))
