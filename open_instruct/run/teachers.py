"""Creates the teacher's engines of a run (`--teacher_model_name_or_path`), with their places and options."""

from typing import TYPE_CHECKING

import ray

from open_instruct.cluster import bundles
from open_instruct.cluster.placement_plan import Asked, CannotPlace, describe_nodes, plan_placement
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import vocabulary_size
from open_instruct.device import unused_imports
from open_instruct.engines.engine_sleep import SleepOptions
from open_instruct.engines.teacher_engine import CALLS_AT_ONCE, TeacherEngine
from open_instruct.engines.vllm_engine import EngineOptions
from open_instruct.weight_transports import RAY_OBJECT

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def create_teachers(args: GRPOConfig) -> "list[ActorHandle]":
    """`--teacher_num_engines` actors, which are still starting on return; empty without a teacher.

    Ray places them where there is room, and restarts an engine that died with its node on another node. Learners and engines must
    already have their places.

    Raises `CannotPlace` if there is no room for all of them.
    """
    if args.teacher_model_name_or_path is None:
        return []
    check_room(args)
    device, size = args.device, args.teacher_tensor_parallel_size
    actor = ray.remote(TeacherEngine).options(
        **{f"num_{name.lower()}s": amount * size for name, amount in device.place_resources.items()},
        runtime_env={"env_vars": bundles.device_env(device)},
        max_concurrency=CALLS_AT_ONCE,
        max_restarts=args.max_engine_restarts,
        max_task_retries=-1,
    )
    facts = {
        "top_k": args.distillation_top_k,
        "vocab_size": vocabulary_size(args),
        "timeout_s": args.teacher_timeout_s,
    }
    return [actor.remote(teacher_options(args), **facts) for _ in range(args.teacher_num_engines)]


def check_room(args: GRPOConfig) -> None:
    """Raises `CannotPlace` if there is no room for all engines of the teacher in addition to the places already taken."""
    if args.teacher_model_name_or_path is None:
        return
    device, size = args.device, args.teacher_tensor_parallel_size
    request = Asked((), args.teacher_num_engines, size, device.place_resources, device.places_per_core)
    nodes = bundles.cluster_nodes()
    try:
        plan_placement(nodes, request)
    except CannotPlace as error:
        raise CannotPlace(
            f"the teacher: {error}. Asked for: {request}. Nodes: {describe_nodes(nodes, request.place)}. "
            "Ask for fewer, or add nodes."
        ) from None


def teacher_options(args: GRPOConfig) -> EngineOptions:
    """The options of one engine of the teacher."""
    assert args.teacher_model_name_or_path is not None
    device = args.device
    max_model_len = args.max_sequence_length + 1  # vLLM samples one further token
    return EngineOptions(
        model=args.teacher_model_name_or_path,
        revision=args.teacher_model_revision,
        dtype=device.dtype,
        max_model_len=max_model_len,
        max_num_seqs=args.vllm_max_num_seqs,
        weight_transport=RAY_OBJECT,
        tensor_parallel_size=args.teacher_tensor_parallel_size,
        executor_of_one_worker=device.executor_of_one_worker,
        seed=args.seed,
        enforce_eager=True,  # a teacher only prefills, and CUDA graphs are for decoding
        sleep=SleepOptions(),
        extra=device.engine_kwargs(
            max_model_len=max_model_len,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enforce_eager=True,
        )
        | {"max_logprobs": max(args.distillation_top_k, 1)},
        env=device.engine_env(enforce_eager=True, ready_timeout_s=args.init_timeout_s),
        unused_imports=unused_imports(device, enforce_eager=True),
    )
