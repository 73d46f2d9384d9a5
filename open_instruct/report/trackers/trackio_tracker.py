"""trackio: a database for each project in trackio's own folder (`TRACKIO_DIR`), or the Space that `TRACKIO_SPACE_ID` names."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from open_instruct.report.histogram import is_histogram
from open_instruct.report.metrics_file import to_json_value
from open_instruct.report.tracker import BackgroundTracker, TrackerOptions

if TYPE_CHECKING:
    from trackio import Run

ID_CHARACTERS = 6
"""Of the run's id, in its name: trackio finds a run by its name, and runs of other directories may have the same title."""


class TrackioTracker(BackgroundTracker):
    """Numbers, texts, histograms, tables and alerts. A resumed run goes on as the same run, without its later steps."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        super().__init__("trackio")
        self._options = options
        self._config = config
        self._open_run: Run | None = None

    @property
    def _run(self) -> "Run":
        if self._open_run is None:
            self._open_run = self._open()
        return self._open_run

    @property
    def run_name(self) -> str:
        return f"{self._options.name}-{self._options.run_id[:ID_CHARACTERS]}"

    def _open(self) -> "Run":
        import trackio

        return trackio.init(
            project=self._options.project,
            name=self.run_name,
            group=self._options.group,
            config=to_json_value(self._config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def _start(self, after_step: int) -> None:
        cut_later_rows(self._options.project, self.run_name, after_step)
        _ = self._run

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        import trackio

        values = {
            name: trackio.Histogram(np_histogram=(value["counts"], value["edges"])) if is_histogram(value) else value
            for name, value in row.items()
            if value is not None
        }
        self._run.log(values, step=step)

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        import pandas
        import trackio

        texts = [
            {key: str(value) if isinstance(value, list | dict) else value for key, value in row.items()} for row in rows
        ]
        self._run.log({name: trackio.Table(dataframe=pandas.DataFrame(texts))}, step=step)

    def _alert(self, title: str, text: str, step: int) -> None:
        from trackio import AlertLevel

        self._run.alert(title=title, text=f"step {step}: {text}", level=AlertLevel.WARN)

    def _finish(self, exit_code: int) -> None:
        if self._open_run is not None:
            self._open_run.finish()


def cut_later_rows(project: str, run_name: str, after_step: int) -> None:
    """Remove the rows of later steps from trackio's database on this machine, which is made if there is none. A Space keeps them,
    and shows the later row too. trackio 0.43 has no call for that.

    Raises:
        OSError: the database cannot be made; trackio itself would only warn, once rows are lost.
    """
    from trackio.sqlite_storage import SQLiteStorage

    path = SQLiteStorage.init_db(project)
    with SQLiteStorage._get_process_lock(project), SQLiteStorage._get_connection(path) as connection:
        for table in ("metrics", "alerts"):
            connection.execute(f"DELETE FROM {table} WHERE run_name = ? AND step > ?", (run_name, after_step))
