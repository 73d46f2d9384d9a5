"""The life of a run: Ray, the actors, every wait of the driver, signals, and the end of it all.

with ray_cluster() as signals:
    parts = start_parts(...)      controller, engines and learners start side by side
    parts.wait(refs, ...)         any wait: has a deadline, notices within a second that an actor died or a signal came
    parts.shut_down()             nothing is left behind
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from open_instruct.config import GRPOConfig
from open_instruct.config_checks import shown
from open_instruct.device import Device
from open_instruct.engine_sleep import SleepOptions
from open_instruct.engine_supervisor import EngineSupervisor
from open_instruct.failures import ComponentDied, root_cause
from open_instruct.learner import PolicyTrainerRayProcess, RayTrainGroup
from open_instruct.message_queue import MessageQueue, default_queue_size
from open_instruct.prompt_dataset import PromptDataset
from open_instruct.rollout import ControllerOptions, RolloutController, RolloutManager
from open_instruct.vllm_utils3 import EngineOptions, LLMRayActor

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 0.5
"""How often a waiting driver looks at signals and at the engines."""
SHUTDOWN_S = 10.0
"""How long parts may take to end by themselves before they are killed."""
BUNDLES_QUEUED_PER_ENGINE = 2
"""Prompt queue: enough that an engine never waits, short enough that evaluation never does."""
EXIT_PREEMPTED = 85
"""Exit code after SIGTERM: a checkpoint was written, start the same command again."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Interrupted(Exception):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_INTERRUPTED


