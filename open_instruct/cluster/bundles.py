"""Reserves room on a Ray cluster: one bundle per place, on the nodes that the plan names.

Before it waits for anything, `reserve` compares what is asked for with what the cluster has. Each of its waits has a deadline.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from open_instruct.cluster.placement_plan import (
    Asked,
    BundlePlace,
    CannotPlace,
    Node,
    NodeShare,
    describe_nodes,
    hardware_order,
    plan_placement,
    split_roles,
)
from open_instruct.device import Device

Bundles = tuple[PlacementGroup, list[int]]
"""A placement group, and the indices of its bundles that belong to one role, with neighbours in hardware side by side."""

POLL_S = 0.5
MAKE_S = 10
"""Shortest wait for a placement group that has room. Ray makes a group in milliseconds, but a group that is removed while Ray
makes it keeps its resources for as long as the cluster lives."""
PROBE_S = 300.0
"""Deadline for finding out which GPU each bundle has, unless a run sets one (`--init_timeout_s`). Each bundle starts a new Ray
process for this."""
NODE_ID_LABEL = "ray.io/node-id"
KEEP_VISIBLE_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""With this variable Ray lets a worker see all visible devices of its node."""

_gpus: dict[PlacementGroupID, dict[int, "Gpu"]] = {}
"""GPUs by group, then bundle. They can be found out only before anything runs in the bundles, because the probe takes the GPU."""


class Gpu(NamedTuple):
    """The GPU of a bundle."""

    number: int
    """Number of the GPU on its node; if GPUs have names instead of numbers, the position in the node's list."""
    name: str
    """The GPU as `CUDA_VISIBLE_DEVICES` names it: a number, the GPU's UUID, or the name of a part of the GPU (MIG)."""


@dataclass(frozen=True)
class Reservation:
    """Bundles for both roles."""

    group: PlacementGroup
    actor: list[int]
    rollout: list[int]


def cluster_nodes() -> list[Node]:
    """The live nodes with their total and their free resources."""
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public call for it

    free = available_resources_per_node()
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def reserve(
    request: Asked, *, timeout_s: float, probe_s: float = PROBE_S, on_poll: Callable[[], None] = lambda: None
) -> Reservation:
    """Reserve places for what is asked. Finding out which GPU each place has may take `probe_s` seconds. While there is no room,
    `on_poll` is called now and then.

    Raises:
        CannotPlace: at once, if the cluster could not hold what is asked even with nothing else running; after `timeout_s`, if
            other programs leave no room; or if Ray does not make a group that has room (Ray gets at least `MAKE_S`). The message
            says what was asked for and what every node has.
    """
    deadline = time.monotonic() + timeout_s
    shares = _wait_for_room(request, deadline, timeout_s, on_poll)
    nodes = [share.node.node_id for share in shares for _ in range(share.num_places(request))]
    group = placement_group(
        [dict(request.place) for _ in nodes],
        strategy="PACK",
        bundle_label_selector=[{NODE_ID_LABEL: node_id} for node_id in nodes],
    )
    wait_s = max(math.ceil(deadline - time.monotonic()), MAKE_S)  # Ray rounds down: half a second would be 0
    if not group.wait(timeout_seconds=wait_s):
        remove_placement_group(group)
        raise CannotPlace(f"the placement group was not ready in {wait_s} s. {_asked_and_there(request)}")
    places = bundle_places(group, probe_s=probe_s)
    return Reservation(group, *split_roles(hardware_order(places), places, shares, request))


def _wait_for_room(request: Asked, deadline: float, timeout_s: float, on_poll: Callable[[], None]) -> list[NodeShare]:
    home = ray.get_runtime_context().get_node_id()
    while True:
        nodes = cluster_nodes()
        try:
            return plan_placement(nodes, request, home=home)
        except CannotPlace as error:
            try:
                plan_placement(nodes, request, home=home, assumes_idle=True)
            except CannotPlace as never:
                raise CannotPlace(f"{never}. {_asked_and_there(request)}") from None
            if time.monotonic() > deadline:
                raise CannotPlace(f"no room after {timeout_s:g} s: {error}. {_asked_and_there(request)}") from None
        on_poll()
        time.sleep(POLL_S)


def _asked_and_there(request: Asked) -> str:
    return (
        f"Asked for: {request}. Nodes: {describe_nodes(cluster_nodes(), request.place)}. Ask for fewer, or add nodes."
    )


