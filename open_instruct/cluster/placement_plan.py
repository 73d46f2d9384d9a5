"""Plans where learners and engines are placed. Pure: computes from the nodes' resources how many of each node takes, or what is
missing.

A *place* is room for one worker: one GPU, or on CPU a share of a core. A learner takes one place. An engine takes as many places
as its tensor parallelism, all on one node. Colocated engines use the places of the learners.

    plan_placement(nodes, asked) ─► how many of each on which node ─► bundles, one per place ─► probed ─► `hardware_order`
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from open_instruct.system.counted import counted, noun_of

EPSILON = 1e-6
"""Ray counts resources in steps of 1e-4."""


@dataclass(frozen=True)
class Node:
    """A live node of the cluster. Resources are amounts by Ray's names (`CPU`, `GPU`)."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Asked:
    """What a user wants to have placed."""

    learners_per_node: tuple[int, ...]
    num_engines: int
    places_per_engine: int
    """All places of an engine are on one node, because an engine does not span nodes."""
    place: Mapping[str, float]
    """Resources of one place."""
    places_per_core: int = 1
    """Number of places that share a core. Workers are spread over the nodes before they share cores."""
    colocate: bool = False

    @property
    def num_learners(self) -> int:
        return sum(self.learners_per_node)

    @property
    def num_places(self) -> int:
        engines = self.num_engines * self.places_per_engine
        return max(self.num_learners, engines) if self.colocate else self.num_learners + engines

    def __str__(self) -> str:
        nodes = " + ".join(map(str, self.learners_per_node))
        learners = f"{nodes} {noun_of(self.num_learners, 'learner')} and " if nodes else ""
        engines = f"{counted(self.num_engines, 'engine')} of {counted(self.places_per_engine, 'place')}"
        needed = ", ".join(f"{self.num_places * amount:g} {name}" for name, amount in self.place.items() if amount)
        return f"{learners}{engines}{' on the same places' if self.colocate else ''}: {needed}"


@dataclass
class NodeShare:
    """What the plan puts on one node."""

    node: Node
    room: int
    """Number of free places on the node."""
    comfortable: int
    """How many of these places give a worker a core of its own."""
    num_learners: int = 0
    num_engines: int = 0
    colocated: int = field(default=0, repr=False)
    """Number of learners' places that engines share."""

    def num_engine_places(self, request: "Asked") -> int:
        return self.num_engines * request.places_per_engine

    def num_places(self, request: "Asked") -> int:
        """Number of places of both roles together."""
        engines = self.num_engine_places(request)
        return max(self.num_learners, engines) if request.colocate else self.num_learners + engines

    def take(self, num_places: int) -> None:
        self.room -= num_places
        self.comfortable -= num_places


class CannotPlace(ValueError):
    """The cluster does not have enough resources; the message says which are missing."""


def plan_placement(
    nodes: Iterable[Node], request: Asked, *, home: str = "", assumes_idle: bool = False
) -> list[NodeShare]:
    """How many learners and engines each node takes. Returns the nodes that take any, in the order of their addresses.

    Learners of one entry of `learners_per_node` share a node, and entries get different nodes if there are enough: (2, 1) puts
    two learners on one node and one on another. Workers are put close together, but spread over nodes before they share cores.

    Args:
        home: id of the driver's node. Learners prefer this node, because the first learner writes the files.
        assumes_idle: plan as if nothing were in use.

    Raises:
        CannotPlace: there is not enough room; the message has the numbers.
    """
    shares = [_share(node, request, node.total if assumes_idle else node.free) for node in nodes]
    shares.sort(key=lambda share: (address_key(share.node.address), share.node.node_id))
    _place_learners(shares, request, home)
    if request.colocate:
        _share_learners_places(shares, request)
    else:
        _place_engines(shares, request)
    return [share for share in shares if share.num_learners or share.num_engines]


