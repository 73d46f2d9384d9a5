"""GRPO: sample with vLLM, verify, train with DeepSpeed, send the new weights back. The command line of the project.

    python open_instruct/grpo_fast.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_mixer_list reasoning_gym/chain_sum 1.0

    PromptOrder ─► RolloutController ──► param_prompt_Q ──► LLMRayActor × N    process_queue_continuously()
                      │   ▲                                      │   ▲
                      │   └── inference_results_Q ◄──────────────┘   │ weights of version t
                      ▼                                              │
                 MessageQueue ──► FullyAsyncTrainer ──► RayTrainGroup: PolicyTrainerRayProcess × M ──► ParameterSynchronizer

Each step of the loop below waits for the data of step t (unblocked by the controller), lets the learners train on it, sends
version t to every engine, and tells the controller, which then admits the prompts that the staleness bound allows. The other door
to the same loop is `fully_async_main.py`.
"""

import sys
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # run as a script, this folder would shadow top-level modules of the same names

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.util.queue import Queue

from open_instruct.cluster.failures import WeightsDiffer
from open_instruct.cluster.placement_plan import CannotPlace
from open_instruct.config.checks import collect_mistakes
from open_instruct.config.cli import UsageError, fail_with, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config
from open_instruct.config.model_support import problem_with_weights
from open_instruct.config.options import GRPOConfig
from open_instruct.data.run_identity import run_identity, says_which_data
from open_instruct.data.run_inputs import RunInputs, load_inputs
from open_instruct.learners.step_sums import NonfiniteSteps
from open_instruct.option_text import shown
from open_instruct.report.run_log import ComponentStatus, Monitor, RunLog
from open_instruct.report.run_summary import PromptCounts, RunSummary
from open_instruct.rollouts.controller import RolloutController
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.rollouts.rollout_state import FILE as ROLLOUT_STATE
from open_instruct.run import coordinator
from open_instruct.run.coordinator import ComponentDied, Parts, Timer
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer, TrainedStep
from open_instruct.run.parameter_synchronizer import ParameterSynchronizer
from open_instruct.run.rollout_manager import create_message_queue, create_queues
from open_instruct.run.run_saving import (
    checkpoint_store,
    is_complete,
    resumes_the_same_run,
    save_checkpoint,
    save_if_due,
    save_model,
    tell_that_it_is_complete,
)
from open_instruct.run.run_state import Progress
from open_instruct.run.weight_agreement import MismatchWatch, WeightAgreement
from open_instruct.storage.checkpoints import CheckpointStore, StorageNotShared
from open_instruct.storage.output_directory import UnusableDirectory, describe, held, is_of_storage
from open_instruct.system.interruption import Interrupted, ends_by_signals
from open_instruct.system.masking import mask_tracebacks

logger = logging.getLogger(__name__)

CONTROL_S = 60.0
"""Deadline of a call that only asks or tells something."""


@dataclass(frozen=True)
class Roles:
    """Classes and functions that a user may put in place of ours."""

    trainer: type[FullyAsyncTrainer] = FullyAsyncTrainer
    rollouter: type[RolloutController] = RolloutController
    monitor: Monitor | None = None
    """`custom_monitor(trainer_stats, rollouter_stats)`, every `--statistics_interval_s`."""
    component_log_file: str | None = None
    """A further log under the output directory, in the format that the fully async policy documents."""


@dataclass
class Run:
    """All that the step loop works with."""

    args: GRPOConfig
    parts: Parts
    log: RunLog
    store: CheckpointStore
    evaluates: bool
    trainer: FullyAsyncTrainer
    synchronizer: ParameterSynchronizer
    message_queue: MessageQueue
    timer: Timer
    identity: dict[str, Any]
    """What must be the same when the run goes on from a checkpoint."""
    mismatch_watch: MismatchWatch
    progress: Progress = field(default_factory=Progress)
    evaluation_of: int | None = None
    """Version whose evaluation is in flight."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run GRPO. Returns the exit code: 0 done, 1 failed, 85 ended by SIGTERM with a checkpoint, 130 ended by Ctrl-C."""
    mask_tracebacks()
    with ends_by_signals():
        args, inputs = read_options_and_data(sys.argv[1:] if argv is None else argv)
        return run(args, inputs)


