"""What a run saves between two steps: checkpoints that the same command goes on from, and model directories."""

from pathlib import Path
from typing import TYPE_CHECKING

from open_instruct.checkpoints import CheckpointStore, StorageNotShared, written_whole
from open_instruct.config import GRPOConfig
from open_instruct.rollout_state import FILE as ROLLOUT_STATE

if TYPE_CHECKING:
    from open_instruct.grpo_fast import Run


def checkpoint_store(args: GRPOConfig) -> CheckpointStore:
    return CheckpointStore(args.state_dir, keep_last=args.keep_last_n_checkpoints)


def save_if_due(run: "Run") -> None:
    args, step = run.args, run.progress.training_step
    if args.checkpoint_state_freq > 0 and step % args.checkpoint_state_freq == 0:
        save_checkpoint(run)
    if args.save_freq > 0 and step % args.save_freq == 0:
        save_model(run, Path(args.output_dir) / f"step_{step:06d}")


def save_checkpoint(run: "Run") -> None:
    """Everything that the same command needs to go on from here. An evaluation in flight will be started anew."""
    run.log.flush()
    step = run.progress.training_step
    if step == 0 or run.store.has(step):
        return
    with run.timer("saving"):
        state = {"identity": run.identity, "progress": vars(run.progress), "evaluation_of": run.evaluation_of}
        with run.parts.turns.learners_alone():
            run.store.save(step, state, lambda path: _write_parts(run, path))


def _write_parts(run: "Run", path: Path) -> dict[str, int]:
    """Bytes of each file that the learners have written."""
    learners = run.parts.group.async_save_checkpoint(str(path))
    controller = run.parts.manager.controller.save.remote(run.progress.training_step, str(path / ROLLOUT_STATE))
    *written, _ = run.parts.wait([*learners, controller], what="saving a checkpoint", timeout_s=run.args.init_timeout_s)
    return {name: num_bytes for files in written for name, num_bytes in files.items()}


def save_model(run: "Run", directory: Path) -> Path:
    """A Hugging Face model directory that Transformers and vLLM load."""
    directory = directory.absolute()  # the learner on another node has another current directory
    with run.timer("saving"), run.parts.turns.learners_alone(), written_whole(directory) as beside:
        run.parts.wait(
            run.parts.group.async_save_model(run.progress.training_step, directory=str(beside), with_optimizer=False),
            what="saving the model",
            timeout_s=run.args.init_timeout_s,
        )
        if not any(beside.iterdir()):
            raise StorageNotShared(
                f"{directory} on the driver's node is empty, though the first learner has written a model there. Models need "
                f"storage that all nodes share. Give such a directory with --output_dir."
            )
    return directory
