"""The rollout side as the driver sees it: creates and addresses the queues, the controller and the engines together.

    RolloutManager ─► RolloutController      prompts, ledger, verification, batches
                   ├► LLMRayActor × N        on the bundles that were reserved for them; share the two queues
                   └► TeacherEngine × T      only with a teacher; the controller asks them

A training loop of your own needs three lines per step (`rollout_id` counts the steps that are done):

    rollout_data_ref = ray.get(rollout_manager.async_generate(rollout_id))
    ray.get(actor_model.async_train(rollout_id, rollout_data_ref))
    ray.get(actor_model.async_update_weights())
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from open_instruct.cluster import bundles
from open_instruct.cluster.bundles import Bundles
from open_instruct.cluster.pickled_queue import PickledQueue
from open_instruct.cluster.placement_plan import Asked, CannotPlace
from open_instruct.cluster.ray_utils import Lock
from open_instruct.config.grpo_config import GRPOConfig, config_of, enforces_eager
from open_instruct.config.model_checks import pairs_per_token
from open_instruct.data.run_inputs import RunInputs, load_inputs
from open_instruct.data_types import Box
from open_instruct.device import ENGINE_DEFAULTS, Device, allocator_env, unused_imports
from open_instruct.engines.engine_sleep import SleepOptions
from open_instruct.engines.kv_ages import CacheUse
from open_instruct.engines.vllm_engine import GATHER_S, EngineOptions
from open_instruct.rollouts.controller import ControllerOptions, RolloutController
from open_instruct.rollouts.message_queue import MessageQueue, default_queue_size
from open_instruct.run.teachers import create_teachers
from open_instruct.system.shared_cores import CorePlace
from open_instruct.vllm_utils3 import LLMRayActor
from open_instruct.workflows.base import WORKFLOWS

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)
BUNDLES_QUEUED_PER_ENGINE = 2
"""Room in the prompt queue: enough that no engine waits for prompts, and so little that an evaluation does not wait behind many
training prompts."""
GATHER_IN_TURNS_S = 0.25
"""How long an engine holds a finished group to return it together with others, if engines and learners take turns. Learners then
wait for the last group of a step anyway, and each earlier handover only takes cores from the engine."""
COLOCATED_SHARE = 0.5
"""Share of a place's Ray resources that a learner and an engine each take when they share the place. It does not limit memory."""


def on_this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def prompt_queue_size(args: GRPOConfig) -> int:
    """Bundles of prompts that `param_prompt_Q` holds."""
    return max(2, BUNDLES_QUEUED_PER_ENGINE * args.vllm_num_engines)


def results_queue_size(args: GRPOConfig) -> int:
    """Bundles of finished groups that `inference_results_Q` holds."""
    return 4 * (args.staleness_bound + 1) * args.num_unique_prompts_rollout


def queue_actor_options() -> dict[str, Any]:
    """Where the queues live: on the driver's node, as the controller does."""
    return {"num_cpus": 0, "scheduling_strategy": on_this_node()}


def create_queues(args: GRPOConfig) -> tuple[Queue, Queue]:
    """Queues like those of `grpo_fast.py`, for engines or a `RolloutManager` that are used without it."""
    options = queue_actor_options()
    return PickledQueue(prompt_queue_size(args), options), PickledQueue(results_queue_size(args), options)


def create_message_queue(args: GRPOConfig) -> MessageQueue:
    """The queue of finished training data for the learners, on the driver's node."""
    return MessageQueue.create(
        default_queue_size(args),
        max_staleness=args.staleness_bound,
        actor_options={"scheduling_strategy": on_this_node()},
    )


