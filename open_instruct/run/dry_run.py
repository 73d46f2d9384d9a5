"""`--dry_run`: options and data are checked, every part gets its place, and memory is counted before it is used. Nothing is
loaded, generated or written.
"""

from collections import Counter
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import remove_placement_group

from open_instruct.cluster import bundles
from open_instruct.cluster.placement_plan import CannotPlace
from open_instruct.config.cli import fail_with
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.report.run_summary import format_table
from open_instruct.run.placement_group import create_placement_groups
from open_instruct.run.ray_session import ray_cluster
from open_instruct.system.interruption import tell

if TYPE_CHECKING:
    from open_instruct.engines.engine_memory import EngineMemory
    from open_instruct.learners.memory import LearnerMemory

GIB = 2**30
PLACING_OPTIONS = "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size", "colocate"


def dry_run(args: GRPOConfig) -> int:
    """Say what the run would be. Returns the exit code: 0, or 1 if the run needs more memory than there is."""
    from open_instruct.engines.engine_memory import engine_memory
    from open_instruct.learners.memory import learner_memory

    learner, engine = learner_memory(args, args.device), engine_memory(args, args.device)
    with ray_cluster(args.stopped_timeout_s):
        places = _places(args)
    tell(format_table(_rows(args, places, learner, engine), ("<", "<"), gap=3))
    if problem := _shortage(args, learner, engine):
        tell(problem)
        return 1
    return 0


def _places(args: GRPOConfig) -> list[tuple[str, str]]:
    """Reserve a place for every part, and give the places back."""
    try:
        groups = create_placement_groups(args)
    except CannotPlace as error:
        fail_with([f"{shown(args, *PLACING_OPTIONS)}: {error}"])
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    try:
        return [
            (what, ", ".join(f"{number} on {address[node]}" for node, number in Counter(nodes).items()))
            for what, nodes in (
                ("learners", bundles.node_ids(groups["actor"])),
                ("workers of engines", bundles.node_ids(groups["rollout"])[: args.num_engine_workers]),
            )
        ]
    finally:
        remove_placement_group(groups["actor"][0])


def _rows(
    args: GRPOConfig, places: list[tuple[str, str]], learner: "LearnerMemory", engine: "EngineMemory"
) -> list[tuple[str, str]]:
    lengths = args.lengths
    longest = args.num_samples_per_step * lengths.trained
    return [
        ("training steps", f"{args.num_training_steps:,}"),
        (
            "samples per step",
            f"{args.num_samples_per_step:,} ({args.num_unique_prompts_rollout:,} prompts × "
            f"{args.num_samples_per_prompt_rollout:,})",
        ),
        ("tokens per step", f"{longest:,} at most"),
        *places,
        ("memory of each learner", _size(learner.total)),
        *((f"  {name}", _size(num_bytes)) for name, num_bytes in vars(learner).items() if num_bytes),
        ("memory of each engine's worker", _size(engine.total)),
        ("  weights", _size(engine.weights)),
        (
            "  key-value cache",
            f"{_size(engine.cache)}, {engine.num_cached_tokens:,} tokens" if engine.cache else "not known: no GPU here",
        ),
        *((("  program", _size(engine.program)),) if engine.program else ()),
    ]


def _shortage(args: GRPOConfig, learner: "LearnerMemory", engine: "EngineMemory") -> str:
    """What is lacking on a device; "" if nothing is. On CPU all workers of this machine share its memory."""
    available = args.device.memory.total_bytes()
    if args.device.kind == "cpu":
        needed = learner.total * max(args.num_learners_per_node) + engine.total * args.num_engine_workers
    elif args.single_gpu_mode:
        needed = learner.total + engine.total
    else:
        needed = max(learner.total, engine.total)
    if available is None or needed <= available:
        return ""
    place = "machine" if args.device.kind == "cpu" else "GPU"
    return (
        f"This run needs {_size(needed)} on a {place} that has {_size(available)}. What makes it smaller: --deepspeed_stage 3 "
        f"with more learners, --deepspeed_offload_optimizer, --gradient_checkpointing, --use_peft, a smaller --pack_length, "
        f"--sequence_parallel_size, --load_ref_policy False."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= 10 * GIB else f"{num_bytes / 2**20:,.0f} MiB"
