"""What `grpo_fast.run_to_its_end` and the loop of `grpo_fast.train` consist of, in the order in which it happens.

Step t waits for its data (unblocked by the controller), lets the learners train on it, sends version t to every engine, and calls
`set_version` on the controller, which then admits the prompts that the staleness bound allows. Prompts are sent in parallel with
the weights: an engine begins a prompt once it has the weights for which the prompt was issued, without waiting for other engines.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from open_instruct.data.run_identity import says_which_data
from open_instruct.learners.step_sums import NonfiniteSteps
from open_instruct.report.run_log import ComponentStatus
from open_instruct.report.run_summary import PromptCounts, RunSummary, SetAccuracy
from open_instruct.rollouts.batch_progress import BatchProgress
from open_instruct.rollouts.rollout_state import FILE as ROLLOUT_STATE
from open_instruct.run.evaluation_schedule import (
    CONTROL_S,
    due_sets,
    give_weights_to_replacements,
    maybe_evaluate,
    missing_sets,
    start_evaluation,
)
from open_instruct.run.fully_async_trainer import StepHooks, TrainedStep
from open_instruct.run.loading_report import LoadingReport
from open_instruct.run.rollout_news import NewsTeller, tell_last_news
from open_instruct.run.run_saving import (
    MODEL,
    changed_options,
    nothing_to_save,
    save_checkpoint,
    save_model,
)
from open_instruct.run.run_state import Progress, SetMeasure
from open_instruct.run.wiring import Run
from open_instruct.system.interruption import Interrupted

logger = logging.getLogger(__name__)


def resume(run: Run) -> None:
    """Resume from the newest checkpoint if there is one, and in any case bring the weights to the engines."""
    newest = run.store.newest()
    components, controller = run.components, run.components.rollouts.controller
    under_way: list[str] | None = []
    if newest is not None:
        path, progress = newest.path, Progress(**newest.state["progress"])
        for torn in newest.passed_over:
            logger.warning("a newer checkpoint is not whole and is passed over: %s", torn)
        if not says_which_data(newest.state["identity"]):
            logger.warning(
                "%s is of an earlier version: whether data and tokenizer are still the same is not known", path
            )
        if changed := changed_options(run.args, newest.state):
            logger.info("options that have changed since the checkpoint: %s", changed)
        loading = [
            *components.learners.async_load_checkpoint(str(path), progress.training_step),
            controller.load.remote(progress.training_step, str(path / ROLLOUT_STATE)),
        ]
        components.wait(
            loading,
            subject=f"loading {path}",
            timeout_s=run.args.init_timeout_s,
            limit="init_timeout_s",
            interruptible=True,
        )
        run.progress = progress
        under_way = newest.state.get("sets_under_way") if newest.state["evaluation_of"] is not None else []
    run.log.started(run.progress.training_step, newest.path if newest else None)
    with LoadingReport("the engines' first weights"):
        _sync(run, run.progress.training_step)
    if newest is not None and (missing := missing_sets(run, under_way)):
        start_evaluation(run, missing)
    components.wait(
        controller.start.remote(run.progress.training_step), subject="the controller's start", timeout_s=CONTROL_S
    )


def start_queue_processing_on_actors(run: Run) -> None:
    """Let every engine serve the queues. The supervisor keeps a reference per engine, which shows when the engine dies."""
    run.components.supervisor.serve(list(range(len(run.components.rollouts.rollout_engines))))
    run.components.health.watch()


def stop_early(run: Run, interruption: Interrupted, clock: "WallClock") -> int:
    """A signal came: write a checkpoint, so that the same command resumes from here."""
    run.components.health.is_ending = True
    tell_last_news(run)
    if nothing_new := nothing_to_save(run):
        logger.warning("%s: leaving without a new checkpoint, because %s", interruption, nothing_new)
    else:
        logger.warning("%s: saving a checkpoint, then leaving; the same command goes on from it", interruption)
    if not clock.has_started and run.store.newest() is not None:
        run.log.left(interruption.exit_code)  # the existing summary is that of the checkpoint
        return interruption.exit_code
    clock.lap()
    save_checkpoint(run, is_last=True)
    clock.lap()
    run.log.ended(summarize(run), exit_code=interruption.exit_code)
    return interruption.exit_code


# --- the loop ---------------------------------------------------------------------------------------------------------


class WallClock:
    """Adds wall time to the progress of a run. A second belongs to one step, or to the time after the last step.

    Saving a checkpoint is part of the step after it: if a step trains for 10 s and its checkpoint takes 2 s, the next step
    takes 12 s.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._since: float | None = None

    @property
    def has_started(self) -> bool:
        return self._since is not None

    def start(self) -> None:
        """What was timed before, such as the first send of the weights, is no part of the first step: the parts of its row
        would add up to more than its `time/total`."""
        self._since = time.perf_counter()
        self._run.timer.take()
        self._run.synchronizer.take_metrics()
        self._run.components.sharing.take_metrics()

    def lap(self) -> float:
        """Seconds since the last call, or since the start; 0 before the start. They are added to `wall_seconds`."""
        if self._since is None:
            return 0.0
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._run.progress.wall_seconds += seconds
        return seconds


