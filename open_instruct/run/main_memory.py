"""Computes how much main memory a run needs on each node: what learners and engines keep off their GPUs, or everything on CPU."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device_memory import memory_of_machine_bytes
from open_instruct.weight_transports import RAY_OBJECT, SHM

if TYPE_CHECKING:
    from open_instruct.engines.engine_memory import EngineMemory
    from open_instruct.learners.memory_estimate import LearnerMemory


@dataclass(frozen=True)
class NodeLoad:
    """What a run puts on a node."""

    address: str
    num_learners: int
    num_workers: int
    """Number of engine workers."""
    memory_bytes: int | None
    """Main memory of the node; None if it is not known."""
    has_first_learner: bool = False


def node_loads(learners: Iterable[str], workers: Iterable[str]) -> list[NodeLoad]:
    """The nodes of a run, given the node of each learner and of each worker. Call it while Ray runs.

    For its own machine this process knows the memory. For other machines Ray knows how much was free when Ray started there.
    """
    own = ray.get_runtime_context().get_node_id()
    learners = list(learners)
    num_learners, num_workers = Counter(learners), Counter(workers)
    nodes: dict[str, Any] = {node["NodeID"]: node for node in ray.nodes()}
    return [
        NodeLoad(
            nodes[node]["NodeManagerAddress"],
            num_learners[node],
            num_workers[node],
            memory_of_machine_bytes() if node == own else _free_at_start(nodes[node]["Resources"]),
            has_first_learner=node in learners[:1],
        )
        for node in num_learners | num_workers
    ]


def _free_at_start(resources: dict[str, float]) -> int | None:
    """Free memory when Ray started on the node. Ray divides it into room for its objects and memory for everything else."""
    if "memory" not in resources:
        return None
    return int(resources["memory"] + resources.get("object_store_memory", 0))


def engine_worker_bytes(args: GRPOConfig, engine: "EngineMemory") -> int:
    """Main memory of an engine's worker on a GPU: its weights while it sleeps, unless it drops them. With `colocate` every engine
    counts, because even an engine that drops its weights keeps them while only the learners work on a checkpoint."""
    if args.device.kind == "cpu":
        return 0
    sleeps_by_itself = args.engine_sleep_after_s is not None and args.sleep_level == 1
    return engine.asleep if args.colocate or sleeps_by_itself else 0


def shared_bytes(args: GRPOConfig, learner: "LearnerMemory", load: NodeLoad) -> int:
    """Main memory that a weight update takes on a node. If weights are sent as Ray objects, all buckets stay in memory until the
    last bucket has arrived, and an engine whose model is in other processes copies the buckets to each of them."""
    from open_instruct.learners.weight_sync import CHUNK_BYTES

    if args.device.weight_transport == RAY_OBJECT and load.num_workers:
        in_one_process = args.device.kind == "cpu" and args.vllm_tensor_parallel_size == 1
        return learner.update * (1 if in_one_process else 1 + load.num_workers)
    if args.device.weight_transport == SHM:
        return min(CHUNK_BYTES, learner.update) * load.num_learners
    return 0


def node_bytes(args: GRPOConfig, learner: "LearnerMemory", engine: "EngineMemory", load: NodeLoad) -> int:
    """Most main memory that the run takes on a node at a time, without parts that are not known. While learners load they have no
    moments and gradients, but the first of them holds the experts of a mixture (`LearnerMemory.stacked`)."""
    if args.device.kind == "cpu":
        each_learner, each_worker, loading = learner.total, engine.total, learner.weights + learner.program
    else:
        each_learner, each_worker = learner.in_main_memory.total, engine_worker_bytes(args, engine)
        loading = learner.in_main_memory.weights
    learner_bytes = load.num_learners * each_learner + shared_bytes(args, learner, load)
    loading_bytes = load.num_learners * loading + learner.stacked * load.has_first_learner
    return max(learner_bytes, loading_bytes) + load.num_workers * each_worker
