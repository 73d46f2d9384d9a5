"""Checks that every part of a run is alive. A dead engine is replaced; the death of another part ends the run."""

from typing import Any

import ray

from open_instruct.cluster.failures import ComponentDied
from open_instruct.cluster.node_watch import LostNode, NodeWatch
from open_instruct.cluster.process_watch import ProcessWatch
from open_instruct.learners.actor_group import RayTrainGroup
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.run.engine_supervisor import EngineSupervisor
from open_instruct.run.heartbeats import Heartbeats
from open_instruct.run.ray_results import value_of
from open_instruct.run.rollout_manager import RolloutManager


def engine_name(number: int) -> str:
    return f"engine {number}"


def actors_of(rollouts: RolloutManager, learners: RayTrainGroup, message_queue: MessageQueue) -> dict[str, Any]:
    """All current actors of a run, by name. A replacement has the name of the engine that died."""
    prompts, results = rollouts.queues
    return {
        "the controller": rollouts.controller,
        "the prompt queue": prompts.actor,
        "the results queue": results.actor,
        "the message queue": message_queue.actor,
        **{f"learner {rank}": worker for rank, worker in enumerate(learners.workers)},
        **{engine_name(number): engine for number, engine in enumerate(rollouts.rollout_engines)},
    }


class Health:
    """Watches the parts of a run. `check` is called wherever the driver waits.

    Args:
        nodes, processes: None if nodes or processes are not watched.
    """

    def __init__(
        self,
        rollouts: RolloutManager,
        learners: RayTrainGroup,
        message_queue: MessageQueue,
        supervisor: EngineSupervisor,
        *,
        nodes: NodeWatch | None = None,
        processes: ProcessWatch | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._learners = learners
        self._message_queue = message_queue
        self._supervisor = supervisor
        self._nodes = nodes
        self._processes = processes
        self.watches: dict[str, Any] = {}
        """References that become done only when the part has failed, by the name of the part."""
        self.heartbeats: Heartbeats | None = None
        self.is_ending = False
        """Whether the run is ending. Then engines generate nothing more, so the death of an engine does not matter."""

    def actors(self) -> dict[str, Any]:
        """All actors of the run, by name."""
        return actors_of(self._rollouts, self._learners, self._message_queue)

    def watch(self) -> None:
        """Begin to watch whether the controller or a queue fails or hangs."""
        self.watches["the controller"] = self._rollouts.controller.watch.remote()
        self.heartbeats = Heartbeats.of_queues(self._rollouts.queues, self._message_queue)

    def check(self) -> None:
        """Replace engines that have ended. Raises `ComponentDied` if another part has ended."""
        for node in self._nodes.lost() if self._nodes is not None else []:
            self._handle_lost_node(node)
        self._look_for_stopped()
        try:
            for name, ref in self.watches.items():
                if ray.wait([ref], timeout=0)[0]:
                    value_of(ref, name)
                    raise ComponentDied(f"{name} ended before the run did")
            if self.heartbeats is not None:
                self.heartbeats.check()
            if not self.is_ending:
                self._supervisor.check()
                self._raise_if_dead()
        except ComponentDied:
            if self.heartbeats is not None:
                self.heartbeats.name_the_dead()  # users of a dead queue fail too, so the queue is the cause to report
            raise

    def _handle_lost_node(self, node: LostNode) -> None:
        """Replace the engines of a lost node. Raises `ComponentDied` if learners were on the node."""
        if node.learners:
            raise ComponentDied(str(node))
        for number in () if self.is_ending else node.engines:
            self._supervisor.replace(number, "is gone")

    def _look_for_stopped(self) -> None:
        """Replace engines whose process is stopped. Raises `ComponentDied` if a process of another part is stopped."""
        engines = {engine_name(number): number for number in range(len(self._rollouts.rollout_engines))}
        for stopped in self._processes.stopped() if self._processes is not None else []:
            if stopped.name not in engines:
                raise ComponentDied(str(stopped))
            if not self.is_ending:
                self._supervisor.replace(engines[stopped.name], str(stopped).removeprefix(f"{stopped.name} "))

    def _raise_if_dead(self) -> None:
        """Raise `ComponentDied` for a dead part that no call waits for: a learner while prompts are generated, or a queue."""
        engines = {engine_name(number) for number in range(len(self._rollouts.rollout_engines))}
        dead = [name for name in self._processes.dead if name not in engines] if self._processes is not None else []
        if dead:
            raise ComponentDied(self.lost_nodes() or f"{' and '.join(dead)} died: the process is gone")

    def lost_nodes(self) -> str:
        """Which nodes are gone at this moment, as text; "" if no node is gone."""
        return "; ".join(map(str, self._nodes.lost_now())) if self._nodes is not None else ""

    def name_of_dead(self, error: BaseException | None) -> str:
        """The name of the part whose death an error reports, or "". It may be another part than the one that was called."""
        while isinstance(error, ray.exceptions.RayTaskError):
            error = error.cause
        dead = getattr(error, "actor_id", None)
        if not dead:
            return ""
        names = (name for name, actor in self.actors().items() if actor._actor_id.hex() == dead)
        return next(names, "")
