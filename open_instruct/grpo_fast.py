"""GRPO: sample with vLLM, verify, train with DeepSpeed, send the new weights back. The command line of the project.

    python open_instruct/grpo_fast.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_mixer_list reasoning_gym/chain_sum 1.0

    PromptOrder ─► RolloutController ──► param_prompt_Q ──► LLMRayActor × N    process_queue_continuously()
                      │   ▲                                      │   ▲
                      │   └── inference_results_Q ◄──────────────┘   │ weights of version t
                      ▼                                              │
                 MessageQueue ──► FullyAsyncTrainer ──► RayTrainGroup: PolicyTrainerRayProcess × M ──► ParameterSynchronizer

The loop itself is `run/step_loop.py`. The other entry point to it is `fully_async_main.py`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # run as a script, this folder would shadow top-level modules of the same names
if not (find_spec("open_instruct") and find_spec("ray")):
    print(
        f"{sys.executable} lacks the packages of this project. Do `source .venv/bin/activate`, which", file=sys.stderr
    )
    print("`bash scripts/setup_cpu.sh` or `bash scripts/setup_gpu.sh` has made.", file=sys.stderr)
    raise SystemExit(2)

import logging
import os
from collections.abc import Callable, Sequence

from open_instruct.cluster.failures import ComponentDied, WeightsDiffer, root_cause
from open_instruct.cluster.pickled_queue import PickledQueue
from open_instruct.config.checks import collect_mistakes
from open_instruct.config.cli import UsageError, fail_with, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config, unused_modules
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import with_attention_that_fits
from open_instruct.config.model_support import problem_with_weights
from open_instruct.config.open_instruct_options import ForeignOptions
from open_instruct.data.run_inputs import RunInputs, load_inputs, names_of_data
from open_instruct.engines.vllm_plugin import plugins_are_found
from open_instruct.engines.vllm_tool_parsers import tool_parsers_are_there
from open_instruct.learners.step_sums import NonfiniteSteps
from open_instruct.option_text import shown
from open_instruct.registry import option_kinds
from open_instruct.report.metric_names import alerts_are_on_metrics
from open_instruct.report.metrics_endpoint import metrics_port_is_free
from open_instruct.report.run_log import RunLog
from open_instruct.report.slack import ADDRESSES, slack_address, tell_slack
from open_instruct.report.trackers import trackers_are_installed
from open_instruct.rollouts.data_preparation import DataPreparation
from open_instruct.run.components import SHUTDOWN_AFTER_FAILURE_S, SHUTDOWN_S
from open_instruct.run.dry_run import dry_run, workflow_and_cause
from open_instruct.run.earlier_run import set_aside
from open_instruct.run.evaluation_schedule import maybe_evaluate
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.run.options_file import command_of, write_options
from open_instruct.run.out_of_memory import KernelKills, memory_message
from open_instruct.run.page_beside import page_beside
from open_instruct.run.ray_session import ray_cluster
from open_instruct.run.rollout_manager import prompt_queue_size, queue_actor_options, results_queue_size
from open_instruct.run.rollout_news import tell_last_news
from open_instruct.run.run_saving import (
    checkpoint_store,
    is_complete,
    resumes_the_same_run,
    tell_that_it_is_complete,
)
from open_instruct.run.step_loop import (
    WallClock,
    finish,
    resume,
    start_queue_processing_on_actors,
    stop_early,
    sync_weights_and_prepare_prompts,
    train,
)
from open_instruct.run.wiring import DEFAULT_ROLES, Roles, Run, set_up
from open_instruct.storage.checkpoints import StorageNotShared
from open_instruct.storage.output_directory import UnusableDirectory, describe, held, is_of_storage
from open_instruct.system.interruption import Interrupted, ends_by_signals, tell
from open_instruct.system.secret_masking import mask_tracebacks, masked
from open_instruct.system.signals import Signals

logger = logging.getLogger(__name__)

data_preparation_thread = DataPreparation.data_preparation_thread
load_data_from_packing_thread = FullyAsyncTrainer.load_data_from_packing_thread
# Who knows open-instruct's script finds the steps of a run here under the names that they have there.
__all__ = [
    "data_preparation_thread",
    "load_data_from_packing_thread",
    "main",
    "maybe_evaluate",
    "run",
    "start_queue_processing_on_actors",
    "sync_weights_and_prepare_prompts",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run GRPO. Returns the exit code: 0 done, 1 failed, 85 ended by SIGTERM with a checkpoint, 130 ended by Ctrl-C."""
    mask_tracebacks()
    with ends_by_signals():
        args, inputs = read_options_and_data(sys.argv[1:] if argv is None else argv)
        return run(args, inputs)