def create_controller(
    args: GRPOConfig,
    inputs: RunInputs,
    queues: tuple[Queue, Queue],
    message_queue: MessageQueue,
    *,
    teachers: "Sequence[ActorHandle]" = (),
    wandb_run_id: str | None = None,
    rollouter_cls: type[RolloutController] = RolloutController,
) -> "ActorHandle":
    """The `RolloutController` actor, or the actor of a subclass, on the driver's node."""
    options = ControllerOptions(
        num_ranks=args.num_data_shares,
        layout=args.device.collation_layout,
        pad_token_id=inputs.pad_token_id,
        tokenizer_name_or_path=args.tokenizer_name,
        pairs_per_token=pairs_per_token(args) if args.share_prompts else None,
        wandb_run_id=wandb_run_id,
    )
    actor = ray.remote(rollouter_cls).options(
        num_cpus=0,
        max_concurrency=16,
        scheduling_strategy=on_this_node(),
        runtime_env={"env_vars": args.device.actor_env},
    )
    return actor.remote(
        args,
        options,
        inputs.train_dataset,
        inputs.eval_dataset,
        *queues,
        message_queue=message_queue,
        teachers=list(teachers),
    )


def create_rollout_engines(
    args: Any,
    pg: "Bundles | None",
    *,
    queues: tuple[Queue, Queue] | None = None,
    max_model_len: int | None = None,
) -> "list[ActorHandle]":
    """`--vllm_num_engines` engine actors that share the queues, on the bundles of `pg`, or wherever there is room without `pg`.

    Without `queues` the engines share two new queues, and the caller asks them directly (`generate_with_single_engine`).
    """
    args = config_of(args)
    queues = queues or create_queues(args)
    return [
        create_vllm_engine(
            args,
            queues,
            number,
            pg=_of_engine(args, pg, number),
            max_model_len=max_model_len or args.max_sequence_length,
        )
        for number in range(args.vllm_num_engines)
    ]


def _of_engine(args: GRPOConfig, pg: Bundles | None, number: int) -> Bundles | None:
    """The bundles of one engine."""
    size = args.vllm_tensor_parallel_size
    return None if pg is None else (pg[0], pg[1][number * size : (number + 1) * size])


def create_vllm_engine(
    args: GRPOConfig, queues: tuple[Queue, Queue], number: int, *, max_model_len: int, pg: Bundles | None = None
) -> "ActorHandle":
    """The engine at position `number`, on its own bundles `pg`."""
    device = args.device
    share, env = COLOCATED_SHARE if args.shares_devices else 1.0, allocator_env(device)
    if device.kind == "cuda" and args.vllm_tensor_parallel_size > 1 and pg is not None:
        # Ray shows an actor only the GPU of its own bundle, and the engine's workers also use the GPUs of neighbouring bundles.
        env |= {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": bundles.visible_gpus(pg),
        }
    options = bundles.actor_options(device, pg, share=share, env=env)
    actor = ray.remote(LLMRayActor).options(max_concurrency=8, **options)
    engine = engine_options(args, device, seed=args.seed + number, max_model_len=max_model_len)
    if device.shares_cores:
        engine = replace(engine, cores=CorePlace(args.num_learners + number, args.vllm_tensor_parallel_size))
    return actor.remote(number, engine, *queues, timeout_s=args.weight_sync_timeout_s)


def _kv_cache_use(args: GRPOConfig) -> CacheUse:
    if args.vllm_keep_prefix_cache:
        return "kept"
    return "recomputed" if args.vllm_recompute_kv_cache else "by_version"


