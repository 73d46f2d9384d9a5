"""Everything a run leaves behind that is not a checkpoint: `metrics.jsonl`, wandb, the live line, the table, the plot."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_instruct.config import GRPOConfig
from open_instruct.logger_utils import (
    STEP_KEY,
    MetricsWriter,
    Progress,
    ProgressLine,
    TrackerOptions,
    make_tracker,
    setup_logging,
)
from open_instruct.run_summary import RunSummary, format_summary_table, plot_reward_curve, write_summary

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PROMPTS_FILE = "prompts.jsonl"
SUMMARY_FILE = "summary.json"
PLOT_FILE = "reward_curve.png"


class RunLog:
    """The driver's one place to tell things. A row of metrics waits for the evaluation of its step before it is written."""

    def __init__(self, args: GRPOConfig) -> None:
        self._args = args
        self._output_dir = Path(args.output_dir)
        setup_logging(self._output_dir, args.verbose)
        self._writer = MetricsWriter(self._output_dir / METRICS_FILE)
        self._prompts = MetricsWriter(self._output_dir / PROMPTS_FILE)
        self._tracker = make_tracker(args.with_tracking, self._tracker_options(), dataclasses.asdict(args))
        self._line: ProgressLine | None = None
        self._waiting: dict[str, Any] | None = None
        self._last_accuracy: float | None = None
        self._exit_code = 1

    def _tracker_options(self) -> TrackerOptions:
        args = self._args
        return TrackerOptions(
            project=args.wandb_project,
            entity=args.wandb_entity,
            group=args.wandb_group_name,
            name=args.run_title,
            run_id=hashlib.sha256(str(self._output_dir.resolve()).encode()).hexdigest()[:16],
            output_dir=str(self._output_dir),
        )

    def data(self, num_rows: int, *, num_overlong: int, num_excluded: int) -> None:
        """What was left out of a data set before the run."""
        limit = self._args.max_prompt_token_length
        logger.info(
            "%d rows of data read; left out: %d prompts longer than %d tokens, %d held out for evaluation",
            num_rows,
            num_overlong,
            limit,
            num_excluded,
        )

    def started(self, training_step: int, checkpoint: Path | None) -> None:
        """The step loop begins after `training_step`; rows that an earlier process wrote beyond it are cut."""
        last_kept = training_step if checkpoint is not None else -1
        num_cut = self._writer.truncate_after(last_kept)
        self._prompts.truncate_after(last_kept)
        if checkpoint is not None:
            logger.info("going on from %s after step %d (%d later rows cut)", checkpoint, training_step, num_cut)
        self._line = ProgressLine(self._args.num_training_steps, first_step=training_step)

    def step(self, row: dict[str, Any]) -> None:
        """The row of a completed training step."""
        self.flush()
        self._waiting = row
        if self._line is not None:
            self._line.update(
                Progress(
                    step=row[STEP_KEY],
                    reward=row["scores"],
                    tokens_per_second=row["learner_tokens_per_second_step"],
                    prompt_queue=row["queue/prompts"],
                    result_queue=row["queue/results"],
                    age=row["num_steps_off_policy"],
                    eval_accuracy=self._last_accuracy,
                )
            )

    def prompts(self, training_step: int, fates: list[dict[str, object]]) -> None:
        """Which prompts the step was made of, and what became of each."""
        self._prompts.write(training_step, {"prompts": fates})

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """The evaluation of the weights after step `version`: part of that step's row where it is not written yet."""
        self._last_accuracy = metrics["eval/pass_at_1"]
        logger.info("evaluation after step %d: %.1f%% right", version, 100 * self._last_accuracy)
        if self._waiting is None or self._waiting[STEP_KEY] != version:
            self.flush()
            self._waiting = {STEP_KEY: version}
        self._waiting |= metrics

    def flush(self) -> None:
        """Write the row that waits."""
        if self._waiting is not None:
            row, self._waiting = self._waiting, None
            self._writer.write(row[STEP_KEY], row)
            self._tracker.log(row, row[STEP_KEY])

    def ended(self, summary: RunSummary, *, exit_code: int) -> RunSummary:
        """The loop is over: plot, `summary.json`, table."""
        self._exit_code = exit_code
        self.flush()
        self._close_line()
        plot = plot_reward_curve(self._output_dir / METRICS_FILE, self._output_dir / PLOT_FILE)
        summary = dataclasses.replace(summary, plot=None if plot is None else str(plot))
        write_summary(self._output_dir / SUMMARY_FILE, summary)
        print(format_summary_table(summary), flush=True)
        return summary

    def failed(self, error: BaseException) -> None:
        """The run ends with an error that the user can do something about: one line, no traceback."""
        self._close_line()
        logger.error("%s", error)
        logger.debug("traceback", exc_info=error)

    def _close_line(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        self.flush()
        self._close_line()
        self._tracker.finish(self._exit_code)
        self._writer.close()
        self._prompts.close()
