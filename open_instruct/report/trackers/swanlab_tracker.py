"""SwanLab: its service if there is a key (`SWANLAB_API_KEY`), else files in `swanlab/` of the run's directory."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.report.metrics_file import to_json_value
from open_instruct.report.tracker import BackgroundTracker, TrackerOptions, numbers_of

if TYPE_CHECKING:
    from swanlab import Run

DIRECTORY = "swanlab"
TABLE_ROWS = 20
"""Most rows of a table that are sent, as texts."""


class SwanlabTracker(BackgroundTracker):
    """Numbers, and the first rows of tables as texts. A resumed run goes on as the same run in the service. Without a key each
    process writes a folder of its own, and the step of the newest folder counts."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        super().__init__("swanlab")
        self._options = options
        self._config = config
        self._open_run: Run | None = None

    @property
    def _run(self) -> "Run":
        if self._open_run is None:
            self._open_run = self._open()
        return self._open_run

    def _open(self) -> "Run":
        import swanlab

        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        same_run = {"id": self._options.run_id, "resume": "allow"} if mode == "online" else {}
        directory = Path(self._options.output_dir, DIRECTORY)
        directory.mkdir(parents=True, exist_ok=True)
        hook = sys.excepthook
        try:
            return swanlab.init(
                project=self._options.project,
                workspace=self._options.entity,
                name=self._options.name,
                group=self._options.group,
                log_dir=str(directory),
                mode=mode,
                config=to_json_value(self._config),
                settings=swanlab.Settings(
                    interactive=False,  # it must not ask for a key
                    terminal=swanlab.Settings.Terminal(proxy_type="none"),  # nor record the live line
                    probe=swanlab.Settings.Probe(monitor=False, conda=False, requirements=False, git=False),
                ),
                **same_run,
            )
        finally:
            sys.excepthook = hook  # ours masks secrets

    def _start(self, after_step: int) -> None:
        _ = self._run

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        self._run.log(numbers_of(row), step=step)

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        import swanlab

        texts = ["\n".join(f"{key}: {value}" for key, value in row.items()) for row in rows[:TABLE_ROWS]]
        self._run.log({name: [swanlab.Text(text) for text in texts]}, step=step)

    def _finish(self, exit_code: int) -> None:
        if self._open_run is not None:
            if exit_code == 0:
                self._open_run.finish()
            else:
                self._open_run.finish("crashed", error=f"exit code {exit_code}")