def engine_options(args: GRPOConfig, device: Device, *, seed: int, max_model_len: int) -> EngineOptions:
    """The options of one engine of this run."""
    return EngineOptions(
        model=args.model_name_or_path,
        tokenizer=args.tokenizer_name,
        revision=args.model_revision,
        # Without a value vLLM takes the model's revision, even if the tokenizer is from another repository.
        tokenizer_revision=args.revision_of_tokenizer or "main",
        tokenizer_setup=args.tokenizer_setup,
        dtype=device.dtype,
        max_model_len=max_model_len,
        max_num_seqs=args.vllm_max_num_seqs,
        weight_transport=device.weight_transport,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        executor_of_one_worker=device.executor_of_one_worker,
        seed=seed,
        enforce_eager=enforces_eager(args),
        enable_prefix_caching=args.vllm_enable_prefix_caching,
        kv_cache_use=_kv_cache_use(args),
        inflight_updates=args.inflight_updates,
        generation_timeout=args.generation_timeout,
        gather_s=GATHER_IN_TURNS_S if args.takes_turns else GATHER_S,
        workflow=args.workflow,
        max_prompt_tokens=args.max_prompt_token_length,
        sleep=SleepOptions(
            after_s=args.engine_sleep_after_s,
            level=args.sleep_level,
            calls_vllm=device.can_release_memory and (args.colocate or args.engine_sleep_after_s is not None),
        ),
        extra=ENGINE_DEFAULTS[device.kind]
        | device.engine_kwargs(
            max_model_len=max_model_len,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enforce_eager=enforces_eager(args),
        )
        | args.vllm_engine_args,
        env=device.engine_env(enforce_eager=enforces_eager(args), ready_timeout_s=args.init_timeout_s),
        unused_imports=unused_imports(device, enforce_eager=enforces_eager(args)),
    )