class Signals:
    """Remembers SIGTERM and SIGINT; a second one of them ends the process in the usual way."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)

    def raise_if_received(self) -> None:
        if self.received is not None:
            raise Interrupted(self.received)


@contextmanager
def ray_cluster() -> Iterator[Signals]:
    """Ray on this machine, or the cluster that RAY_ADDRESS names; shut down at the end.

    SIGTERM and SIGINT are blocked while Ray starts its processes: they inherit that, so a signal to the whole process group
    reaches the driver alone, which ends the others in order. Ray's own handler is replaced before they are let through.
    """
    blocked = {signal.SIGTERM, signal.SIGINT}
    signals = Signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        signals.install()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    try:
        yield signals
    finally:
        ray.shutdown()
        signals.remove()


@dataclass
class Parts:
    """Every actor of a run, as the step loop sees them."""

    manager: RolloutManager
    group: RayTrainGroup
    queues: list[Queue]
    message_queue: MessageQueue
    supervisor: EngineSupervisor
    signals: Signals
    watches: dict[str, Any] = field(default_factory=dict)
    """References that are done only when something is wrong, by the name of the part."""
    heartbeats: "Heartbeats | None" = None

    def wait(
        self,
        refs: Any,
        *,
        what: str,
        timeout_s: float,
        interruptible: bool = False,
        watched: Sequence[Any] = (),
        on_poll: Callable[[], None] | None = None,
    ) -> Any:
        """The values of `refs` (one reference or a list).

        Raises `TimeoutError` that names `what`, `ComponentDied` if an actor failed, and, where nothing is lost by leaving
        (`interruptible`), `Interrupted` when a signal came. Those of `watched` are not waited for, but their failure is noticed.
        `on_poll` is called now and then.
        """
        all_refs = list(refs) if isinstance(refs, list) else [refs]
        values: dict[Any, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending := [ref for ref in all_refs if ref not in values]:
            if interruptible:
                self.signals.raise_if_received()
            self.check_health()
            if on_poll is not None:
                on_poll()
            failed, _ = ray.wait(list(watched), num_returns=len(watched), timeout=0) if watched else ([], [])
            for ref in failed:
                _value(ref, what)
            done, waiting = ray.wait(pending, num_returns=len(pending), timeout=HEALTH_POLL_S)
            for ref in done:  # at once: while one has failed, the others may wait for it in a collective
                values[ref] = _value(ref, what)
            if waiting and time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {len(waiting)} of {len(all_refs)} did not answer in {timeout_s:g} s")
        ordered = [values[ref] for ref in all_refs]
        return ordered if isinstance(refs, list) else ordered[0]

    def wait_until_ready(self, args: GRPOConfig) -> None:
        """Learners with their model, engines with theirs, the line between them, and the controller."""
        first, engines, group = self.group.workers[0], self.manager.rollout_engines, self.group

        def ready(refs: Any, what: str) -> Any:
            return self.wait(refs, what=what, timeout_s=args.init_timeout_s, interruptible=True)

        address = ready(first.open_rendezvous.remote(), "the start of the first learner")
        learners = group.async_init(*address)
        ready(self.manager.controller.ready.remote(), "the start of the controller")
        for number, engine in enumerate(engines):
            ready(engine.ready.remote(), f"the start of engine {number}")
        ready(learners, "the start of the learners")

    def watch(self) -> None:
        """From now on notice when the controller or a queue fails or hangs."""
        self.watches["the controller"] = self.manager.controller.watch.remote()
        self.heartbeats = Heartbeats.of_queues(self.queues, self.message_queue)

    def check_health(self) -> None:
        """Raise `ComponentDied` if a part has ended that cannot be replaced; replace engines that have."""
        try:
            for name, ref in self.watches.items():
                if ray.wait([ref], timeout=0)[0]:
                    _value(ref, name)
                    raise ComponentDied(f"{name} ended before the run did")
            if self.heartbeats is not None:
                self.heartbeats.check()
            self.supervisor.check()
        except ComponentDied:
            if self.heartbeats is not None:
                self.heartbeats.name_the_dead()  # a queue that died takes those who use it along: it is the cause to tell
            raise

    def shut_down(self) -> None:
        """End all parts: asked first, killed when they do not answer. Never raises: it runs while an error is on its way."""
        engines, controller = self.manager.rollout_engines, self.manager.controller
        asked = [actor.stop.remote() for actor in (*engines, controller)]
        expected = [*asked, *self.supervisor.futures]
        answered, _ = ray.wait(expected, num_returns=len(expected), timeout=SHUTDOWN_S)
        ended = [engine.shutdown.remote() for engine, ref in zip(engines, asked, strict=False) if ref in answered]
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=SHUTDOWN_S)
        for actor in [*engines, controller, *self.group.workers]:
            ray.kill(actor)
        for queue in self.queues:
            queue.shutdown(force=True)
        self.message_queue.shutdown()


class Heartbeats:
    """Asks parts for a sign of life without waiting for the answer; one that fails or stays silent ends the run."""

    EVERY_S = 5.0
    LIMIT_S = 60.0

    def __init__(self, ask: dict[str, Callable[[], Any]]) -> None:
        self._ask = ask
        self._asked: dict[str, tuple[Any, float]] = {}
        self._last_round = 0.0

    @classmethod
    def of_queues(cls, queues: Sequence[Queue], messages: MessageQueue) -> "Heartbeats":
        prompts, results = queues
        return cls(
            {
                "the prompt queue": prompts.actor.qsize.remote,
                "the results queue": results.actor.qsize.remote,
                "the message queue": messages.get_statistics_ref,
            }
        )

    def check(self) -> None:
        now = time.monotonic()
        if now - self._last_round > self.EVERY_S:
            self._last_round = now
            for name, ask in self._ask.items():
                self._asked.setdefault(name, (ask(), now))
        for name, (ref, asked_at) in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                _value(ref, name)
                del self._asked[name]
            elif now - asked_at > self.LIMIT_S:
                raise ComponentDied(f"{name} did not answer for {self.LIMIT_S:g} s")

    def name_the_dead(self) -> None:
        """Raise `ComponentDied` for a part that is dead right now; one that only stays silent is not blamed."""
        asked = {ask(): name for name, ask in self._ask.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self.EVERY_S)
        for ref in answered:
            _value(ref, asked[ref])


def _value(ref: Any, what: str) -> Any:
    try:
        return ray.get(ref, timeout=SHUTDOWN_S)
    except ray.exceptions.RayError as error:
        raise ComponentDied(f"{what} failed: {root_cause(error)}") from error


def missing_resources(args: GRPOConfig, device: Device) -> list[str]:
    """What the Ray cluster lacks for the asked learners and engines; known only once connected. Without it they wait for ever."""
    engine = device.engine_resources(args.vllm_tensor_parallel_size)
    total = ray.cluster_resources()
    mistakes = []
    for ray_name, name in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        needed = args.num_learners * device.learner_resources[name] + args.vllm_num_engines * engine[name]
        if needed > total.get(ray_name, 0) + 1e-6:
            mistakes.append(
                f"{shown(args, 'num_learners_per_node', 'vllm_num_engines', 'vllm_tensor_parallel_size')}: need "
                f"{needed:g} {ray_name}s, the Ray cluster has {total.get(ray_name, 0):g}. Ask for fewer, or add nodes."
            )
    return mistakes


def create_queues(args: GRPOConfig) -> tuple[Queue, Queue]:
    """`param_prompt_Q` and `inference_results_Q`, bounded, on the driver's node."""
    prompts = max(2, BUNDLES_QUEUED_PER_ENGINE * args.vllm_num_engines)
    results = 4 * (args.staleness_bound + 1) * args.num_unique_prompts_rollout
    options = {"num_cpus": 0, "scheduling_strategy": on_this_node()}
    return Queue(maxsize=prompts, actor_options=options), Queue(maxsize=results, actor_options=options)


def create_message_queue(args: GRPOConfig) -> MessageQueue:
    """Ready training data on its way to the learners, on the driver's node."""
    return MessageQueue.create(
        default_queue_size(args),
        max_staleness=args.staleness_bound,
        actor_options={"scheduling_strategy": on_this_node()},
    )


