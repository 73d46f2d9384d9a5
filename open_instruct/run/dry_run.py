"""`--dry_run`: checks options and data, reserves a place for every part, and computes the memory that a run would need. It loads,
generates and writes nothing. With `--gpu_memory` it computes for GPUs that are not here, without Ray and without data.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ray.util.placement_group import remove_placement_group

from open_instruct.cluster import bundles
from open_instruct.cluster.placement_plan import CannotPlace
from open_instruct.config.cli import fail_with
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.option_text import shown
from open_instruct.report.run_summary import format_table
from open_instruct.run.main_memory import NodeLoad, engine_worker_bytes, node_bytes, node_loads
from open_instruct.run.memory_advice import advice, less_main_memory
from open_instruct.run.memory_needs import needed_on_device, needed_on_gpu
from open_instruct.run.placement_group import create_placement_groups
from open_instruct.run.ray_session import ray_cluster
from open_instruct.run.teachers import check_room
from open_instruct.system.counted import counted
from open_instruct.system.interruption import tell
from open_instruct.workflows.conversations.options import options_that_imply_conversations

if TYPE_CHECKING:
    from open_instruct.engines.engine_memory import EngineMemory
    from open_instruct.learners.memory_estimate import LearnerMemory

GIB = 2**30
PLACING_OPTIONS = "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size", "colocate"
PLACING_OPTIONS_OF_TEACHER = "teacher_num_engines", "teacher_tensor_parallel_size"
LARGER_CACHE = (
    "What makes it larger: --vllm_gpu_memory_utilization, --vllm_tensor_parallel_size, and shorter responses need less."
)


def dry_run(args: GRPOConfig) -> int:
    """Print what the run would be. Returns the exit code: 0, or 1 if the run needs more memory than there is."""
    from open_instruct.engines.engine_memory import engine_memory, teacher_memory
    from open_instruct.learners.memory_estimate import learner_memory

    learner, engine = learner_memory(args, args.device), engine_memory(args, args.device)
    teacher = teacher_memory(args, args.device)
    if args.device.assumed is not None:
        loads = [NodeLoad("all machines", args.num_learners, args.num_engine_workers, None, has_first_learner=True)]
    else:
        with ray_cluster(args.stopped_timeout_s):
            loads = _loads(args)
    tell(format_table(_rows(args, loads, learner, engine, teacher), ("<", "<"), gap=3))
    if problem := _shortage(args, loads, learner, engine, teacher):
        tell(problem)
        return 1
    return 0


def _loads(args: GRPOConfig) -> list[NodeLoad]:
    """Reserve a place for every learner and engine, check that a teacher has room too, and give the places back."""
    try:
        groups = create_placement_groups(args)
    except CannotPlace as error:
        fail_with([f"{shown(args, *PLACING_OPTIONS)}: {error}"])
    try:
        check_room(args)
        workers = bundles.node_ids(groups["rollout"])[: args.num_engine_workers]
        return node_loads(bundles.node_ids(groups["actor"]), workers)
    except CannotPlace as error:
        fail_with([f"{shown(args, *PLACING_OPTIONS, *PLACING_OPTIONS_OF_TEACHER)}: {error}"])
    finally:
        remove_placement_group(groups["actor"][0])


def _rows(
    args: GRPOConfig,
    loads: list[NodeLoad],
    learner: "LearnerMemory",
    engine: "EngineMemory",
    teacher: "EngineMemory | None" = None,
) -> list[tuple[str, str]]:
    lengths = args.lengths
    longest = args.num_samples_per_step * lengths.trained
    return [
        *_assumed_rows(args),
        ("workflow", workflow_and_cause(args)),
        ("training steps", f"{args.num_training_steps:,}"),
        (
            "samples per step",
            f"{args.num_samples_per_step:,} ({args.num_unique_prompts_rollout:,} prompts × "
            f"{args.num_samples_per_prompt_rollout:,})",
        ),
        ("tokens per step", f"{longest:,} at most"),
        ("learners", _placed({load.address: load.num_learners for load in loads})),
        ("workers of engines", _placed({load.address: load.num_workers for load in loads})),
        *_learner_rows(learner),
        *_engine_rows(args, engine, "engine's worker"),
        *(() if teacher is None else _engine_rows(args, teacher, "teacher's worker")),
        *_main_memory_rows(args, loads, learner, engine, teacher),
    ]


def _assumed_rows(args: GRPOConfig) -> Iterator[tuple[str, str]]:
    if args.device.assumed is not None:
        yield (
            "computed for",
            f"{counted(args.device.assumed.count, 'GPU')} of {_size(args.device.assumed.memory_bytes)} each",
        )
        yield "not looked at", "the training data, the tokenizer, and the weights (--gpu_memory)"


def workflow_and_cause(args: GRPOConfig) -> str:
    """The name of the workflow, and what chose it."""
    if "rollout_workflow" in args.given:
        return f"{args.rollout_workflow} (--rollout_workflow)"
    if implying := options_that_imply_conversations(args.given):
        return f"{args.rollout_workflow} (because of {', '.join(f'--{name}' for name in implying)})"
    return f"{args.rollout_workflow} (the default)"


def _engine_rows(args: GRPOConfig, engine: "EngineMemory", owner: str) -> Iterator[tuple[str, str]]:
    yield f"memory of each {owner}", _size(engine.total)
    yield "  weights", _size(engine.weights)
    is_known = not _gpu_is_unknown(args)
    cache = f"{_size(engine.cache)}, {engine.num_cached_tokens:,} tokens" if is_known else "not known: no GPU here"
    yield "  key-value cache", cache
    if engine.program:
        yield "  program", _size(engine.program)


def _gpu_is_unknown(args: GRPOConfig) -> bool:
    return args.device.kind != "cpu" and args.device.memory.total_bytes() is None


def _placed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{number} on {address}" for address, number in numbers.items() if number)


def _learner_rows(learner: "LearnerMemory") -> Iterator[tuple[str, str]]:
    yield "memory of each learner", _size(learner.total) + _besides(learner)
    for name, num_bytes in learner.parts.items():
        if num_bytes is None:
            yield f"  {name}", f"not known: {learner.why_unknown}"
        elif num_bytes:
            yield f"  {name}", _size(num_bytes)


def _besides(learner: "LearnerMemory") -> str:
    return " and activations" if learner.activations is None else ""


def _main_memory_rows(
    args: GRPOConfig,
    loads: list[NodeLoad],
    learner: "LearnerMemory",
    engine: "EngineMemory",
    teacher: "EngineMemory | None",
) -> Iterator[tuple[str, str]]:
    """Rows about main memory: what learners and engines keep off their GPUs, and the total that each node needs. On CPU
    everything is in main memory."""
    main = learner.in_main_memory
    if main.total:
        yield "main memory of each learner", _size(main.total)
        yield from ((f"  {name}", _size(num_bytes)) for name, num_bytes in vars(main).items() if num_bytes)
    if worker_bytes := engine_worker_bytes(args, engine):
        yield "main memory of each engine's worker", _size(worker_bytes)
    on_cpu = args.device.kind == "cpu"
    for load in loads:
        room = "not known how much is there" if load.memory_bytes is None else f"{_size(load.memory_bytes)} are there"
        suffix = _besides(learner) if on_cpu and load.num_learners else "" if on_cpu else " and programs"
        needed = _size(node_bytes(args, learner, engine, load) + _of_teacher(args, loads, teacher)) + suffix
        yield f"main memory on {load.address}", f"{needed}; {room}"


def _of_teacher(args: GRPOConfig, loads: list[NodeLoad], teacher: "EngineMemory | None") -> int:
    """Main memory of a teacher on CPU, if the run has one node; otherwise 0. Among several nodes Ray chooses only later."""
    if teacher is None or args.device.kind != "cpu" or len(loads) > 1:
        return 0
    return teacher.total * args.teacher_num_engines * args.teacher_tensor_parallel_size


def _shortage(
    args: GRPOConfig,
    loads: list[NodeLoad],
    learner: "LearnerMemory",
    engine: "EngineMemory",
    teacher: "EngineMemory | None" = None,
) -> str:
    """Which memory is too small, on a GPU or in the main memory of a node, as text; "" if none is."""
    shortages = []
    if args.device.kind != "cpu":
        available = args.device.memory.total_bytes()
        needed = needed_on_gpu(args, learner, engine)
        if available is not None and needed > available:
            smaller = advice(args, available, needed_on_device)
            shortages.append(f"This run needs {_size(needed)} on a GPU that has {_size(available)}.{smaller}")
        shortages += [
            f"{owner} gets {_size(int(args.vllm_gpu_memory_utilization * available))} of each GPU and has weights of "
            f"{_size(memory.weights)} there: its cache would hold {memory.num_cached_tokens:,} tokens, and a prompt with its "
            f"response is up to {args.max_sequence_length:,}. {cure}"
            for owner, memory, cure in (
                ("An engine", engine, LARGER_CACHE),
                ("An engine of the teacher", teacher, LARGER_CACHE.replace("--vllm_tensor", "--teacher_tensor")),
            )
            if available is not None and memory is not None and memory.num_cached_tokens < args.max_sequence_length
        ]
    for load in loads:
        needed = node_bytes(args, learner, engine, load) + _of_teacher(args, loads, teacher)
        if load.memory_bytes is not None and needed > load.memory_bytes:
            cure = _cure_in_main_memory(args, loads, learner, needed - load.memory_bytes)
            shortages.append(
                f"This run needs {_size(needed)} of main memory on {load.address}, which has {_size(load.memory_bytes)}.{cure}"
            )
    return "\n".join(shortages)


def _cure_in_main_memory(args: GRPOConfig, loads: list[NodeLoad], learner: "LearnerMemory", excess: int) -> str:
    """What makes a run smaller that needs `excess` bytes more of main memory than a node has."""
    if args.device.kind != "cpu":
        return less_main_memory(args, loads)
    most_learners = max(load.num_learners for load in loads) or 1
    return advice(args, learner.total - -(-excess // most_learners), needed_on_device)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= 10 * GIB else f"{num_bytes / 2**20:,.0f} MiB"