class RolloutManager:
    """Controller and engines. Methods that start with `async_` return object refs.

    Args:
        args: options of a run.
        pg: the bundles of the engines.
        wandb_run_id: wandb run to which evaluations are logged, or None.
        supervised: the caller lets the engines serve and watches them. It has only one group of learners, so no lock is needed.
        inputs: data of the run; None reads what `args` names.
        queues, message_queue: None creates them.
    """

    def __init__(
        self,
        args: Any,
        pg: "Bundles | None",
        wandb_run_id: str | None,
        *,
        supervised: bool = False,
        inputs: RunInputs | None = None,
        queues: tuple[Queue, Queue] | None = None,
        message_queue: MessageQueue | None = None,
        rollouter_cls: type[RolloutController] = RolloutController,
    ) -> None:
        self._args = args = config_of(args)
        inputs = inputs or _read_inputs(args)
        self.queues = queues or create_queues(args)
        self.message_queue = message_queue or create_message_queue(args)
        shorter_by = args.max_prompt_token_length - inputs.longest_prompt
        is_of_the_data = WORKFLOWS[args.rollout_workflow].value.prompts_are_of_the_data
        self.max_model_len = args.lengths.sequence - (shorter_by if is_of_the_data else 0)
        self.teachers = create_teachers(args)
        self.controller = create_controller(
            args,
            inputs,
            self.queues,
            self.message_queue,
            teachers=self.teachers,
            wandb_run_id=wandb_run_id,
            rollouter_cls=rollouter_cls,
        )
        self.rollout_engines = create_rollout_engines(args, pg, queues=self.queues, max_model_len=self.max_model_len)
        engine_bundles = [_of_engine(args, pg, number) for number in range(args.vllm_num_engines)]
        self._bundles = {number: reserved for number, reserved in enumerate(engine_bundles) if reserved is not None}
        self.engine_nodes = {number: bundles.node_ids(reserved)[0] for number, reserved in self._bundles.items()}
        """Node id of each engine, by position."""
        self._own_groups: list[PlacementGroup] = []
        """Placement groups of engines that had to move to another node."""
        self.rollout_engine_lock = None
        """Lock that a group of learners holds while it sends weights, so that no other group sends at the same time."""
        if not supervised:
            self.rollout_engine_lock = Lock.options(num_cpus=0, scheduling_strategy=on_this_node()).remote()
        self._supervised = supervised
        self._futures: list[Any] = []
        """References of the engines that `async_generate` or `async_eval` let serve. A reference is done when its engine has
        ended."""

    def _serve(self) -> None:
        if not self._supervised and not self._futures:
            self._futures = [engine.process_queue_continuously.remote() for engine in self.rollout_engines]

    def _has_lost_node(self, number: int) -> bool:
        """Whether the node of the engine at this position is gone."""
        return number in self.engine_nodes and not bundles.is_alive(self.engine_nodes[number])

    def start_engine(self, number: int) -> "ActorHandle | None":
        """A new engine in place of a dead engine, on the same bundles, or wherever there is room if the node is gone. None if
        there is no room."""
        if self._has_lost_node(number):
            args = self._args
            place, per_core = args.device.place_resources, args.device.places_per_core
            request = Asked((), 1, args.vllm_tensor_parallel_size, place, per_core)
            try:
                reservation = bundles.reserve(request, timeout_s=0.0)
            except CannotPlace as error:
                logger.warning("engine %d: %s", number, error)
                return None
            self._own_groups.append(reservation.group)
            self._bundles[number] = reservation.group, reservation.rollout
            self.engine_nodes[number] = bundles.node_ids(self._bundles[number])[0]
            logger.info("engine %d moves to %s", number, bundles.bundle_places(reservation.group)[0].address)
        return create_vllm_engine(
            self._args, self.queues, number, max_model_len=self.max_model_len, pg=self._bundles.get(number)
        )

    def async_generate(self, rollout_id: int) -> "ray.ObjectRef[Box]":
        """The data of rollout `rollout_id`, on which step `rollout_id + 1` trains, in a `Box`.

        The call tells the controller that the earlier steps were trained and that every engine has the resulting weights. The
        engines begin to serve at the first call.
        """
        self._serve()
        return self.controller.generate.remote(rollout_id, engines=self._futures)

    def async_eval(self, rollout_id: int) -> "ray.ObjectRef[None]":
        """A reference that is done when version `rollout_id` is evaluated. Starts the evaluation unless it is under way."""
        self._serve()
        return self.controller.eval.remote(rollout_id)

    def async_offload(self, *, keep_weights: bool = False) -> list:
        """Have all engines give their memory back. The value of each ref is the number of bytes.

        Without `keep_weights` engines whose `engine_sleep_level` is 2 drop their weights, because they get new weights before
        they wake.
        """
        return [engine.release_memory_occupation.remote(keep_weights=keep_weights) for engine in self.rollout_engines]

    def async_leave_devices(self) -> list:
        """Have all engines stop and give their memory back for good. The value of each ref is the number of bytes."""
        return [engine.leave_devices.remote() for engine in self.rollout_engines]

    def kill_engines(self) -> None:
        for engine in self.rollout_engines:
            ray.kill(engine)

    def async_onload(self, tags: list[str] | None = None) -> list:
        """Have all engines take back all of their memory, or parts of it: first `weights`, after which they can receive new
        weights, then `kv_cache`."""
        return [engine.resume_memory_occupation.remote(tags=tags) for engine in self.rollout_engines]

    def shut_down(self, *, timeout_s: float, expected: Sequence[Any] = ()) -> None:
        """End the engines, the controller and the queues. Engines and controller are first asked to end, and killed after
        `timeout_s` seconds. Never raises.

        Also waits for the references in `expected`.
        """
        deadline = time.monotonic() + timeout_s
        refs = [actor.stop.remote() for actor in (*self.rollout_engines, self.controller)]
        expected = [*refs, *self._futures, *expected]
        answered, _ = ray.wait(expected, num_returns=len(expected), timeout=timeout_s)
        ended = [
            engine.shutdown.remote() for engine, ref in zip(self.rollout_engines, refs, strict=False) if ref in answered
        ]
        ended += [teacher.shutdown.options(max_task_retries=0).remote() for teacher in self.teachers]
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=max(deadline - time.monotonic(), 0.0))
        for actor in (*self.rollout_engines, *self.teachers, self.controller):
            ray.kill(actor)
        for queue in self.queues:
            queue.shutdown(force=True)
        self.message_queue.shutdown()
        if self.rollout_engine_lock is not None:
            self.rollout_engine_lock.shut_down()
        for group in self._own_groups:
            ray.util.remove_placement_group(group)


def _read_inputs(args: GRPOConfig) -> RunInputs:
    inputs, mistakes = load_inputs(args)
    if inputs is None:
        raise ValueError("\n".join(mistakes))
    return inputs
