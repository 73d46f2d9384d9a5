"""All output of a run except checkpoints: `metrics.jsonl`, trackers, the live line, the table at the end, the plot."""

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.extensions import import_extensions
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.health import Monitor as HealthMonitor
from open_instruct.health.monitor import WINDOW
from open_instruct.record.journal import Journal, WarningEvents
from open_instruct.record.places import RECORD
from open_instruct.report import component_log
from open_instruct.report.accuracies import Accuracies
from open_instruct.report.answers_before_after import answers_before_and_after, rows_of
from open_instruct.report.isolation import Isolation
from open_instruct.report.live_line import Accuracy, Progress, ProgressLine
from open_instruct.report.log_files import setup_logging
from open_instruct.report.metrics_endpoint import open_endpoint
from open_instruct.report.metrics_file import (
    COMPLETIONS,
    STEP_KEY,
    MetricsWriter,
    newest_rows,
    read_metrics,
    write_lines,
)
from open_instruct.report.plots import plot_reward_curve
from open_instruct.report.run_summary import RunSummary, format_summary_table, write_summary
from open_instruct.report.tracker import TrackerOptions, Trackers, run_id_at
from open_instruct.report.trackers import make_tracker, tracker_names
from open_instruct.storage.checkpoints import files_in
from open_instruct.system.counted import counted
from open_instruct.system.interruption import tell

logger = logging.getLogger(__name__)

Monitor = Callable[[dict, dict], object]
"""A user's own `custom_monitor(trainer_stats, rollouter_stats)`."""

METRICS_FILE = "metrics.jsonl"
PROMPTS_FILE = "prompts.jsonl"
SUMMARY_FILE = "summary.json"
ALERTS = "alerts"
"""Key of a row: the texts of its alerts, by metric or `health/<rule>`."""
HEALTH = "health/"
"""Beginning of the keys of alerts that rules of health raised."""
COMPLETIONS_DIRECTORY = "completions"
PLOT_FILE = "reward_curve.png"


@dataclass(frozen=True)
class ComponentStatus:
    """Counts of the components of a run, under the names of the fully async policy."""

    trainer: dict[str, Any]
    """Counts of trainer and synchronizer."""
    rollouter: dict[str, Any]
    queue: dict[str, Any]
    """Counts of the message queue."""
    prompts: dict[str, Any]
    """Counts of the ledger."""
    queues: dict[str, int]
    """Items in the prompt and result queues, and groups that wait."""
    highest_reward: float | None = None
    """The highest reward that a verifier's score can give a response; None if it differs between rows."""

    def as_metrics(self) -> dict[str, Any]:
        """The counts as metrics for the row of a step."""
        return {
            **{f"prompts/{name}": count for name, count in self.prompts.items() if isinstance(count, int)},
            **{f"prompts/dropped_{reason}": count for reason, count in self.prompts["dropped"].items()},
            **{f"queue/{name}": size for name, size in self.queues.items()},
            **{f"queue/{name.removeprefix('queue_')}": value for name, value in self.queue.items()},
            **{
                f"training/{name}": self.trainer[key]
                for name, key in {
                    "global_step": "global_steps",
                    "param_version": "current_param_version",
                    "param_sync_count": "param_sync_count",
                }.items()
            },
            **self.rollouter,
            **self.queue,
            **self.trainer,  # last, because its version is the one being trained; the rollouter's is the one being served
        }


