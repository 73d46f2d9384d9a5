"""The life of a run: Ray, the actors, every wait of the driver, signals, and the end of it all.

with ray_cluster() as signals:
    parts = create_parts(...)     controller, engines and learners start side by side
    parts.wait(refs, ...)         every wait has a deadline, and notices within a second that an actor died or a signal came
    parts.shut_down()             nothing is left behind
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from open_instruct.cluster import bundles, ray_access
from open_instruct.cluster.failures import ComponentDied, root_cause
from open_instruct.cluster.node_watch import LostNode, NodeWatch
from open_instruct.cluster.process_watch import (
    ProcessWatch,
    RayWatch,
    kill_marked,
    marked,
    nothing_is_left,
    ray_processes_here,
)
from open_instruct.config.options import GRPOConfig
from open_instruct.data.run_inputs import RunInputs
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.rollouts.controller import RolloutController
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.device_sharing import DeviceSharing, ExclusiveSharing
from open_instruct.run.engine_supervisor import EngineSupervisor
from open_instruct.run.placement_group import create_actor_group, create_placement_groups, create_rollout_manager
from open_instruct.run.rollout_manager import RolloutManager
from open_instruct.storage import shared_storage
from open_instruct.system.interruption import Interrupted

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 0.5
"""How often a waiting driver looks at signals and at the engines."""
STORAGE_S = 60.0
"""How long the nodes of the learners have to say whether they see a file; a process of Ray is started for it."""
RAY_SHUTDOWN_S = 3.0
"""How long Ray may take to end its processes before they are killed."""
FETCH_S = 10.0
"""How long it may take to fetch a value that has been computed."""
SHUTDOWN_S = 5.0
"""How long parts may take to end by themselves before they are killed."""
SHUTDOWN_AFTER_FAILURE_S = 2.0
"""How long parts may take to end by themselves after a failure. Shorter, because nothing is lost by killing them then."""


class Signals:
    """Remembers the first SIGTERM or SIGINT. A second signal ends the process in the usual way."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.is_told = False
        """Whether the log tells of the signal."""
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
            self.is_told = True
            raise Interrupted(self.received)


@contextmanager
def ray_cluster(stopped_timeout_s: float = 12.0) -> Iterator[Signals]:
    """Ray on this machine, or the cluster that RAY_ADDRESS names. At the end Ray is shut down with all that it has started here.

    If Ray's own processes on this machine end, or are stopped for `stopped_timeout_s`, this process ends too (`RayWatch`).

    SIGTERM, SIGINT and SIGHUP are blocked while Ray starts its processes. These inherit the block, so a signal to the whole
    process group reaches the driver alone, which then ends the other processes in order. Ray's own signal handler is replaced
    before the signals are unblocked.
    """
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signals = Signals()
    is_own = not ray_access.is_there_a_cluster()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with marked() as mark:
            _enter_ray(mark, is_own=is_own)
        signals.install()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    ray_watch = RayWatch(ray_processes_here(), mark, stopped_timeout_s)
    ray_watch.start()
    with nothing_is_left(mark) if is_own else nullcontext():
        try:
            yield signals
        finally:
            ray_watch.stop()
            _leave_ray(mark)
            signals.remove()