def run(args: GRPOConfig, inputs: "RunInputs", roles: Roles = Roles()) -> int:
    """A whole run, or the rest of a run that was interrupted. Returns the exit code. `grpo_fast.py` and `fully_async_main.py`
    both come here once options and data are checked."""
    directories = [Path(args.output_dir), *([args.state_dir] if args.checkpoint_state_dir is not None else [])]
    try:
        with held(directories, "--output_dir"):
            return tell_that_it_is_complete(args) if is_complete(args) else _run_alone(args, inputs, roles)
    except UnusableDirectory as error:
        fail_with([str(error)])


def _run_alone(args: GRPOConfig, inputs: "RunInputs", roles: Roles) -> int:
    """A run that has its output directory to itself."""
    checkpoint_store(args).remove_partial()
    try:
        log = RunLog(args, monitor=roles.monitor, component_log_file=roles.component_log_file)
    except OSError as error:
        raise UnusableDirectory(
            f"--output_dir {args.output_dir}: {describe(error)}. Remove it, or give another one."
        ) from error
    for report in inputs.reports:
        log.data(report.num_rows, num_overlong=report.num_overlong, num_excluded=report.num_excluded)
        for warning in report.warnings():
            logger.warning("%s", warning)
    try:
        with coordinator.ray_cluster(args.stopped_timeout_s) as signals:
            current = set_up(args, inputs, roles, log, signals)
            patience_s = coordinator.SHUTDOWN_AFTER_FAILURE_S
            try:
                code = run_to_its_end(current)
                patience_s = coordinator.SHUTDOWN_S
                return code
            except Exception as error:
                tell_of_failure(log, error)  # before all is ended, which may take seconds
                return 1
            finally:
                current.parts.shut_down(patience_s)
    except Interrupted as interruption:
        return interruption.exit_code
    except Exception as error:  # before all parts were there
        tell_of_failure(log, error)
        return 1
    finally:
        log.close()


def tell_of_failure(log: RunLog, error: Exception) -> None:
    """One line that says why a run failed, for errors that a user can do something about. Other errors are raised again."""
    if is_of_storage(error):
        log.failed(RuntimeError(f"{describe(error)}{log.room_left()}. Make room and start the same command again."))
    elif isinstance(error, ComponentDied | NonfiniteSteps | StorageNotShared | TimeoutError | WeightsDiffer):
        log.failed(error)
    else:
        raise error


def run_to_its_end(run: Run) -> int:
    """From the newest checkpoint to the trained model, or to the next checkpoint if a signal comes; the exit code."""
    try:
        resume(run)
        start_queue_processing_on_actors(run)
        train(run)
        finish(run)
    except Interrupted as interruption:
        return stop_early(run, interruption)
    return 0


# --- before anything starts -------------------------------------------------------------------------------------------


def read_options_and_data(argv: Sequence[str]) -> tuple[GRPOConfig, RunInputs]:
    """Options, tokenizer and datasets, all checked; every mistake in one message and exit code 2."""
    inputs: list[RunInputs] = []
    try:
        config_cls, mistakes = config_class_with(read_lists(argv, MODULE_OPTIONS))
        args = parse_args(argv, config_cls, validators=[lambda _: mistakes, *validators(inputs)])
    except UsageError as error:
        fail_with(error.mistakes)
    return plain_config(args), inputs[0]


def validators(inputs: list[RunInputs]) -> list[Callable[[GRPOConfig], list[str]]]:
    """The checks before anything starts. The last check puts the data that it loads into `inputs`."""

    def data_is_that_of_the_run(args: GRPOConfig) -> list[str]:
        loaded, mistakes = load_inputs(args)
        inputs.extend([loaded] if loaded else [])
        return mistakes + resumes_the_same_run(args, loaded)

    return [collect_mistakes, weights_are_whole, data_is_that_of_the_run]


def weights_are_whole(args: GRPOConfig) -> list[str]:
    """What is wrong with the weights of a model in a directory. Files of the hub are checked when they are fetched."""
    directory = Path(args.model_name_or_path)
    problem = problem_with_weights(directory) if os.path.isfile(directory / "config.json") else ""
    return [f"{shown(args, 'model_name_or_path')}: {problem}"] if problem else []