class RunLog:
    """The one place through which the driver reports."""

    def __init__(
        self, args: GRPOConfig, *, monitor: Monitor | None = None, component_log_file: str | None = None
    ) -> None:
        self._args = args
        self._monitor = monitor
        self._told_components_at = time.monotonic()
        self._milestones = component_log.RolloutMilestones(args.num_samples_per_step)
        self._output_dir = Path(args.output_dir)
        setup_logging(self._output_dir, args.verbose, component_log=component_log_file)
        self._writer = MetricsWriter(self._output_dir / METRICS_FILE)
        self._prompts = MetricsWriter(self._output_dir / PROMPTS_FILE)
        tracker = make_tracker(tracker_names(args), self._tracker_options(), dataclasses.asdict(args))
        self._tracker = Trackers([tracker, *open_endpoint(args)])
        self._isolation = Isolation("a report")
        import_extensions(args.health_modules)
        self._health = HealthMonitor() if args.health else HealthMonitor([])
        self.journal = Journal(self._output_dir / RECORD, is_on=args.record)
        self.journal.start(command=args.command_line, title=args.run_title)
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(WarningEvents(self.journal))
        self._line: ProgressLine | None = None
        self._storage: dict[str, int] = {}
        """Metrics of the newest checkpoint, for the next row."""
        self._accuracies: dict[str, Accuracy] = {}
        """The last of each evaluation set, by its name."""
        self._exit_code = 1

    def _tracker_options(self) -> TrackerOptions:
        args = self._args
        return TrackerOptions(
            project=args.wandb_project,
            entity=args.wandb_entity,
            group=args.wandb_group_name,
            name=args.run_title,
            run_id=run_id_at(self._output_dir),
            output_dir=str(self._output_dir),
        )

    def data(self, name: str, num_rows: int, *, num_overlong: int, num_excluded: int) -> None:
        """Log how many rows of the training or evaluation data were read, and how many prompts were left out."""
        limit = self._args.max_prompt_token_length
        parts = [f"{counted(num_overlong, 'prompt')} longer than {limit} tokens"] if num_overlong else []
        parts += [f"{num_excluded:,} held out for evaluation"] if num_excluded else []
        left_out = f"; left out: {', '.join(parts)}" if parts else ""
        logger.info("%s data: %s%s", name, counted(num_rows, "row"), left_out)

    def started(self, training_step: int, checkpoint: Path | None) -> None:
        """The step loop begins after `training_step`. Cuts the rows of later steps that an earlier process has written."""
        last_kept = training_step if checkpoint is not None else -1
        num_cut = self._writer.truncate_after(last_kept)
        self._tracker.started(last_kept)
        self._health.remember(newest_rows(self._writer.path, WINDOW))
        self._prompts.truncate_after(last_kept)
        self.journal.event("loop", after_step=training_step, checkpoint=checkpoint)
        if checkpoint is not None:
            logger.info(
                "going on from %s after step %d (%s cut)", checkpoint, training_step, counted(num_cut, "later row")
            )
        self._line = ProgressLine(self._args.num_training_steps, first_step=training_step)

    def step(self, row: dict[str, Any], *, highest_reward: float | None = None) -> None:
        """Write the row of a completed training step, and show the step on the live line.

        `highest_reward` is the highest reward that a response can have, if there is one.
        """
        step = row[STEP_KEY]
        row |= self._storage
        self._storage = {}
        row |= self._alerts(row, step)
        self._writer.write(step, row)
        self._tracker.log(row, step)
        if self._line is not None:
            self._line.update(
                Progress(
                    step=step,
                    reward=row["all_groups/scores"],
                    standard_error=row.get("all_groups/scores_standard_error"),
                    highest_reward=highest_reward,
                    tokens_per_second=row["learner_response_tokens_per_second_step"],
                    prompt_queue=row["queue/prompts"],
                    result_queue=row["queue/results"],
                    age=row["avg_sample_age"],
                    accuracies=list(self._accuracies.values()),
                    alarms=self._health.raised,
                )
            )

    def waiting(self, text: str) -> None:
        """Show on the live line how far the step is that is being put together."""
        if self._line is not None:
            self._line.wait(text)

    def components(self, status: ComponentStatus) -> None:
        """Log milestones of generation. Every `--statistics_interval_s`, log a line about all components and call the user's
        monitor."""
        for line in self._milestones.lines(status.rollouter):
            component_log.component_logger.info(line)
        if time.monotonic() - self._told_components_at < self._args.statistics_interval_s:
            return
        self._told_components_at = time.monotonic()
        component_log.component_logger.info(
            component_log.component_statistics(status.trainer, status.rollouter, status.queue)
        )
        component_log.component_logger.info(
            component_log.rollouter_stats(status.rollouter, queue_size=status.queue["queue_size"])
        )
        component_log.run_monitor(self._monitor, status.trainer, status.rollouter)

    def prompts(self, training_step: int, fates: list[dict[str, object]]) -> None:
        """Write which prompts the step was made from, and the outcome of each."""
        self._prompts.write(training_step, {"prompts": fates})

    def evaluation(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Add the evaluation of the weights after step `version` to the row of that step, or to a new row before the first step.
        Write its `sample_completions` to a file, and send them to trackers as a table."""
        metrics = dict(metrics)
        if rows := metrics.pop(COMPLETIONS, None):
            with self._isolation:
                path = self._output_dir / COMPLETIONS_DIRECTORY / f"step_{version:06d}.jsonl"
                write_lines(path, [*_of_other_sets(path, rows), *rows])
            self._tracker.log_table(COMPLETIONS, rows, version)
        self.journal.event("evaluation", version=version)
        if (accuracies := Accuracies.of(metrics)) is not None:
            self._remember(accuracies, version)
            logger.info("evaluation after step %d: %s", version, accuracies)
        row = self._writer.last_row() or {}
        alerts_of_step = row.get(ALERTS, {}) if row.get(STEP_KEY) == version else {}
        metrics |= self._alerts(metrics, version, alerts_of_step)
        self._writer.add(version, metrics)
        self._tracker.log(metrics, version)

    def _alerts(
        self, metrics: Mapping[str, Any], training_step: int, earlier: Mapping[str, str] | None = None
    ) -> dict[str, dict[str, str]]:
        """Log the metrics that are above their limits, and what the rules of health find. Returns an entry for the row with its
        earlier alerts and these, if there are any."""
        alerts = component_log.check_alerts(self._args.alerts, metrics)
        for alert in alerts.values():
            logger.warning("alert at step %d: %s", training_step, alert)
            self._tracker.alert("alert", alert, training_step)
        for alarm in self._health.look(training_step, metrics):
            logger.warning("%s at step %d: %s", alarm.rule, training_step, alarm)
            facts = {"text": alarm.text, "cure": alarm.cure, "link": alarm.link}
            self.journal.event("health", rule=alarm.rule, step=training_step, **facts)
            self._tracker.alert(alarm.rule, str(alarm), training_step)
            alerts[f"{HEALTH}{alarm.rule}"] = alarm.text
        return {ALERTS: {**(earlier or {}), **alerts}} if alerts else {}

    def _remember(self, accuracies: Accuracies, training_step: int) -> None:
        """From now on the live line shows these accuracies."""
        for name, measure in accuracies.by_name.items():
            self._accuracies[name] = Accuracy(measure.share, training_step, measure.reward, name)

    def accuracies_at(self, training_step: int) -> Accuracies | None:
        """Accuracies of the evaluation of that step, if an earlier process has written them. From now on the live line shows
        them."""
        for row in read_metrics(self._output_dir / METRICS_FILE):
            if row[STEP_KEY] == training_step and (accuracies := Accuracies.of(row)) is not None:
                self._remember(accuracies, training_step)
                return accuracies
        return None

    def ended(self, summary: RunSummary, *, exit_code: int) -> RunSummary:
        """The step loop is over: draw the plot, write `summary.json`, print the table."""
        self._exit_code = exit_code
        self.journal.end("done" if exit_code == 0 else "interrupted", exit_code)
        self._close_line()
        plot = plot_reward_curve(self._output_dir / METRICS_FILE, self._output_dir / PLOT_FILE)
        summary = dataclasses.replace(
            summary,
            plot=None if plot is None else str(plot),
            alarms=first_alarms(read_metrics(self._writer.path)),
        )
        write_summary(self._output_dir / SUMMARY_FILE, summary)
        with self._isolation:
            if answers := answers_before_and_after(self._output_dir / COMPLETIONS_DIRECTORY):
                tell(answers)
        tell(format_summary_table(summary))
        return summary

    def left(self, exit_code: int) -> None:
        """The run ends before its step loop began, so there is nothing to summarise."""
        self._exit_code = exit_code
        self.journal.end("interrupted", exit_code)

    def failed(self, error: BaseException) -> None:
        """The run ends with an error that the user can correct: log one line, and the traceback only at level DEBUG."""
        self._close_line()
        self.journal.end(f"failed: {error}", 1)
        logger.error("%s", error)
        logger.debug("traceback", exc_info=error)

    def checkpoint_written(self, directory: Path) -> None:
        """The next row says how large this checkpoint is, and how much room its disk has."""
        with self._isolation:
            num_bytes, free = sum(files_in(directory).values()), shutil.disk_usage(directory).free
            self._storage = {"storage/checkpoint_bytes": num_bytes, "storage/free_bytes": free}

    def room_left(self) -> str:
        """Free space on the disk in words, for the end of a message about the disk."""
        with contextlib.suppress(OSError):
            return f"; {shutil.disk_usage(self._output_dir).free / 2**20:.0f} MiB are free in {self._output_dir}"
        return ""

    def _close_line(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def sync(self) -> None:
        """Put all rows so far on the disk, so that rows from before a checkpoint survive a power loss, as the checkpoint does."""
        for writer in (self._writer, self._prompts):
            writer.sync()

    def close(self) -> None:
        self._close_line()
        self.journal.end("failed", self._exit_code)
        self._listening.close()
        self._tracker.finish(self._exit_code)
        self._writer.close()
        self._prompts.close()


def first_alarms(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """For each rule of health that raised an alarm in these rows: the first training step of the alarm."""
    steps: dict[str, int] = {}
    for row in rows:
        for key in row.get(ALERTS, ()):
            if key.startswith(HEALTH):
                steps.setdefault(key.removeprefix(HEALTH), row[STEP_KEY])
    return steps


def _of_other_sets(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of other evaluation sets that an earlier process has written of the same step."""
    names = {row.get("set") for row in rows}
    return [row for row in rows_of(path) if row.get("set") not in names] if path.is_file() else []
