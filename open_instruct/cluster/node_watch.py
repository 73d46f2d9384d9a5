"""Notices nodes that a cluster has lost, and reports which learners and engines were on them."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

EVERY_S = 2.0
"""Seconds between two looks at the cluster."""
ANSWER_S = 2.0
"""How long a node may take to accept a connection."""


@dataclass(frozen=True)
class LostNode:
    """A node that is gone, and the learners and engines that were on it."""

    address: str
    node_id: str
    learners: list[int]
    engines: list[int]

    def __str__(self) -> str:
        names = [f"learner {rank}" for rank in self.learners] + [f"engine {number}" for number in self.engines]
        return f"node {self.address} ({self.node_id[:8]}) was lost, and with it {', '.join(names)}"


class NodeWatch:
    """Watches the nodes of a run's learners and engines.

    Args:
        learner_nodes: node id of each rank.
        engine_nodes: returns the node id of each engine by position; called each time, because engines move.
    """

    def __init__(self, learner_nodes: Sequence[str], engine_nodes: Callable[[], Mapping[int, str]]) -> None:
        self._learner_nodes = learner_nodes
        self._engine_nodes = engine_nodes
        self._looked_at = 0.0
        self._reported_ids: set[str] = set()

    def describe(self) -> str:
        """The node of each learner and engine, as text."""
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        learners = [f"learner {rank} on {address[node]}" for rank, node in enumerate(self._learner_nodes)]
        return ", ".join(learners + [f"engine {n} on {address[node]}" for n, node in self._engine_nodes().items()])

    def lost_now(self) -> list[LostNode]:
        """Nodes that do not answer. Call it when a part of the run has failed, because Ray itself takes 15 s or more to notice
        that a node is gone."""
        return self._look(_is_gone)

    def lost_under(self, engine: int) -> LostNode | None:
        """The node of an engine that has died, if that node is gone too; else None. `lost` does not report this node again,
        unless learners were on it."""
        residence = self._engine_nodes().get(engine)
        for node in ray.nodes():
            if node["NodeID"] == residence and _is_gone(node):
                lost_node = self._lost(node["NodeID"], node["NodeManagerAddress"])
                if not lost_node.learners:  # else `lost` must report the node as the cause of the learners' death
                    self._reported_ids.add(lost_node.node_id)
                return lost_node
        return None

    def lost(self) -> list[LostNode]:
        """Nodes with a part of the run that were lost since the last call. Looks at the cluster at most every `EVERY_S`."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return []
        self._looked_at = time.monotonic()
        return self._look(lambda node: not node["Alive"])

    def _look(self, is_dead: Callable[[dict[str, Any]], bool]) -> list[LostNode]:
        residents = {*self._learner_nodes, *self._engine_nodes().values()} - self._reported_ids
        nodes = [node for node in ray.nodes() if node["NodeID"] in residents]
        dead = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if is_dead(node)}
        lost_nodes = []
        for node_id in sorted(dead):
            self._reported_ids.add(node_id)
            lost_nodes.append(self._lost(node_id, dead[node_id]))
        return lost_nodes

    def _lost(self, node_id: str, address: str) -> LostNode:
        learners = [rank for rank, node in enumerate(self._learner_nodes) if node == node_id]
        engines = [number for number, node in self._engine_nodes().items() if node == node_id]
        return LostNode(address, node_id, learners, engines)


def _is_gone(node: dict[str, Any]) -> bool:
    """Whether Ray counts the node as dead, or soon will because the node does not answer."""
    return not node["Alive"] or not _answers(node)


def _answers(node: dict[str, Any]) -> bool:
    """Whether Ray's process on the node accepts a connection."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True
