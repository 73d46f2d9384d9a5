"""TensorBoard: event files in `tensorboard/` of the run's directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from open_instruct.report.histogram import is_histogram
from open_instruct.report.tracker import BackgroundTracker, TrackerOptions, numbers_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIRECTORY = "tensorboard"
TABLE_ROWS = 20
"""Most rows of a table that are shown, as text."""


class TensorboardTracker(BackgroundTracker):
    """Numbers, histograms, and the first rows of tables. A resumed run writes another file, whose first event makes readers drop
    the later steps of the files before."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        super().__init__("tensorboard")
        self._directory = Path(options.output_dir, DIRECTORY)
        self._config = config
        self._open_writer: SummaryWriter | None = None

    def _start(self, after_step: int) -> None:
        self._open_writer = self._open(after_step + 1)

    @property
    def _writer(self) -> "SummaryWriter":
        if self._open_writer is None:
            self._open_writer = self._open(None)
        return self._open_writer

    def _open(self, purge_step: int | None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._directory), purge_step=purge_step)
        options = _as_markdown([{"option": name, "value": value} for name, value in self._config.items()])
        writer.add_text("options", options, max(0, (purge_step or 0) - 1))
        return writer

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        for name, value in numbers_of(row).items():
            self._writer.add_scalar(name, value, step)
        for name, value in row.items():
            if is_histogram(value):
                self._log_histogram(name, value["counts"], value["edges"], step)
        self._writer.flush()  # a run that is killed keeps its rows

    def _log_histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        middles = (np.asarray(edges[1:]) + np.asarray(edges[:-1])) / 2
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=float(middles @ counts),
            sum_squares=float(middles**2 @ counts),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._writer.add_text(name, _as_markdown(rows[:TABLE_ROWS]), step)

    def _finish(self, exit_code: int) -> None:
        if self._open_writer is not None:
            self._open_writer.close()


def _as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown. What looks like Markdown or HTML in its cells stays text."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"] if rows else []
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row.values())) + " |" for row in rows)])


def _cell(value: Any) -> str:
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return "<code>" + text.replace("\n", "<br>") + "</code>"
