"""Saves checkpoints and model directories between two steps, and checks whether a run may resume from existing checkpoints."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_identity import differences, run_identity
from open_instruct.option_text import shown
from open_instruct.registry import option_fields
from open_instruct.report.run_log import SUMMARY_FILE
from open_instruct.report.run_summary import RunSummary, format_summary_table, read_summary
from open_instruct.rollouts.rollout_state import FILE as ROLLOUT_STATE
from open_instruct.run.run_state import mistake_in
from open_instruct.storage.checkpoints import (
    STATE_FILE,
    Checkpoint,
    CheckpointStore,
    NoWholeCheckpoint,
    StorageNotShared,
    atomic_directory,
)
from open_instruct.storage.output_directory import describe
from open_instruct.system.interruption import tell
from open_instruct.system.secret_masking import without_secrets

ALL_OPTIONS = "all_options"
"""Key of the output of `options_as_text` in the state of a checkpoint."""
MODEL = "model"
"""The directory of the last model in `--output_dir`."""

if TYPE_CHECKING:
    from open_instruct.data.run_inputs import RunInputs
    from open_instruct.run.wiring import Run


def checkpoint_store(args: GRPOConfig) -> CheckpointStore:
    return CheckpointStore(args.state_dir, keep_last=args.keep_last_n_checkpoints)


def resumes_the_same_run(args: GRPOConfig, inputs: "RunInputs | None") -> list[str]:
    """Mistakes that prevent resuming, such as a checkpoint of a run with other options or other data."""
    option = shown(args, "output_dir" if args.checkpoint_state_dir is None else "checkpoint_state_dir")
    try:
        newest = checkpoint_store(args).newest()
    except NoWholeCheckpoint as error:
        return [f"{option}: {error}. Remove the checkpoints to start anew, or give another directory."]
    except OSError as error:
        return [f"{option}: {describe(error)}. Give another directory."]
    if newest is None:
        return []
    if mistake := mistake_in(newest.state, newest.training_step):
        return [f"{option}: the {STATE_FILE} of {newest.path} {mistake}. Remove it, or give another directory."]
    changed = differences(newest.state["identity"], run_identity(args, inputs))
    if not changed:
        return _goes_beyond(args, newest)
    return [
        f"{option}: {newest.path} is of another run: {'; '.join(changed)}. To go on from it, undo these changes; to start "
        f"anew, choose another --output_dir."
    ]


def _goes_beyond(args: GRPOConfig, newest: Checkpoint) -> list[str]:
    """Mistake: the run would end before the step of its checkpoint, so it would train nothing. A complete run is no mistake; it
    prints that it is complete when it is started."""
    step, num_steps = newest.training_step, args.num_training_steps
    if step <= num_steps or is_complete(args):
        return []
    return [
        f"{shown(args, 'total_episodes')}: the run would end after step {num_steps}, and {newest.path} is of step {step}. Set "
        f"total_episodes to {step * args.num_samples_per_step} or more to go on; to start anew, choose another --output_dir."
    ]


def is_complete(args: GRPOConfig) -> bool:
    """Whether `--output_dir` holds a run that reached its end, with the model of its last step.

    The steps are compared, because a run that was prolonged and broke off while it ended has a checkpoint of its last step next
    to the model of the shorter run.
    """
    steps = checkpoint_store(args).steps()
    model, summary_file = Path(args.output_dir, MODEL), Path(args.output_dir, SUMMARY_FILE)
    if not steps or steps[-1] < args.num_training_steps or not model.is_dir() or not summary_file.is_file():
        return False
    summary = _readable_summary(args)
    return summary is None or (
        summary.training_steps >= args.num_training_steps and Path(summary.checkpoint or "").name == MODEL
    )


def _readable_summary(args: GRPOConfig) -> RunSummary | None:
    """The run's summary; None if it is damaged or of another version."""
    try:
        return read_summary(Path(args.output_dir, SUMMARY_FILE))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def tell_that_it_is_complete(args: GRPOConfig) -> int:
    summary = _readable_summary(args)
    tell(format_summary_table(summary) if summary else f"{SUMMARY_FILE} is damaged, or of another version.")
    tell(f"This run is complete. To train anew, choose another --output_dir or remove {args.output_dir}.")
    return 0