# --- start and end of the parts ---------------------------------------------------------------------------------------


def set_up(args: GRPOConfig, inputs: RunInputs, roles: Roles, log: RunLog, signals: coordinator.Signals) -> Run:
    """Create the queues, the actors, and the objects of the driver that work with them."""
    param_prompt_Q, inference_results_Q = create_queues(args)
    message_queue = create_message_queue(args)
    parts = start_parts(args, inputs, (param_prompt_Q, inference_results_Q), message_queue, roles, signals)
    timer = Timer()
    return Run(
        args=args,
        parts=parts,
        log=log,
        store=checkpoint_store(args),
        evaluates=inputs.eval_dataset is not None,
        trainer=roles.trainer(args, parts, message_queue, timer),
        synchronizer=ParameterSynchronizer(args, parts, WeightAgreement(args, parts)),
        message_queue=message_queue,
        timer=timer,
        identity=run_identity(args, inputs),
        mismatch_watch=MismatchWatch(args),
    )


def start_parts(
    args: GRPOConfig,
    inputs: RunInputs,
    queues: tuple[Queue, Queue],
    message_queue: MessageQueue,
    roles: Roles,
    signals: coordinator.Signals,
) -> Parts:
    """Start controller, engines and learners side by side, where the cluster has room for them."""
    try:
        parts = coordinator.create_parts(args, inputs, queues, message_queue, signals, rollouter_cls=roles.rollouter)
    except CannotPlace as error:
        options = "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size", "colocate"
        fail_with([f"{shown(args, *options)}: {error}"])
    except StorageNotShared as error:
        fail_with([f"{shown(args, 'output_dir', 'checkpoint_state_dir')}: {error}"])
    try:
        parts.wait_until_ready(args)
    except BaseException:
        parts.shut_down()
        raise
    return parts


def resume(run: Run) -> None:
    """Go on from the newest checkpoint, if there is one; bring the weights to the engines either way."""
    newest = run.store.newest()
    parts, controller = run.parts, run.parts.manager.controller
    evaluation_was_under_way = False
    if newest is not None:
        path, progress = newest.path, Progress(**newest.state["progress"])
        for torn in newest.passed_over:
            logger.warning("a newer checkpoint is not whole and is passed over: %s", torn)
        if not says_which_data(newest.state["identity"]):
            logger.warning(
                "%s is of an earlier version: whether data and tokenizer are still the same is not known", path
            )
        loading = [
            *parts.group.async_load_checkpoint(str(path), progress.training_step),
            controller.load.remote(progress.training_step, str(path / ROLLOUT_STATE)),
        ]
        parts.wait(
            loading,
            what=f"loading {path}",
            timeout_s=run.args.init_timeout_s,
            limit="init_timeout_s",
            interruptible=True,
        )
        run.progress = progress
        evaluation_was_under_way = newest.state["evaluation_of"] is not None
    run.log.started(run.progress.training_step, newest.path if newest else None)
    run.synchronizer.sync(run.progress.training_step)
    if newest is not None and evaluation_is_missing(run, was_under_way=evaluation_was_under_way):
        start_evaluation(run)
    parts.wait(controller.start.remote(run.progress.training_step), what="the controller's start", timeout_s=CONTROL_S)


def start_queue_processing_on_actors(run: Run) -> None:
    """Let every engine serve the queues. The driver sees that an engine died by the reference that this call gives."""
    run.parts.supervisor.serve(list(range(len(run.parts.manager.rollout_engines))))
    run.parts.watch()


def stop_early(run: Run, interruption: Interrupted) -> int:
    """A signal came: write a checkpoint, so that the same command goes on from here."""
    logger.warning("%s: saving a checkpoint, then leaving", interruption)
    run.parts.is_ending = True
    save_checkpoint(run, is_last=True)
    run.log.ended(summarize(run), exit_code=interruption.exit_code)
    return interruption.exit_code


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """All training steps that are left."""
    args = run.args
    if run.evaluates and args.eval_on_step_0 and run.progress.training_step == 0:
        start_evaluation(run)
    for training_step in range(run.progress.training_step + 1, args.num_training_steps + 1):
        started = time.perf_counter()
        step = run.trainer.train_step(
            training_step,
            describe_progress=lambda: describe_progress(run),
            on_idle=lambda: give_weights_to_newcomers(run),
            before_training=lambda: let_learners_compute(run),
        )
        commit_step(run, training_step)
        with recorded(run, step, since=started):
            maybe_evaluate(run)
            sync_weights_and_prepare_prompts(run, training_step)
        save_if_due(run)
    maybe_evaluate(run)