def _share(node: Node, request: Asked, amounts: Mapping[str, float]) -> NodeShare:
    room = min(
        (int(amounts.get(name, 0.0) / amount + EPSILON) for name, amount in request.place.items() if amount), default=0
    )
    return NodeShare(node, room, comfortable=room // request.places_per_core)


def _place_learners(shares: Sequence[NodeShare], request: Asked, home: str) -> None:
    for num_learners in sorted(request.learners_per_node, reverse=True):
        candidates = [share for share in shares if share.room >= num_learners]
        if not candidates:
            raise CannotPlace(
                f"no node has room for {counted(num_learners, 'learner')}{_beside(shares)}: {_rooms(shares)}"
            )
        # The tightest fit among nodes without learners, so that larger nodes stay free for engines.
        best = min(
            candidates,
            key=lambda share: (
                share.num_learners > 0,
                share.comfortable < num_learners,
                share.node.node_id != home,
                share.room,
            ),
        )
        best.num_learners += num_learners
        best.take(num_learners)


def _place_engines(shares: Sequence[NodeShare], request: Asked) -> None:
    size = request.places_per_engine
    for number in range(request.num_engines):
        candidates = [share for share in shares if share.room >= size]
        if not candidates:
            raise CannotPlace(
                f"no node has room for engine {number + 1} of {request.num_engines}, {counted(size, 'place')}{_beside(shares)}: "
                f"{_rooms(shares)}"
            )
        best = next((share for share in candidates if share.comfortable >= size), None) or max(
            candidates, key=lambda s: s.room
        )
        best.num_engines += 1
        best.take(size)


def _share_learners_places(shares: Sequence[NodeShare], request: Asked) -> None:
    size = request.places_per_engine
    for number in range(request.num_engines):
        candidates = [share for share in shares if share.num_learners - share.colocated >= size]
        if not candidates:
            raise CannotPlace(
                f"colocated engine {number + 1} of {request.num_engines} needs {size} learners on one node to share places with; "
                f"there are {' + '.join(map(str, request.learners_per_node))} learners"
            )
        candidates[0].num_engines += 1
        candidates[0].colocated += size


def _beside(shares: Sequence[NodeShare]) -> str:
    learners = sum(share.num_learners for share in shares)
    engines = sum(share.num_engines for share in shares)
    together = f"{counted(learners, 'learner')} and {counted(engines, 'engine')}"
    return f" beside {together}" if learners or engines else ""


def _rooms(shares: Sequence[NodeShare]) -> str:
    return "; ".join(f"{share.node.address} has {share.room} places left" for share in shares) or "there are no nodes"


def describe_nodes(nodes: Iterable[Node], names: Iterable[str]) -> str:
    """Free and total resources of every node, for a message to the user."""
    names = list(names)

    def describe(node: Node) -> str:
        amounts = (f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name} free" for name in names)
        return f"{node.address} ({node.node_id[:8]}): {', '.join(amounts)}"

    return "; ".join(map(describe, sorted(nodes, key=lambda node: (address_key(node.address), node.node_id))))


@dataclass(frozen=True)
class BundlePlace:
    """Where Ray has put a bundle."""

    address: str
    node_id: str
    device: int
    """Number of the GPU on its node, or its position in the node's list; on CPU, number of the slot."""
    gpu: str = ""
    """The GPU as `CUDA_VISIBLE_DEVICES` names it."""


def hardware_order(places: Mapping[int, BundlePlace]) -> list[int]:
    """Bundle indices, sorted by (node address, device number) as numbers, so that neighbours in the list are hardware neighbours.

    Ray's own order says nothing about hardware. The addresses are compared as numbers because 10.0.0.10 sorts before 10.0.0.9 as
    text.
    """
    return sorted(places, key=lambda i: (address_key(places[i].address), places[i].node_id, places[i].device))


def address_key(address: str) -> tuple:
    """A key that sorts IP addresses as numbers, then host names with the numbers in them as numbers."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        parts = re.split(r"(\d+)", address)
        return 1, 0, tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
    return 0, ip.version, int(ip)


def split_roles(
    order: Sequence[int], places: Mapping[int, BundlePlace], shares: Sequence[NodeShare], request: Asked
) -> tuple[list[int], list[int]]:
    """Bundles of the learners and of the engines, each in hardware order.

    When colocated, the bundles of the engines are among the bundles of the learners.
    """
    actor: list[int] = []
    rollout: list[int] = []
    for share in shares:
        indices = [index for index in order if places[index].node_id == share.node.node_id]
        actor += indices[: share.num_learners]
        first = 0 if request.colocate else share.num_learners
        rollout += indices[first:][: share.num_engine_places(request)]
    return actor, rollout