def check_finite(run: Run, step: TrainedStep) -> None:
    """Raises `NonfiniteSteps` when the gradient was not finite in too many steps in a row. Before that it saves a checkpoint with
    the weights of the last step that had a finite gradient."""
    try:
        run.trainer.check_finite(step)
    except NonfiniteSteps:
        save_checkpoint(run, is_last=True)
        raise


@contextmanager
def committed(run: Run, step: TrainedStep) -> Iterator[None]:
    """The learners have trained the step: commit the fates of its prompts, in parallel with the block. A checkpoint that is
    written after the block belongs to this step, even if a signal ended the block."""
    training_step = run.progress.training_step = step.training_step
    commit = run.components.rollouts.controller.commit.remote(training_step, step.tokens)
    try:
        yield
    finally:
        fates = run.components.wait(commit, subject="the ledger", timeout_s=CONTROL_S)
        run.log.prompts(training_step, fates)


@contextmanager
def recorded(run: Run, step: TrainedStep, clock: WallClock) -> Iterator[None]:
    """Write the step's row of metrics after the block. A signal that ends the block does not prevent it, because the step was
    trained."""
    try:
        yield
    except Interrupted:
        record_step(run, step, seconds=clock.lap())
        raise
    record_step(run, step, seconds=clock.lap())