def commit_step(run: Run, training_step: int) -> None:
    """The learners have trained the step: commit the fates of its prompts. A checkpoint from here on is one of this step."""
    run.progress.training_step = training_step
    commit = run.parts.manager.controller.commit.remote(training_step)
    fates = run.parts.wait(commit, what="the ledger", timeout_s=CONTROL_S)
    run.log.prompts(training_step, fates)


@contextmanager
def recorded(run: Run, step: TrainedStep, *, since: float) -> Iterator[None]:
    """Write the row of metrics of the step after the block, also if a signal ends the block, because the step was trained."""
    try:
        yield
    except Interrupted:
        record_step(run, step, seconds=time.perf_counter() - since)
        raise
    record_step(run, step, seconds=time.perf_counter() - since)


def give_weights_to_newcomers(run: Run) -> None:
    """Let replacements begin to serve. If all engines have a newer version after that, the controller is told."""
    version = run.synchronizer.give_weights_to_newcomers()
    if version is not None:
        told = run.parts.manager.controller.set_version.remote(version)
        run.parts.wait(told, what="the controller", timeout_s=CONTROL_S)


def let_learners_compute(run: Run) -> None:
    """With `--colocate`: once the engines have nothing left to do, hand the devices to the learners."""
    if run.parts.sharing.is_exclusive:
        maybe_evaluate(run)
    run.parts.sharing.learners_compute()


def describe_progress(run: Run) -> str:
    return run.parts.wait(
        run.parts.manager.controller.describe_progress.remote(), what="the controller", timeout_s=CONTROL_S
    )


def sync_weights_and_prepare_prompts(run: Run, training_step: int) -> None:
    """The step is trained: send its weights to every engine, and admit new prompts."""
    controller = run.parts.manager.controller
    sends = training_step % run.args.trigger_parameter_sync_step == 0 or evaluation_is_due(run)
    if sends:
        run.synchronizer.sync(training_step)
    if evaluation_is_due(run):
        start_evaluation(run)  # before training prompts are admitted: it does not stand behind them
    told = [run.message_queue.actor.set_version.remote(training_step)]
    if sends:
        told.append(controller.set_version.remote(training_step))
    run.parts.wait(told, what="the controller and the message queue", timeout_s=CONTROL_S)


def evaluation_is_due(run: Run) -> bool:
    every, step = run.args.local_eval_every, run.progress.training_step
    return run.evaluates and every > 0 and (step % every == 0 or step == run.args.num_training_steps)


def evaluation_is_missing(run: Run, *, was_under_way: bool) -> bool:
    """Whether the version that the run goes on from is still to be evaluated: that was cut off, or not yet begun.

    If `metrics.jsonl` has the evaluation already, its accuracy is that of the run again.
    """
    if not run.evaluates or not (was_under_way or evaluation_is_due(run)):
        return False
    accuracy = run.log.accuracy_at(run.progress.training_step)
    if accuracy is not None:
        run.progress.eval_accuracy_after = accuracy
    return accuracy is None


def start_evaluation(run: Run) -> None:
    """Issue the evaluation prompts. The engines keep their weights until `maybe_evaluate` has the results."""
    version = run.progress.training_step
    run.parts.wait(
        run.parts.manager.controller.start_evaluation.remote(version),
        what="the start of an evaluation",
        timeout_s=CONTROL_S,
    )
    run.evaluation_of = version