def options_as_text(args: GRPOConfig) -> dict[str, str]:
    """Every option as JSON, with everything that looks like a secret masked."""
    values = {field.name: json.dumps(getattr(args, field.name), default=str) for field in option_fields(type(args))}
    return {name: without_secrets(value) for name, value in values.items()}


def changed_options(args: GRPOConfig, state: Mapping[str, Any]) -> str:
    """Which options have changed since the checkpoint of that state was written, as text; "" if none has, or if the checkpoint
    has no options. A run may resume with another learning rate or loss, and the log reports the change."""
    before = state.get(ALL_OPTIONS)
    if not isinstance(before, dict):
        return ""
    now = options_as_text(args)
    return ", ".join(f"{name} {before[name]} → {now[name]}" for name in now if before.get(name, now[name]) != now[name])


def save_if_due(run: "Run") -> None:
    args, step = run.args, run.progress.training_step
    if args.checkpoint_state_freq > 0 and step % args.checkpoint_state_freq == 0:
        save_checkpoint(run)
    if args.save_freq > 0 and step % args.save_freq == 0:
        save_model(run, Path(args.output_dir) / f"step_{step:06d}")


def nothing_to_save(run: "Run") -> str:
    """Why a checkpoint would save nothing new, as text; "" if it would save something new."""
    step = run.progress.training_step
    if step == 0:
        return "no training step has ended since the start"
    return f"the checkpoint of step {step} is written already" if run.store.has(step) else ""


def save_checkpoint(run: "Run", *, is_last: bool = False) -> None:
    """Save everything that the same command needs to resume from here. The resumed run starts an evaluation in flight again.

    After the last checkpoint (`is_last`) the run generates and trains nothing more.
    """
    run.log.sync()
    if nothing_to_save(run):
        return
    step = run.progress.training_step
    with run.timer("saving"), run.log.journal.span("checkpoint", step=step):
        state = {
            "identity": run.identity,
            "progress": vars(run.progress),
            "evaluation_of": run.evaluation_of,
            "sets_under_way": list(run.sets_under_way) if run.evaluation_of is not None else [],
            ALL_OPTIONS: options_as_text(run.args),
        }
        with _learners_alone(run, is_last=is_last):
            path = run.store.save(step, state, lambda path: _write_parts(run, path))
    run.log.checkpoint_written(path)


@contextmanager
def _learners_alone(run: "Run", *, is_last: bool) -> Iterator[None]:
    """Inside the block the learners have all of their state. With `is_last` the engines generate nothing more, so the death of an
    engine does not matter."""
    if not is_last:
        with run.components.sharing.learners_only():
            yield
        return
    run.components.health.is_ending = True
    run.components.sharing.learners_take_over()
    yield


def _write_parts(run: "Run", path: Path) -> dict[str, int]:
    """Write the files of all parts. Returns the size in bytes of each file that the learners have written."""
    learners = run.components.learners.async_save_checkpoint(str(path))
    controller = run.components.rollouts.controller.save.remote(run.progress.training_step, str(path / ROLLOUT_STATE))
    *sizes, _ = run.components.wait(
        [*learners, controller],
        subject="saving a checkpoint",
        timeout_s=run.args.init_timeout_s,
        limit="init_timeout_s",
    )
    return {name: num_bytes for files in sizes for name, num_bytes in files.items()}


def save_model(run: "Run", directory: Path, *, is_last: bool = False) -> Path:
    """Save the model as a Hugging Face directory that Transformers and vLLM load. Returns its absolute path. `is_last` as in
    `save_checkpoint`."""
    directory = directory.absolute()  # a learner on another node may have another current directory
    span = run.log.journal.span("model", step=run.progress.training_step)
    with span, run.timer("saving"), _learners_alone(run, is_last=is_last), atomic_directory(directory) as draft:
        run.components.wait(
            run.components.learners.async_save_model(
                run.progress.training_step, directory=str(draft), with_optimizer=False
            ),
            subject="saving the model",
            timeout_s=run.args.init_timeout_s,
            limit="init_timeout_s",
        )
        if not any(draft.iterdir()):
            raise StorageNotShared(
                f"{directory} on the driver's node is empty, though the first learner has written a model there. Models need "
                f"storage that all nodes share. Give such a directory with --output_dir."
            )
    return directory