def _enter_ray(mark: str, *, is_own: bool) -> None:
    """Join the cluster that is there, or start one. Starting is tried twice, because Ray's limit of 30 s is short for a busy
    machine."""
    for is_last in (False, True):
        try:
            with ray_access.this_machine_alone() if is_own else nullcontext():
                ray.init(
                    address="local" if is_own else os.environ.get("RAY_ADDRESS"),
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            return
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray has not started in time (is this machine busy?): trying once more")
            ray.shutdown()
            kill_marked(mark)


def _leave_ray(mark: str) -> None:
    """Shut Ray down, by force if need be: a process that is stopped (SIGSTOP) does not end when it is asked to."""
    force = threading.Timer(RAY_SHUTDOWN_S, kill_marked, [mark])
    force.daemon = True
    force.start()
    ray.shutdown()
    force.cancel()
    kill_marked(mark)


@dataclass
class Parts:
    """All actors of a run, as the step loop uses them."""

    manager: RolloutManager
    group: RayTrainGroup
    message_queue: MessageQueue
    supervisor: EngineSupervisor
    signals: Signals
    placement: PlacementGroup | None = None
    sharing: DeviceSharing = field(default_factory=DeviceSharing)
    """How learners and engines share devices."""
    watches: dict[str, Any] = field(default_factory=dict)
    """References that become done only when something is wrong, by the name of the part."""
    heartbeats: "Heartbeats | None" = None
    nodes: NodeWatch | None = None
    processes: ProcessWatch | None = None
    is_ending: bool = False
    """The run is ending and no engine will generate any more, so the death of an engine does not matter."""

    def wait(
        self,
        refs: Any,
        *,
        what: str,
        timeout_s: float,
        limit: str | None = None,
        interruptible: bool = False,
        without_dead: bool = False,
        watched: Sequence[Any] = (),
        on_poll: Callable[[], None] | None = None,
    ) -> Any:
        """The values of `refs` (one reference or a list); with `without_dead`, None for an actor that is dead.

        Raises `TimeoutError` that names `what` and the option that `timeout_s` comes from (`limit`), `ComponentDied` if an actor
        failed, and, where nothing is lost by leaving (`interruptible`), `Interrupted` when a signal came. Those of `watched` are
        not waited for, but their failure is noticed. `on_poll` is called now and then.
        """
        all_refs = list(refs) if isinstance(refs, list) else [refs]
        values: dict[Any, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending := [ref for ref in all_refs if ref not in values]:
            if interruptible:
                self.signals.raise_if_received()
            self._tell_of_signal(what)
            self.check_health()
            if on_poll is not None:
                on_poll()
            failed, _ = ray.wait(list(watched), num_returns=len(watched), timeout=0) if watched else ([], [])
            for ref in failed:
                self._value(ref, what)
            done, waiting = ray.wait(pending, num_returns=len(pending), timeout=HEALTH_POLL_S)
            for ref in done:  # at once: while one has failed, the others may wait for it in a collective
                values[ref] = self._value(ref, what, without_dead=without_dead)
            if waiting and time.monotonic() > deadline:
                advice = f". Where it only takes longer, raise --{limit}" if limit else ""
                raise TimeoutError(
                    f"{what}: {len(waiting)} of {len(all_refs)} did not answer in {timeout_s:g} s{advice}"
                )
        ordered = [values[ref] for ref in all_refs]
        return ordered if isinstance(refs, list) else ordered[0]

    def _tell_of_signal(self, what: str) -> None:
        """Log once that a signal came, and that the run ends after what is being waited for."""
        if self.signals.received is not None and not self.signals.is_told:
            self.signals.is_told = True
            logger.warning("%s came: %s is finished first", signal.Signals(self.signals.received).name, what)

    def _value(self, ref: Any, what: str, *, without_dead: bool = False) -> Any:
        """The value of a reference that is done. If an actor died because its node was lost, the error names the node."""
        try:
            return _value(ref, what)
        except ComponentDied as error:
            if without_dead and isinstance(error.__cause__, ray.exceptions.RayActorError):
                return None
            if self.nodes is not None and (lost := self.nodes.lost_now()):
                raise ComponentDied("; ".join(map(str, lost))) from error
            if dead := self._name_of_dead(error.__cause__):
                raise ComponentDied(f"{dead} died: {error}") from error.__cause__
            raise

    def _name_of_dead(self, error: BaseException | None) -> str:
        """The part whose death an error reports, or "". It is not always the part that was called."""
        while isinstance(error, ray.exceptions.RayTaskError):
            error = error.cause
        dead = getattr(error, "actor_id", None)
        return (
            next((name for name, actor in self.actors().items() if actor._actor_id.hex() == dead), "") if dead else ""
        )

    def wait_until_ready(self, args: GRPOConfig) -> None:
        """Wait until the controller, the engines and the learners have started, and the engines and learners their models."""
        for doubt in args.device.doubts:
            logger.warning("%s", doubt)

        def ready(refs: Any, what: str) -> Any:
            return self.wait(refs, what=what, timeout_s=args.init_timeout_s, limit="init_timeout_s", interruptible=True)

        def start_learners() -> list:
            return self.group.async_init(args, with_ref=args.load_ref_policy)

        # An engine measures the free memory of its whole GPU when it starts, so learners that share the GPU come after it.
        learners = [] if args.shares_devices else start_learners()
        ready(self.manager.controller.__ray_ready__.remote(), "the start of the controller")
        for number in range(len(self.manager.rollout_engines)):
            self._start_engine(number, ready)
        self.sharing.offload_engines()
        ready(learners or start_learners(), "the start of the learners")

    def _start_engine(self, number: int, ready: Callable[[Any, str], Any]) -> None:
        """Wait until an engine is loaded. An engine that is killed meanwhile is started again while restarts are left. An engine
        that raises an error is not started again, because it would raise the same error."""
        while True:
            engine = self.manager.rollout_engines[number]
            try:
                ready(engine.ready.remote(), f"the start of engine {number}")
                self.supervisor.began(number)
                return
            except ComponentDied as error:
                was_replaced = self.manager.rollout_engines[number] is not engine  # it was stopped
                if not was_replaced and not was_killed(error):
                    raise
                if not was_replaced:
                    self.supervisor.replace(number, "died while it started")

    def watch(self) -> None:
        """Begin to watch the controller and the queues for failing and hanging."""
        self.watches["the controller"] = self.manager.controller.watch.remote()
        self.heartbeats = Heartbeats.of_queues(self.manager.queues, self.message_queue)

    def check_health(self) -> None:
        """Replace engines that have ended. Raises `ComponentDied` if another part has ended."""
        for lost in self.nodes.lost() if self.nodes is not None else []:
            self._reap(lost)
        self._look_for_stopped()
        try:
            for name, ref in self.watches.items():
                if ray.wait([ref], timeout=0)[0]:
                    _value(ref, name)
                    raise ComponentDied(f"{name} ended before the run did")
            if self.heartbeats is not None:
                self.heartbeats.check()
            if not self.is_ending:
                self.supervisor.check()
                self._raise_if_dead()
        except ComponentDied:
            if self.heartbeats is not None:
                self.heartbeats.name_the_dead()  # a queue that died takes those who use it along: it is the cause to tell
            raise

    def _look_for_stopped(self) -> None:
        """Replace engines whose process is stopped. Raises `ComponentDied` if a process of another part is stopped."""
        engines = {engine_name(number): number for number in range(len(self.manager.rollout_engines))}
        for stopped in self.processes.stopped() if self.processes is not None else []:
            if stopped.name not in engines:
                raise ComponentDied(str(stopped))
            if not self.is_ending:
                self.supervisor.replace(engines[stopped.name], str(stopped).removeprefix(f"{stopped.name} "))

    def _raise_if_dead(self) -> None:
        """Find the death of a part that no call waits for: a learner while prompts are generated, the keeper of the lock."""
        engines = {engine_name(number) for number in range(len(self.manager.rollout_engines))}
        dead = [name for name in self.processes.dead if name not in engines] if self.processes is not None else []
        if dead:
            lost = self.nodes.lost_now() if self.nodes is not None else []
            raise ComponentDied("; ".join(map(str, lost)) or f"{' and '.join(dead)} died: the process is gone")

    def actors(self) -> dict[str, Any]:
        """All actors of the run, by name."""
        prompts, results = self.manager.queues
        return {
            "the controller": self.manager.controller,
            "the prompt queue": prompts.actor,
            "the results queue": results.actor,
            "the message queue": self.message_queue.actor,
            "the keeper of the lock": self.manager.rollout_engine_lock.keeper,
            **{f"learner {rank}": worker for rank, worker in enumerate(self.group.workers)},
            **{engine_name(number): engine for number, engine in enumerate(self.manager.rollout_engines)},
        }

    def _reap(self, lost: LostNode) -> None:
        """Replace the engines of a lost node. Raises `ComponentDied` if learners were on it."""
        if lost.learners:
            raise ComponentDied(str(lost))
        for number in () if self.is_ending else lost.engines:
            self.supervisor.replace(number, "is gone")

    def shut_down(self, timeout_s: float = SHUTDOWN_S) -> None:
        """End all parts. They are asked to end, and killed if they do not. Never raises, because an error may be on its way."""
        self.manager.shut_down(timeout_s=timeout_s, expected=self.supervisor.futures)
        self.group.shut_down()
        if self.placement is not None:
            remove_placement_group(self.placement)


class Heartbeats:
    """Asks parts for a sign of life without waiting for the answer. A part that fails or stays silent ends the run."""

    EVERY_S = 1.0
    LIMIT_S = 60.0
    ANSWER_S = 5.0

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
        """Raise `ComponentDied` for a part that is dead now. A part that is only silent is left alone."""
        asked = {ask(): name for name, ask in self._ask.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self.ANSWER_S)
        for ref in answered:
            _value(ref, asked[ref])


def engine_name(number: int) -> str:
    return f"engine {number}"


def was_killed(error: ComponentDied) -> bool:
    """Whether an actor's process ended without raising an error: by a signal, or because memory was short."""
    cause = error.__cause__
    return isinstance(cause, ray.exceptions.ActorDiedError) and not cause.actor_init_failed


def _value(ref: Any, what: str) -> Any:
    try:
        return ray.get(ref, timeout=FETCH_S)
    except ray.exceptions.RayError as error:
        raise ComponentDied(f"{what} failed: {root_cause(error)}") from error


def create_parts(
    args: GRPOConfig,
    inputs: RunInputs,
    queues: tuple[Queue, Queue],
    message_queue: MessageQueue,
    signals: Signals,
    *,
    rollouter_cls: type[RolloutController] = RolloutController,
) -> Parts:
    """Create all actors of a run. They start side by side; `Parts.wait_until_ready` waits for them.

    Raises `CannotPlace` when the cluster has no room for them, and `StorageNotShared` when they could not save together.
    """
    pgs = create_placement_groups(args)
    check_storage([args.state_dir, Path(args.output_dir)], bundles.node_ids(pgs["actor"]))
    group = create_actor_group(args, pgs["actor"], wandb_run_id=None)
    manager = create_rollout_manager(
        args,
        pgs["rollout"],
        wandb_run_id=None,
        supervised=True,
        inputs=inputs,
        queues=queues,
        message_queue=message_queue,
        rollouter_cls=rollouter_cls,
    )
    nodes = NodeWatch(bundles.node_ids(pgs["actor"]), lambda: manager.engine_nodes)
    supervisor = EngineSupervisor(
        args,
        manager.rollout_engines,
        manager.controller,
        manager.start_engine,
        lost_node=nodes.lost_under,
        may_start=lambda: parts.sharing.engines_may_start,
    )
    parts = Parts(manager, group, message_queue, supervisor, signals, placement=pgs["actor"][0])
    parts.nodes = nodes
    parts.processes = ProcessWatch(parts.actors, args.stopped_timeout_s)
    logger.info("places: %s", nodes.describe())
    if args.colocate:
        parts.sharing = ExclusiveSharing(manager, group, parts.wait, timeout_s=args.weight_sync_timeout_s)
    return parts


def check_storage(directories: Sequence[Path], learner_nodes: Sequence[str]) -> None:
    """Raises `StorageNotShared` if learners on other nodes do not see the driver's directories."""
    home = ray.get_runtime_context().get_node_id()
    others = {
        node["NodeManagerAddress"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["NodeID"] in learner_nodes and node["NodeID"] != home
    }
    ask = ray.remote(num_cpus=0, max_retries=0)(shared_storage.answer)
    for directory in directories if others else ():
        with shared_storage.probe(directory.absolute()) as path:
            refs = [
                ask.options(scheduling_strategy=place).remote(str(path), address) for address, place in others.items()
            ]
            saw = [_value(ref, "the look at the storage") for ref in _answered(refs, "the look at the storage")]
            shared_storage.judge(path, dict(zip(others, saw, strict=True)))


def _answered(refs: list[Any], what: str) -> list[Any]:
    _, waiting = ray.wait(refs, num_returns=len(refs), timeout=STORAGE_S)
    if waiting:
        raise TimeoutError(f"{what}: {len(waiting)} of {len(refs)} nodes did not answer in {STORAGE_S:g} s")
    return refs


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