def maybe_evaluate(run: Run) -> bool:
    """Collect the evaluation in flight, if there is one. Comes before new weights, so that it measures one version.

    A signal ends the wait: an evaluation of 30 minutes would outlive the time that a scheduler gives. The resumed run begins with
    an evaluation of the weights of its checkpoint.
    """
    if run.evaluation_of is None:
        return False
    with run.timer("waiting_for_evaluation"):
        try:
            run.parts.wait(
                run.parts.manager.async_eval(run.evaluation_of),
                what=f"the evaluation of version {run.evaluation_of}",
                timeout_s=run.args.eval_timeout_s + 10,
                limit="eval_timeout_s",
                interruptible=True,
                on_poll=lambda: some_engine_serves(run),
            )
        except NobodyServes:
            logger.error(
                "the evaluation of version %d is lost: no engine is left with those weights", run.evaluation_of
            )
            run.parts.manager.controller.give_up_evaluation.remote()
            run.evaluation_of = None
            return False
    metrics = run.parts.wait(
        run.parts.manager.controller.take_evaluation.remote(), what="the evaluation's metrics", timeout_s=CONTROL_S
    )
    if "eval/pass_at_1" not in metrics:
        logger.error("the evaluation of version %d measured nothing: no verifier scored a prompt", run.evaluation_of)
        run.evaluation_of = None
        return True
    accuracy = metrics["eval/pass_at_1"]
    if run.evaluation_of == 0:
        run.progress.eval_accuracy_before = accuracy
    run.progress.eval_accuracy_after = accuracy
    run.log.evaluation(run.evaluation_of, metrics)
    run.evaluation_of = None
    return True


class NobodyServes(Exception):
    """All engines are being started again."""


def some_engine_serves(run: Run) -> None:
    if not run.parts.supervisor.serving:
        raise NobodyServes


def record_step(run: Run, step: TrainedStep, *, seconds: float) -> None:
    """One row of metrics. Rates are tokens over the wall time of this step, or of the whole run for `_overall`."""
    progress, args = run.progress, run.args
    progress.episode += args.num_samples_per_step
    progress.num_total_tokens += step.num_tokens
    progress.wall_seconds += seconds
    status = component_status(run)
    row = {
        "training_step": progress.training_step,
        "episode": progress.episode,
        "val/num_total_tokens": progress.num_total_tokens,
        "learner_tokens_per_second_step": step.num_tokens / seconds,
        "learner_tokens_per_second_overall": progress.num_total_tokens / progress.wall_seconds,
        "time/total": seconds,
        **step.metrics,
        **run.timer.take(),
        **run.synchronizer.take_metrics(),
        **run.parts.sharing.take_metrics(),
        **run.parts.supervisor.busy(),
        **status.as_metrics(),
    }
    run.log.step(row)
    run.log.components(status)
    run.mismatch_watch.check(progress.training_step, row)


def component_status(run: Run) -> ComponentStatus:
    """The statistics of each component, asked for side by side."""
    controller, queue = run.parts.wait(
        [run.parts.manager.controller.status.remote(), run.message_queue.get_statistics_ref()],
        what="the controller and the message queue",
        timeout_s=CONTROL_S,
    )
    for notice in controller["notices"]:
        logger.warning("the rollout controller: %s", notice)
    return ComponentStatus(
        trainer=run.trainer.get_statistics() | run.synchronizer.get_statistics(),
        rollouter=controller["statistics"],
        queue=queue,
        prompts=controller["prompts"],
        queues=controller["queues"],
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def finish(run: Run) -> None:
    """End the run: write a last checkpoint, the model, the plot and the table."""
    if run.args.checkpoint_state_freq > 0:
        save_checkpoint(run)
    model = save_model(run, Path(run.args.output_dir) / "model")
    run.log.ended(summarize(run, model=model), exit_code=0)


def summarize(run: Run, *, model: Path | None = None) -> RunSummary:
    """Close the ledger and add up. `checkpoint` is the saved model, or the newest checkpoint of a run cut short."""
    progress = run.progress
    counts = run.parts.wait(run.parts.manager.controller.close_ledger.remote(), what="the ledger", timeout_s=CONTROL_S)
    newest = run.store.newest()
    checkpoint = model or (newest.path if newest else None)
    return RunSummary(
        eval_accuracy_before=progress.eval_accuracy_before,
        eval_accuracy_after=progress.eval_accuracy_after,
        training_steps=progress.training_step,
        wall_seconds=progress.wall_seconds,
        tokens_per_second=progress.num_total_tokens / progress.wall_seconds if progress.wall_seconds else 0.0,
        prompts=PromptCounts(**{name: counts[name] for name in ("issued", "consumed", "dropped", "reissued")}),
        checkpoint=None if checkpoint is None else str(checkpoint),
        plot=None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