def bundle_places(group: PlacementGroup, *, probe_s: float = PROBE_S) -> dict[int, BundlePlace]:
    """Where each bundle of a ready group is: its node from Ray's table, its GPU from a task that runs inside the bundle.

    The first call must be made before anything computes in the bundles. CPU bundles have no device number, so they count as
    slots 0, 1, … of their node.
    """
    node_of_bundle = _node_of_bundle(group)
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if any(bundle.get("GPU") for bundle in group.bundle_specs):
        if group.id not in _gpus:
            _gpus[group.id] = _probe_gpus(group, timeout_s=probe_s)
        devices = _gpus[group.id]
    else:
        devices = {index: Gpu(slot, "") for index, slot in _count_slots(node_of_bundle).items()}
    return {index: BundlePlace(address[node_id], node_id, *devices[index]) for index, node_id in node_of_bundle.items()}


def _node_of_bundle(group: PlacementGroup) -> dict[int, str]:
    return {int(index): node_id for index, node_id in placement_group_table(group)["bundles_to_node_id"].items()}


def _count_slots(node_of_bundle: dict[int, str]) -> dict[int, int]:
    counts: dict[str, int] = {}
    slots = {}
    for index, node_id in sorted(node_of_bundle.items()):
        slots[index] = counts.get(node_id, 0)
        counts[node_id] = slots[index] + 1
    return slots


def _probe_gpus(group: PlacementGroup, *, timeout_s: float) -> dict[int, Gpu]:
    # Without this variable Ray shows a task only its own GPU, and the task cannot read the node's list.
    @ray.remote(num_cpus=0, num_gpus=1, max_retries=0, runtime_env={"env_vars": {KEEP_VISIBLE_DEVICES: "1"}})
    def gpu() -> Gpu:
        name = str(ray.get_gpu_ids()[0])
        return Gpu(int(name) if name.isdigit() else os.environ["CUDA_VISIBLE_DEVICES"].split(",").index(name), name)

    indices = range(len(group.bundle_specs))
    refs = [
        gpu.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote() for index in indices
    ]
    try:
        return dict(zip(indices, ray.get(refs, timeout=timeout_s), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise CannotPlace(
            f"not all of {len(refs)} bundles said in {timeout_s:g} s which GPU they have. Workers of Ray that start slowly need "
            "a larger --init_timeout_s"
        ) from error


def as_bundles(pg: Bundles | PlacementGroup) -> Bundles:
    """`pg` as bundles. A bare placement group means all of its bundles, in hardware order."""
    if isinstance(pg, tuple):
        return pg
    if not pg.wait(timeout_seconds=PROBE_S):
        raise CannotPlace(f"the placement group that was given is not ready after {PROBE_S:g} s")
    return pg, hardware_order(bundle_places(pg))


def node_ids(bundles: Bundles) -> list[str]:
    """The node of each bundle, in the order of the indices."""
    group, indices = bundles
    node_of_bundle = _node_of_bundle(group)
    return [node_of_bundle[index] for index in indices]


def is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def actor_options(
    device: Device,
    bundles: Bundles | None,
    position: int = 0,
    *,
    share: float = 1.0,
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """`.options()` of an actor that computes on the bundle at `position`, or anywhere without bundles.

    The actor takes `share` of the place. With a share below 1 other actors can share the place. `env` is added to the environment
    of `device_env`.
    """
    options: dict[str, Any] = {
        **{f"num_{name.lower()}s": amount * share for name, amount in device.place_resources.items()},
        "runtime_env": {"env_vars": device_env(device) | dict(env)},
    }
    if bundles is not None:
        group, indices = bundles
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, indices[position])
    return options


def device_env(device: Device) -> dict[str, str]:
    """`device.actor_env`, for an actor that sees only the GPUs that Ray gives it.

    An actor would inherit `KEEP_VISIBLE_DEVICES=1` from the environment in which Ray was started, as other training programs ask
    for. Then Ray would show each learner all GPUs of its node, and all learners would compute on the first GPU.
    """
    return device.actor_env | ({KEEP_VISIBLE_DEVICES: "0"} if device.kind == "cuda" else {})


def visible_gpus(bundles: Bundles) -> str:
    """The GPUs of bundles on one node, as `CUDA_VISIBLE_DEVICES` names them."""
    group, indices = bundles
    places = bundle_places(group)
    return ",".join(places[index].gpu for index in indices)
