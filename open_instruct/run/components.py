"""All actors of a run, and the objects of the driver that look after them, in one pass from the leaves up.

learners, RolloutManager (controller, engines, queues) ─► EngineSupervisor ─► Health ─► Waits ─► DeviceSharing
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from open_instruct.cluster import bundles
from open_instruct.cluster.bundles import Bundles
from open_instruct.cluster.failures import ComponentDied
from open_instruct.cluster.node_watch import NodeWatch
from open_instruct.cluster.process_watch import ProcessWatch
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.device import doubts_about_machine
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.device_sharing import DeviceSharing, ExclusiveSharing, FreeDevices, doubts_about_updates
from open_instruct.run.engine_activity import EngineActivity
from open_instruct.run.engine_supervisor import EngineSupervisor
from open_instruct.run.health import Health, actors_of
from open_instruct.run.loading_report import LoadingReport
from open_instruct.run.ray_results import value_of, was_killed
from open_instruct.run.rollout_manager import RolloutManager
from open_instruct.run.waits import Waits
from open_instruct.system.counted import counted
from open_instruct.system.signals import Signals

logger = logging.getLogger(__name__)

LEARNERS_START = "the start of the learners"
SHUTDOWN_S = 5.0
"""How long parts may take to end by themselves before they are killed."""
SHUTDOWN_AFTER_FAILURE_S = 2.0
"""How long parts may take to end by themselves after a failure. Shorter, because nothing is lost by killing them then."""


class LearnersFailed(ComponentDied):
    """Learners failed while engines were still being loaded. No engine is restarted in this case."""


@dataclass(frozen=True)
class Components:
    """The parts of a run, as the step loop uses them."""

    rollouts: RolloutManager
    learners: RayTrainGroup
    message_queue: MessageQueue
    supervisor: EngineSupervisor
    signals: Signals
    health: Health
    wait: Callable[..., Any]
    """`Waits.wait`: every wait of the driver goes through it."""
    sharing: DeviceSharing
    """How learners and engines share devices."""
    placement: PlacementGroup | None = None
    activity: EngineActivity = field(default_factory=EngineActivity)

    def wait_until_ready(self, args: GRPOConfig) -> None:
        """Wait until the controller, the engines and the learners have started and have loaded their models."""
        for doubt in (*doubts_about_machine(args.device), *doubts_about_updates(args)):
            logger.warning("%s", doubt)

        def ready(refs: Any, subject: str) -> Any:
            return self.wait(
                refs,
                subject=subject,
                timeout_s=args.init_timeout_s,
                limit="init_timeout_s",
                interruptible=True,
                on_poll=lambda: look_after_loading(subject),
            )

        def look_after_loading(subject: str) -> None:
            num_learners = notice_learners()
            learners = [counted(num_learners, "learner")] if num_learners and subject != LEARNERS_START else []
            loading.parts = [subject.removeprefix("the start of "), *learners]

        def notice_learners() -> int:
            """End the run at once if a learner has failed, instead of only after the engines are loaded. Returns how many
            learners are still being loaded."""
            ready_refs = ray.wait(starting, num_returns=len(starting), timeout=0)[0] if starting else []
            for ref in ready_refs:
                try:
                    value_of(ref, "the start of the learners")
                except ComponentDied as error:
                    raise LearnersFailed(str(error)) from error
            return len(starting) - len(ready_refs)

        def start_learners() -> list:
            return self.learners.async_init(args, with_ref=args.load_ref_policy)

        # An engine measures the free memory of its whole GPU when it starts, so learners that share the GPU start after it.
        starting = [] if args.shares_devices else start_learners()
        with LoadingReport() as loading:
            ready(self.rollouts.controller.__ray_ready__.remote(), "the start of the controller")
            for number in range(len(self.rollouts.rollout_engines)):
                self._start_engine(number, ready)
            ready([teacher.ready.remote() for teacher in self.rollouts.teachers], "the start of the teacher")
            self.sharing.offload_engines()
            ready(starting or start_learners(), LEARNERS_START)

    def _start_engine(self, number: int, ready: Callable[[Any, str], Any]) -> None:
        """Wait until an engine is loaded. An engine that is killed while it loads is restarted, if restarts are left. An engine
        that raises an error is not restarted, because it would raise the same error again."""
        while True:
            engine = self.rollouts.rollout_engines[number]
            try:
                ready(engine.ready.remote(), f"the start of engine {number}")
                self.supervisor.began(number)
                return
            except LearnersFailed:
                raise
            except ComponentDied as error:
                was_replaced = self.rollouts.rollout_engines[number] is not engine  # by `Health`
                if not was_replaced and not was_killed(error):
                    raise
                if not was_replaced:
                    self.supervisor.replace(number, "died while it started")

    def shut_down(self, timeout_s: float = SHUTDOWN_S) -> None:
        """End all parts. A part that does not end when asked is killed. Never raises, so that it hides no earlier error."""
        self.rollouts.shut_down(timeout_s=timeout_s, expected=self.supervisor.futures)
        self.learners.shut_down()
        if self.placement is not None:
            remove_placement_group(self.placement)


def watched(
    args: GRPOConfig,
    pgs: Mapping[str, Bundles],
    learners: RayTrainGroup,
    rollouts: RolloutManager,
    message_queue: MessageQueue,
    signals: Signals,
) -> Components:
    """The actors of a run, which are still starting, and what looks after them. `Components.wait_until_ready` waits for them."""
    nodes = NodeWatch(bundles.node_ids(pgs["actor"]), lambda: rollouts.engine_nodes)
    logger.info("places: %s", nodes.describe())
    devices = FreeDevices(for_engines=True)  # learners that share devices start after the engines
    supervisor = EngineSupervisor(
        args,
        rollouts.rollout_engines,
        rollouts.controller,
        rollouts.start_engine,
        lost_node=nodes.lost_under,
        may_start=lambda: devices.for_engines,
    )
    processes = ProcessWatch(lambda: actors_of(rollouts, learners, message_queue), args.stopped_timeout_s)
    health = Health(rollouts, learners, message_queue, supervisor, nodes=nodes, processes=processes)
    wait = Waits(health, signals).wait
    sharing = DeviceSharing()
    if args.colocate:
        sharing = ExclusiveSharing(
            rollouts,
            learners,
            wait,
            devices,
            timeout_s=args.weight_sync_timeout_s,
            loading=lambda: supervisor.loading,
            loading_timeout_s=args.init_timeout_s,
            end_loading=supervisor.end_loading,
        )
    return Components(
        rollouts, learners, message_queue, supervisor, signals, health, wait, sharing, placement=pgs["actor"][0]
    )