def run(args: GRPOConfig, inputs: "RunInputs", roles: Roles = DEFAULT_ROLES) -> int:
    """A whole run, or the rest of a run that was interrupted. Returns the exit code. `grpo_fast.py` and `fully_async_main.py`
    both come here once options and data are checked."""
    if args.cache_dataset_only:
        tell(f"{len(inputs.train_dataset):,} prompts are checked and tokenized.")
        return 0
    if args.dry_run:
        if names := names_of_data(args, inputs):
            tell("\n".join(names))
        return dry_run(args)
    own_state_dir = [args.state_dir] if args.checkpoint_state_dir is not None else []
    try:
        with held([Path(args.output_dir)], "--output_dir"), held(own_state_dir, "--checkpoint_state_dir"):
            return tell_that_it_is_complete(args) if is_complete(args) else _run_alone(args, inputs, roles)
    except UnusableDirectory as error:
        fail_with([str(error)])


def _run_alone(args: GRPOConfig, inputs: "RunInputs", roles: Roles) -> int:
    """A run that has its output directory to itself."""
    kills = KernelKills()
    checkpoint_store(args).remove_partial()
    try:
        note = set_aside(args)
        write_options(args)
        log = RunLog(args, monitor=roles.monitor, component_log_file=roles.component_log_file)
    except OSError as error:
        raise UnusableDirectory(
            f"--output_dir {args.output_dir}: {describe(error)}. Remove it, or give another one."
        ) from error
    logger.info("command: %s", command_of(args) or "none: the options come from another program")
    logger.info("workflow: %s", workflow_and_cause(args))
    if note:
        logger.warning("%s", note)
    if args.send_slack_alerts and not slack_address():
        logger.warning(
            "--send_slack_alerts: nobody will be told, because the environment has no %s", " or ".join(ADDRESSES)
        )
    logger.info("%s", inputs.template.text)
    for warning in inputs.warnings:
        logger.warning("%s", warning)
    for number, report in enumerate(inputs.reports):  # that of the training data is the first
        name = "evaluation" if number else "training"
        log.data(name, report.num_rows, num_overlong=report.num_overlong, num_excluded=report.num_excluded)
        for warning in report.warnings():
            logger.warning("%s", warning)
    for line in names_of_data(args, inputs):
        logger.info("%s", line)
    try:
        with page_beside(args), ray_cluster(args.stopped_timeout_s) as signals:
            return _run_on_ray(args, inputs, roles, log, kills, signals)
    except Interrupted as interruption:
        return interruption.exit_code
    except Exception as error:  # before all components were there
        tell_of_failure(args, log, kills, error)
        return 1
    finally:
        log.close()


def _run_on_ray(
    args: GRPOConfig, inputs: "RunInputs", roles: Roles, log: RunLog, kills: KernelKills, signals: Signals
) -> int:
    """Create the queues and all actors, run to the end, and end the actors."""
    param_prompt_Q = PickledQueue(prompt_queue_size(args), queue_actor_options())
    inference_results_Q = PickledQueue(results_queue_size(args), queue_actor_options())
    current = set_up(args, inputs, roles, log, signals, queues=(param_prompt_Q, inference_results_Q))
    patience_s = SHUTDOWN_AFTER_FAILURE_S
    try:
        code = run_to_its_end(current)
        patience_s = SHUTDOWN_S
        return code
    except Exception as error:
        tell_of_failure(args, log, kills, error)  # before all components are ended, which may take seconds
        return 1
    finally:
        current.components.shut_down(patience_s)


