"""MLflow: the server that `MLFLOW_TRACKING_URI` names, or a database in `mlflow/` of the run's directory."""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.report.tracker import BackgroundTracker, TrackerOptions, numbers_of

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DIRECTORY = "mlflow"
RUN_ID_TAG = "open_instruct.run_id"
MOST_METRICS, MOST_OPTIONS = 1000, 100
"""In one request; a server refuses more."""
LONGEST_OPTION = 6000
"""Characters of an option's value; a server refuses more."""
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables that are set unless the user has set them. By default a server that is away is asked for many minutes."""


class MlflowTracker(BackgroundTracker):
    """Numbers and tables. A resumed run goes on as the same run, in which a step that comes again gets another value; MLflow
    cannot remove the one before, which is the older of the two."""

    def __init__(self, options: TrackerOptions, config: Mapping[str, Any]):
        super().__init__("mlflow")
        self._options = options
        self._config = config
        self._client: MlflowClient | None = None
        self._run_id = ""

    @property
    def address(self) -> str:
        """Where the runs are, as MLflow writes it."""
        if address := os.environ.get("MLFLOW_TRACKING_URI"):
            return address
        self._directory.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{self._directory / 'mlflow.db'}"

    @property
    def _directory(self) -> Path:
        return Path(self._options.output_dir, DIRECTORY).absolute()

    def _new_experiment(self, client: "MlflowClient") -> str:
        """Without a server tables lie beside the database; by default MLflow puts them into the working directory."""
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (self._directory / "artifacts").as_uri()
        return client.create_experiment(self._options.project, artifact_location=artifacts)

    def _open(self) -> "MlflowClient":
        """The client, once there is a run to log to."""
        if self._client is not None:
            return self._client
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for library in ("mlflow", "alembic"):  # they tell how they make a database
            logging.getLogger(library).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.address)
        experiment = client.get_experiment_by_name(self._options.project)
        place = self._new_experiment(client) if experiment is None else experiment.experiment_id
        runs = client.search_runs([place], f"tags.`{RUN_ID_TAG}` = '{self._options.run_id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: self._options.run_id} | ({"group": self._options.group} if self._options.group else {})
            self._run_id = client.create_run(place, run_name=self._options.name, tags=tags).info.run_id
            self._log_options(client)
        self._client = client
        return client

    def _log_options(self, client: "MlflowClient") -> None:
        from mlflow.entities import Param

        options = [Param(name, str(value)[:LONGEST_OPTION]) for name, value in self._config.items()]
        for part in _parts(options, MOST_OPTIONS):
            client.log_batch(self._run_id, params=part)

    def _start(self, after_step: int) -> None:
        self._open()

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        client, now_ms = self._open(), int(time.time() * 1000)
        metrics = [Metric(metric_name(name), value, now_ms, step) for name, value in numbers_of(row).items()]
        for part in _parts(metrics, MOST_METRICS):
            client.log_batch(self._run_id, metrics=part)

    def _log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = {column: [row[column] for row in rows] for column in rows[0]}
        self._open().log_dict(self._run_id, columns, f"{name}/step_{step:06d}.json")

    def _finish(self, exit_code: int) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, "FINISHED" if exit_code == 0 else "FAILED")


def metric_name(name: str) -> str:
    """The name with `_` for characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
