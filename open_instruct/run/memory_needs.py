"""The memory that a run needs on the device of its largest worker, from its options and the model's configuration alone."""

from typing import TYPE_CHECKING

from open_instruct.config.grpo_config import GRPOConfig

if TYPE_CHECKING:
    from open_instruct.engines.engine_memory import EngineMemory
    from open_instruct.learners.memory_estimate import LearnerMemory


def needed_on_device(args: GRPOConfig) -> int:
    """Bytes at most on a GPU of the run; on CPU, those of one learner, because few options change an engine there."""
    from open_instruct.engines.engine_memory import engine_memory
    from open_instruct.learners.memory_estimate import learner_memory

    learner = learner_memory(args, args.device)
    return (
        learner.total if args.device.kind == "cpu" else needed_on_gpu(args, learner, engine_memory(args, args.device))
    )


def needed_on_gpu(args: GRPOConfig, learner: "LearnerMemory", engine: "EngineMemory") -> int:
    """Most bytes that are in use on a GPU at a time."""
    if args.single_gpu_mode:
        return learner.total + engine.total
    needed = max(learner.total, engine.total)
    return max(needed, _at_weight_update(learner, engine)) if args.colocate else needed


def _at_weight_update(learner: "LearnerMemory", engine: "EngineMemory") -> int:
    """Bytes in use on a GPU during a weight update: the learner has only its weights, and the engine has its weights and receives
    new weights through a buffer, which it copies."""
    from open_instruct.learners.weight_sync import CHUNK_BYTES

    return learner.weights + engine.weights + 2 * min(CHUNK_BYTES, learner.update)