class LoopHooks(StepHooks):
    """What the step loop does while the trainer waits for the data of a step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._news = NewsTeller(run)

    def describe_progress(self) -> BatchProgress:
        return self._news.tell()

    def tell_news(self) -> None:
        self._news.tell_now_and_then()

    def on_idle(self) -> None:
        """Let replacements of engines begin to serve, and tell what is new."""
        give_weights_to_replacements(self._run)
        self._news.tell_now_and_then()

    def before_training(self) -> None:
        """With `--colocate`: once the engines have nothing left to do, hand the devices to the learners."""
        if self._run.components.sharing.is_exclusive:
            maybe_evaluate(self._run)
        self._run.components.sharing.learners_compute()


def sync_weights_and_prepare_prompts(run: Run, training_step: int) -> None:
    """The step is trained: send its weights to every engine, and admit new prompts.

    New prompts are admitted while the weights are being sent. With `--colocate` they are admitted afterwards, because an engine
    that starts a prompt takes memory that the learners still hold.
    """
    evaluated = due_sets(run)
    sends = training_step % run.args.trigger_parameter_sync_step == 0 or bool(evaluated)
    weights_come_first = run.components.sharing.is_exclusive
    if sends and weights_come_first:
        _sync(run, training_step)
    if evaluated:  # before training prompts are admitted, so that the evaluation does not queue behind them
        start_evaluation(run, evaluated)
    refs = tell_version(run, training_step, engines_get_it=sends)
    if sends and not weights_come_first:
        _sync(run, training_step)
    run.components.wait(refs, subject="the controller and the message queue", timeout_s=CONTROL_S)


def _sync(run: Run, version: int) -> None:
    with run.log.journal.span("sync", version=version):
        run.synchronizer.sync(version)


def tell_version(run: Run, version: int, *, engines_get_it: bool) -> list[Any]:
    """Set the version that the learners hold in the message queue, and the version that every engine gets in the controller.
    Returns references to their answers."""
    refs = [run.message_queue.actor.set_version.remote(version)]
    if engines_get_it:
        refs.append(run.components.rollouts.controller.set_version.remote(version))
    return refs


def record_step(run: Run, step: TrainedStep, *, seconds: float) -> None:
    """Record one row of metrics. Rates are tokens per second of wall time, of this step or (`_overall`) of the whole run."""
    progress, args = run.progress, run.args
    progress.episode += args.num_samples_per_step
    progress.num_total_tokens += step.num_tokens
    progress.num_total_prompt_tokens += step.num_prompt_tokens
    num_total = progress.num_total_tokens + progress.num_total_prompt_tokens
    status = component_status(run)
    row = {
        "training_step": progress.training_step,
        "episode": progress.episode,
        "global_step": progress.episode,  # open-instruct's name for the same
        "val/num_total_tokens": num_total,
        "val/num_total_response_tokens": progress.num_total_tokens,
        "learner_tokens_per_second_step": (step.num_tokens + step.num_prompt_tokens) / seconds,
        "learner_tokens_per_second_overall": num_total / progress.wall_seconds,
        "learner_response_tokens_per_second_step": step.num_tokens / seconds,
        "learner_response_tokens_per_second_overall": progress.num_total_tokens / progress.wall_seconds,
        "time/total": seconds,
        **step.metrics,
        **run.timer.take(),
        **run.synchronizer.take_metrics(),
        **run.components.sharing.take_metrics(),
        **run.components.activity.metrics(run.components.supervisor.serving),
        **status.as_metrics(),
    }
    has_bound = "objective/environment_reward" not in row and not run.args.reward_funcs  # these may give any reward
    for began, asleep_s in run.components.sharing.take_sleeps():
        run.log.journal.event("sleep", began=began, seconds=asleep_s)
    run.log.journal.event("step", step=progress.training_step, seconds=seconds, **_parts_of_step(row))
    run.log.step(row, highest_reward=status.highest_reward if has_bound else None)
    run.log.components(status)
    run.mismatch_watch.check(progress.training_step, row)


def _parts_of_step(row: dict[str, Any]) -> dict[str, float]:
    """The seconds of a step by what the driver did, in this order. Checkpoints and models are spans of their own."""
    names = {"waited_s": "time/trainer_waiting_for_data", "trained_s": "time/learners", "sync_s": "time/weight_sync"}
    return {part: row[name] for part, name in names.items() if name in row}


def component_status(run: Run) -> ComponentStatus:
    """The statistics of each component, asked for in parallel."""
    controller, queue = run.components.wait(
        [run.components.rollouts.controller.status.remote(), run.message_queue.get_statistics_ref()],
        subject="the controller and the message queue",
        timeout_s=CONTROL_S,
    )
    for warning in controller["warnings"]:
        logger.warning("%s", warning)
    return ComponentStatus(
        trainer=run.trainer.get_statistics() | run.synchronizer.get_statistics(),
        rollouter=controller["statistics"],
        queue=queue,
        prompts=controller["prompts"],
        queues=controller["queues"],
        highest_reward=controller["highest_reward"],
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def finish(run: Run, clock: WallClock) -> None:
    """End the run: write a last checkpoint, the model, the plot and the table."""
    clock.lap()
    if run.args.checkpoint_state_freq > 0:
        save_checkpoint(run, is_last=True)
    model = save_model(run, Path(run.args.output_dir) / MODEL, is_last=True)
    clock.lap()
    run.log.ended(summarize(run, model=model), exit_code=0)


def _set_accuracies(run: Run) -> dict[str, SetAccuracy]:
    if not run.args.measures_sets_apart:
        return {}
    nothing: SetMeasure = {"share": None, "reward": None}
    accuracies = {}
    for evaluation_set in run.evaluation_sets:
        before = run.progress.eval_sets_before.get(evaluation_set.name, nothing)
        after = run.progress.eval_sets_after.get(evaluation_set.name, nothing)
        accuracies[evaluation_set.name] = SetAccuracy(
            before["share"], after["share"], before["reward"], after["reward"]
        )
    return accuracies


def summarize(run: Run, *, model: Path | None = None) -> RunSummary:
    """Close the ledger and sum up the run. `checkpoint` is the saved model, or the newest checkpoint if the run was cut short."""
    progress = run.progress
    counts = run.components.wait(
        run.components.rollouts.controller.close_ledger.remote(), subject="the ledger", timeout_s=CONTROL_S
    )
    for step, rows in counts["left_out"].items():
        run.log.prompts(step, rows)
    newest = run.store.newest()
    checkpoint = model or (newest.path if newest else None)
    return RunSummary(
        eval_accuracy_before=progress.eval_accuracy_before,
        eval_accuracy_after=progress.eval_accuracy_after,
        eval_reward_before=progress.eval_reward_before,
        eval_reward_after=progress.eval_reward_after,
        eval_sets=_set_accuracies(run),
        training_steps=progress.training_step,
        wall_seconds=progress.wall_seconds,
        tokens_per_second=progress.num_total_tokens / progress.wall_seconds if progress.wall_seconds else 0.0,
        prompts=PromptCounts(**{name: counts[name] for name in ("issued", "consumed", "dropped", "reissued")}),
        checkpoint=None if checkpoint is None else str(checkpoint),
        plot=None,
    )
