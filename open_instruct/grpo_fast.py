"""GRPO: sample with vLLM, verify, train with DeepSpeed, send the new weights back. The command line of the project.

    python open_instruct/grpo_fast.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_mixer_list reasoning_gym/chain_sum 1.0

    RolloutController ──► param_prompt_Q ──► LLMRayActor × N: process_queue_continuously()
       │   ▲                                    │        ▲
       │   └──── inference_results_Q ◄──────────┘        │ weights of version t
       ▼                                                 │
    MessageQueue ──► load_data_from_packing_thread() ──► learners: PolicyTrainerRayProcess × M

This file is the story from top to bottom: options and data, queues, actors, the loop over training steps, the end. What a step
consists of is in `run/step_loop.py` and `run/fully_async_trainer.py`, what the controller does in `rollouts/controller.py`.
`fully_async_main.py` and the Python class `GRPO` come to `run` too.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # run as a script, this folder would shadow top-level modules of the same names
if not ((package := find_spec("open_instruct")) and find_spec("ray")):
    print(
        f"{sys.executable} lacks the packages of this project. Do `source .venv/bin/activate`, which", file=sys.stderr
    )
    print("`bash scripts/setup_cpu.sh` or `bash scripts/setup_gpu.sh` has made.", file=sys.stderr)
    raise SystemExit(2)
if not Path(package.origin or "").samefile(Path(__file__).with_name("__init__.py")):
    print(f"{__file__} would run the code of {Path(package.origin or '').parent}, which", file=sys.stderr)
    print(f"{sys.executable} has installed. Take the environment of this checkout, or", file=sys.stderr)
    print(f"set PYTHONPATH={Path(__file__).resolve().parents[1]}.", file=sys.stderr)
    raise SystemExit(2)

from collections.abc import Sequence

from open_instruct.cluster.bundles import node_ids
from open_instruct.cluster.pickled_queue import PickledQueue
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_inputs import RunInputs, names_of_data
from open_instruct.report.run_log import RunLog
from open_instruct.rollouts.data_preparation import DataPreparation
from open_instruct.run.checked_inputs import read_options_and_data
from open_instruct.run.components import SHUTDOWN_AFTER_FAILURE_S, SHUTDOWN_S, watched
from open_instruct.run.dry_run import dry_run
from open_instruct.run.evaluation_schedule import evaluate_before_training, maybe_evaluate
from open_instruct.run.failure_report import tell_of_failure
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.run.out_of_memory import KernelKills
from open_instruct.run.page_beside import page_beside
from open_instruct.run.placement_group import create_actor_group, create_placement_groups, create_rollout_manager
from open_instruct.run.ray_session import ray_cluster
from open_instruct.run.rollout_manager import (
    create_message_queue,
    prompt_queue_size,
    queue_actor_options,
    results_queue_size,
)
from open_instruct.run.rollout_news import tell_last_news
from open_instruct.run.run_saving import is_complete, save_if_due, tell_that_it_is_complete
from open_instruct.run.start_report import open_log
from open_instruct.run.step_loop import (
    LoopHooks,
    WallClock,
    check_finite,
    committed,
    finish,
    recorded,
    resume,
    start_queue_processing_on_actors,
    stop_early,
    sync_weights_and_prepare_prompts,
)
from open_instruct.run.storage_check import check_storage
from open_instruct.run.wiring import DEFAULT_ROLES, Roles, Run, mistakes_of_placement, sole_use_of_directories, wire
from open_instruct.system.interruption import Interrupted, ends_by_signals, tell
from open_instruct.system.secret_masking import mask_tracebacks
from open_instruct.system.signals import Signals

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
    """Run GRPO. Returns the exit code: 0 done, 1 failed, 85 ended by SIGTERM with a checkpoint, 130 ended by Ctrl-C. Mistakes in
    options or data end the program with one message and exit code 2."""
    mask_tracebacks()
    with ends_by_signals():
        args, inputs = read_options_and_data(sys.argv[1:] if argv is None else argv)
        return run(args, inputs)


def run(args: GRPOConfig, inputs: RunInputs, roles: Roles = DEFAULT_ROLES) -> int:
    """A whole run with checked options and data, or the rest of a run that was interrupted. Returns the exit code."""
    if args.cache_dataset_only:
        tell(f"{len(inputs.train_dataset):,} prompts are checked and tokenized.")
        return 0
    if args.dry_run:
        if names := names_of_data(args, inputs):
            tell("\n".join(names))
        return dry_run(args)
    with sole_use_of_directories(args):
        if is_complete(args):
            return tell_that_it_is_complete(args)
        kills = KernelKills()
        log = open_log(args, inputs, roles)
        try:
            with page_beside(args), ray_cluster(args.stopped_timeout_s) as signals:
                return run_on_ray(args, inputs, roles, log, kills, signals)
        except Interrupted as interruption:
            return interruption.exit_code
        except Exception as error:  # before all actors were there
            tell_of_failure(args, log, kills, error)
            return 1
        finally:
            log.close()


def run_on_ray(
    args: GRPOConfig, inputs: RunInputs, roles: Roles, log: RunLog, kills: KernelKills, signals: Signals
) -> int:
    """Create the queues and all actors, train, and end the actors. Returns the exit code."""
    param_prompt_Q = PickledQueue(prompt_queue_size(args), queue_actor_options())
    inference_results_Q = PickledQueue(results_queue_size(args), queue_actor_options())
    message_queue = create_message_queue(args)
    with mistakes_of_placement(args):
        pgs = create_placement_groups(args, on_poll=signals.raise_if_received)
        check_storage([args.state_dir, Path(args.output_dir)], node_ids(pgs["actor"]))
        learners = create_actor_group(args, pgs["actor"], None)
        rollouts = create_rollout_manager(  # the controller and the engines
            args,
            pgs["rollout"],
            None,
            supervised=True,
            inputs=inputs,
            queues=(param_prompt_Q, inference_results_Q),
            message_queue=message_queue,
            rollouter_cls=roles.rollouter,
        )
    components = watched(args, pgs, learners, rollouts, message_queue, signals)
    patience_s = SHUTDOWN_AFTER_FAILURE_S
    try:
        components.wait_until_ready(args)
        code = run_to_its_end(wire(args, inputs, roles, log, components))
        patience_s = SHUTDOWN_S
        return code
    except Exception as error:
        tell_of_failure(args, log, kills, error)  # before all components are ended, which may take seconds
        return 1
    finally:
        components.shut_down(patience_s)


def run_to_its_end(run: Run) -> int:
    """Run from the newest checkpoint to the trained model, or to the next checkpoint if a signal comes. Returns the exit code."""
    clock = WallClock(run)
    try:
        resume(run)  # from the newest checkpoint, and bring its weights to the engines
        start_queue_processing_on_actors(run)
        train(run, clock)
        finish(run, clock)
    except Interrupted as interruption:
        return stop_early(run, interruption, clock)
    except Exception:
        tell_last_news(run)
        raise
    return 0


def train(run: Run, clock: WallClock) -> None:
    """All training steps that are left. While a step is trained, the engines sample for later steps, as far ahead as the
    staleness bound allows."""
    trainer, hooks = run.trainer, LoopHooks(run)
    clock.start()
    evaluate_before_training(run)
    for training_step in range(run.progress.training_step + 1, run.args.num_training_steps + 1):
        step = trainer.begin_step(training_step, hooks)
        while not step.has_all_batches:  # one batch, or with --streaming several partial ones
            batch = trainer.load_data_from_packing_thread(step)
            trainer.train(step, batch)
        trained = trainer.end_step(step)
        with recorded(run, trained, clock), committed(run, trained):
            maybe_evaluate(run)
            sync_weights_and_prepare_prompts(run, training_step)
        check_finite(run, trained)
        save_if_due(run)
    maybe_evaluate(run)


if __name__ == "__main__":
    raise SystemExit(main())