def on_this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def create_controller(
    args: GRPOConfig,
    device: Device,
    datasets: tuple[PromptDataset, PromptDataset | None],
    queues: tuple[Queue, Queue],
    *,
    pad_token_id: int,
    message_queue: MessageQueue,
    rollouter_cls: type[RolloutController] = RolloutController,
) -> "ActorHandle":
    """The `RolloutController` actor (or that of a subclass), on the driver's node."""
    options = ControllerOptions(
        num_ranks=args.num_learners,
        layout=device.collation_layout,
        pad_token_id=pad_token_id,
        tokenizer_name_or_path=args.tokenizer_name,
    )
    actor = ray.remote(rollouter_cls).options(
        num_cpus=0, max_concurrency=16, scheduling_strategy=on_this_node(), runtime_env=_actor_env(device)
    )
    return actor.remote(args, options, *datasets, *queues, message_queue=message_queue)


def create_vllm_engines(
    args: GRPOConfig, device: Device, queues: tuple[Queue, Queue], *, max_model_len: int
) -> "list[ActorHandle]":
    """`--vllm_num_engines` engine actors that share the queues."""
    return [
        create_vllm_engine(args, device, queues, number, max_model_len=max_model_len)
        for number in range(args.vllm_num_engines)
    ]


def create_vllm_engine(
    args: GRPOConfig, device: Device, queues: tuple[Queue, Queue], number: int, *, max_model_len: int
) -> "ActorHandle":
    actor = ray.remote(LLMRayActor).options(
        max_concurrency=8, runtime_env=_actor_env(device), **device.engine_resources(args.vllm_tensor_parallel_size)
    )
    options = engine_options(args, device, seed=args.seed + number, max_model_len=max_model_len)
    return actor.remote(number, options, *queues, timeout_s=args.weight_sync_timeout_s)


def engine_options(args: GRPOConfig, device: Device, *, seed: int, max_model_len: int) -> EngineOptions:
    """What one engine of this run is started with."""
    return EngineOptions(
        model=args.model_name_or_path,
        tokenizer=args.tokenizer_name,
        revision=args.model_revision,
        dtype=device.dtype,
        max_model_len=max_model_len,
        max_num_seqs=args.vllm_max_num_seqs,
        weight_transport=device.weight_transport,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        seed=seed,
        enforce_eager=args.vllm_enforce_eager,
        enable_prefix_caching=args.vllm_enable_prefix_caching,
        inflight_updates=args.inflight_updates,
        generation_timeout=args.generation_timeout,
        sleep=SleepOptions(
            after_s=args.engine_sleep_after_s,
            level=args.engine_sleep_level,
            calls_vllm=device.can_release_memory and args.engine_sleep_after_s is not None,
            memory_in_use_bytes=device.whole_memory_in_use_bytes,
        ),
        extra=device.engine_kwargs(
            max_model_len=max_model_len,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        ),
        env=device.engine_env(enforce_eager=args.vllm_enforce_eager),
    )


def create_actor_group(args: GRPOConfig, device: Device) -> RayTrainGroup:
    """`--num_learners_per_node` learner actors."""
    actor = ray.remote(PolicyTrainerRayProcess).options(runtime_env=_actor_env(device), **device.learner_resources)
    world_size = args.num_learners
    return RayTrainGroup([actor.remote(args, device, rank, world_size) for rank in range(world_size)])


def _actor_env(device: Device) -> dict[str, Any]:
    threads = device.threads_per_worker
    env = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"), "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return {"env_vars": env}


def create_parts(
    args: GRPOConfig,
    device: Device,
    datasets: tuple[PromptDataset, PromptDataset | None],
    queues: tuple[Queue, Queue],
    signals: Signals,
    *,
    pad_token_id: int,
    max_model_len: int,
    message_queue: MessageQueue,
    rollouter_cls: type[RolloutController] = RolloutController,
) -> Parts:
    """All actors of a run; they start side by side, `wait_until_ready` waits for them."""
    controller = create_controller(
        args,
        device,
        datasets,
        queues,
        pad_token_id=pad_token_id,
        message_queue=message_queue,
        rollouter_cls=rollouter_cls,
    )
    engines = create_vllm_engines(args, device, queues, max_model_len=max_model_len)
    group = create_actor_group(args, device)

    def start_engine(number: int) -> "ActorHandle":
        return create_vllm_engine(args, device, queues, number, max_model_len=max_model_len)

    supervisor = EngineSupervisor(args, engines, controller, start_engine)
    return Parts(RolloutManager(controller, engines), group, list(queues), message_queue, supervisor, signals)


class Timer:
    """Wall time by phase: `with timer("phase"): …`, then `take()` for the seconds since the last call."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": value for phase, value in seconds.items()}
