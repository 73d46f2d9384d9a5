"""Everything that the step loop works with, and what may prevent it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.cluster.placement_plan import CannotPlace
from open_instruct.config.cli import fail_with
from open_instruct.config.evaluation_sets import EvaluationSet
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_identity import run_identity
from open_instruct.data.run_inputs import RunInputs
from open_instruct.option_text import shown
from open_instruct.report.run_log import Monitor, RunLog
from open_instruct.rollouts.controller import RolloutController
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.components import Components
from open_instruct.run.fully_async_trainer import FullyAsyncTrainer
from open_instruct.run.parameter_synchronizer import ParameterSynchronizer
from open_instruct.run.run_saving import checkpoint_store
from open_instruct.run.run_state import Progress
from open_instruct.run.weight_agreement import MismatchWatch, WeightAgreement
from open_instruct.storage.checkpoints import CheckpointStore, StorageNotShared
from open_instruct.storage.output_directory import UnusableDirectory, held
from open_instruct.system.timer import Timer


@dataclass(frozen=True)
class Roles:
    """Classes and functions that a user may replace."""

    trainer: type[FullyAsyncTrainer] = FullyAsyncTrainer
    rollouter: type[RolloutController] = RolloutController
    monitor: Monitor | None = None
    """`custom_monitor(trainer_stats, rollouter_stats)`, called every `--statistics_interval_s`."""
    component_log_file: str | None = None
    """A further log under the output directory, in the format that the fully async policy documents."""


DEFAULT_ROLES = Roles()


@dataclass
class Run:
    """Everything that the step loop works with."""

    args: GRPOConfig
    components: Components
    log: RunLog
    store: CheckpointStore
    evaluation_sets: Sequence[EvaluationSet]
    """Empty if the run is not evaluated."""
    trainer: FullyAsyncTrainer
    synchronizer: ParameterSynchronizer
    message_queue: MessageQueue
    timer: Timer
    identity: dict[str, Any]
    """What must be the same when the run resumes from a checkpoint."""
    mismatch_watch: MismatchWatch
    progress: Progress = field(default_factory=Progress)
    evaluation_of: int | None = None
    """Version whose evaluation is in flight."""
    sets_under_way: Sequence[str] = ()
    """The sets that it measures."""


def wire(args: GRPOConfig, inputs: RunInputs, roles: Roles, log: RunLog, components: Components) -> Run:
    """The objects of the driver that work with the actors."""
    timer = Timer()
    message_queue = components.message_queue
    return Run(
        args=args,
        components=components,
        log=log,
        store=checkpoint_store(args),
        evaluation_sets=args.evaluation_sets,
        trainer=roles.trainer(args, components, message_queue, timer),
        synchronizer=ParameterSynchronizer(args, components, WeightAgreement(args, components)),
        message_queue=message_queue,
        timer=timer,
        identity=run_identity(args, inputs),
        mismatch_watch=MismatchWatch(args),
    )


@contextmanager
def sole_use_of_directories(args: GRPOConfig) -> Iterator[None]:
    """No other run writes to the directories of this run meanwhile. A directory that cannot be used ends the program with one
    message."""
    own_state_dir = [args.state_dir] if args.checkpoint_state_dir is not None else []
    try:
        with held([Path(args.output_dir)], "--output_dir"), held(own_state_dir, "--checkpoint_state_dir"):
            yield
    except UnusableDirectory as error:
        fail_with([str(error)])


@contextmanager
def mistakes_of_placement(args: GRPOConfig) -> Iterator[None]:
    """A cluster without room for all actors, or whose nodes do not share storage, ends the program with one message."""
    try:
        yield
    except CannotPlace as error:
        options = ["num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size", "colocate"]
        options += ["teacher_num_engines", "teacher_tensor_parallel_size"] if args.has_teacher else []
        fail_with([f"{shown(args, *options)}: {error}"])
    except StorageNotShared as error:
        fail_with([f"{shown(args, 'output_dir', 'checkpoint_state_dir')}: {error}"])