def run_to_its_end(run: Run) -> int:
    """Run from the newest checkpoint to the trained model, or to the next checkpoint if a signal comes. Returns the exit code."""
    clock = WallClock(run)
    try:
        resume(run)
        start_queue_processing_on_actors(run)
        train(run, clock)
        finish(run, clock)
    except Interrupted as interruption:
        return stop_early(run, interruption, clock)
    except Exception:
        tell_last_news(run)
        raise
    return 0


def tell_of_failure(args: GRPOConfig, log: RunLog, kills: KernelKills, error: Exception) -> None:
    """Log one line that says why a run failed, for errors that a user can do something about. Raise other errors again.

    Args:
        kills: counts from the start of the run.
    """
    if args.send_slack_alerts:
        tell_slack(f"{args.run_title} has failed: {root_cause(error)}")
    if is_of_storage(error):
        log.failed(RuntimeError(f"{describe(error)}{log.room_left()}. Make room and start the same command again."))
    elif shortage := memory_message(args, error, kills):
        log.failed(RuntimeError(shortage))
    elif isinstance(error, ComponentDied | NonfiniteSteps | StorageNotShared | TimeoutError | WeightsDiffer):
        log.failed(error)
    else:
        raise error


# --- before anything starts -------------------------------------------------------------------------------------------


def read_options_and_data(argv: Sequence[str]) -> tuple[GRPOConfig, RunInputs]:
    """Options, tokenizer and datasets, all checked; every mistake in one message and exit code 2."""
    inputs: list[RunInputs] = []
    foreign = ForeignOptions()
    try:
        config_cls, mistakes = config_class_with(read_lists(argv, MODULE_OPTIONS, option_kinds(GRPOConfig)))
        args = parse_args(argv, config_cls, validators=[lambda _: mistakes, *validators(inputs)], foreign=foreign)
    except UsageError as error:
        fail_with(error.mistakes)
    if foreign.notes:
        tell(foreign.warning())
    args = settled(args)
    args.command_line = masked([sys.argv[0], *argv])
    return args, loaded_inputs(args, inputs)


def loaded_inputs(args: GRPOConfig, inputs: list[RunInputs]) -> RunInputs:
    """What the checks have loaded. With `--dry_run --gpu_memory` that is nothing, and the program ends here with the answer."""
    if args.device.assumed is not None:
        raise SystemExit(dry_run(args))
    return inputs[0]


def settled(args: GRPOConfig) -> GRPOConfig:
    """Checked options as every process reads them: those of the user's modules as plain values, and attention as the model needs
    it."""
    args, note = with_attention_that_fits(plain_config(args))
    for text in [*unused_modules(args), *([note] if note else [])]:
        tell(text)
    return args


def validators(inputs: list[RunInputs]) -> list[Callable[[GRPOConfig], list[str]]]:
    """The checks before anything starts. The last check puts the data that it loads into `inputs`."""

    def data_is_that_of_the_run(args: GRPOConfig) -> list[str]:
        if args.device.assumed is not None:
            return []
        loaded, mistakes = load_inputs(args)
        inputs.extend([loaded] if loaded else [])
        return mistakes + resumes_the_same_run(args, loaded)

    return [
        collect_mistakes,
        plugins_are_found,
        alerts_are_on_metrics,
        trackers_are_installed,
        metrics_port_is_free,
        weights_are_whole,
        tool_parsers_are_there,
        data_is_that_of_the_run,
    ]


def weights_are_whole(args: GRPOConfig) -> list[str]:
    """What is wrong with the weights of a model in a directory. Files from the hub are checked when they are fetched."""
    if args.device.assumed is not None:
        return []
    directory = Path(args.model_name_or_path)
    problem = problem_with_weights(directory) if os.path.isfile(directory / "config.json") else ""
    return [f"{shown(args, 'model_name_or_path')}: {problem}"] if problem else []


if __name__ == "__main__":
    raise SystemExit(main())
