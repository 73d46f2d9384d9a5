"""Who goes to which node, and in which order; on clusters that do not exist."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.cluster.placement_plan import (
    Asked,
    BundlePlace,
    CannotPlace,
    Node,
    address_key,
    describe_nodes,
    hardware_order,
    plan_placement,
    split_roles,
)

GPU = {"CPU": 1.0, "GPU": 1.0}
CPU = {"CPU": 0.2}


def gpu_nodes(*gpus: int, used: dict[int, int] | None = None) -> list[Node]:
    """Nodes 10.0.0.1, 10.0.0.2, … with so many GPUs, of which some are in use."""
    used = used or {}
    return [
        Node(f"node-{n}", f"10.0.0.{n}", {"GPU": num, "CPU": 64.0}, {"GPU": num - used.get(n, 0), "CPU": 64.0})
        for n, num in enumerate(gpus, start=1)
    ]


def cpu_nodes(*cores: float) -> list[Node]:
    return [Node(f"node-{n}", f"10.0.0.{n}", {"CPU": c}, {"CPU": c}) for n, c in enumerate(cores, start=1)]


def asked(*learners: int, engines: int = 0, size: int = 1, **options: object) -> Asked:
    return Asked(learners, engines, size, **{"place": GPU, **options})  # type: ignore[arg-type]


def on_cpu(*learners: int, engines: int = 0, size: int = 1) -> Asked:
    return asked(*learners, engines=engines, size=size, place=CPU, places_per_core=5)


def placed(nodes: list[Node], wanted: Asked, **options: object) -> list[tuple[str, int, int]]:
    shares = plan_placement(nodes, wanted, **options)  # type: ignore[arg-type]
    return [(share.node.address, share.num_learners, share.num_engines) for share in shares]


# --- order ------------------------------------------------------------------------------------------------------------


def test_hardware_order_on_16_nodes_of_16_devices_with_shuffled_bundles() -> None:
    hardware = [(f"10.0.{net}.{host}", device) for net in (9, 10) for host in range(5, 13) for device in range(16)]
    assert len(hardware) == 256
    shuffled = random.Random(3).sample(hardware, len(hardware))
    places = {
        index: BundlePlace(address, f"id of {address}", device) for index, (address, device) in enumerate(shuffled)
    }
    assert [shuffled[index] for index in hardware_order(places)] == hardware


def test_addresses_are_sorted_as_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1", "gpu-10", "gpu-9", "fe80::10", "fe80::9"]
    expected = ["9.255.0.1", "10.0.0.9", "10.0.0.10", "fe80::9", "fe80::10", "gpu-9", "gpu-10"]
    assert sorted(addresses, key=address_key) == expected


def test_nodes_with_one_address_stay_whole() -> None:
    places = {i: BundlePlace("127.0.0.1", f"node-{i % 2}", device=i // 2) for i in range(6)}
    assert hardware_order(places) == [0, 2, 4, 1, 3, 5]


# --- where ------------------------------------------------------------------------------------------------------------


def test_one_node_holds_all_when_it_can() -> None:
    assert placed(gpu_nodes(8, 8), asked(4, engines=4)) == [("10.0.0.1", 4, 4)]


def test_each_entry_has_a_node_of_its_own_where_there_are_enough() -> None:
    assert placed(gpu_nodes(8, 8, 8), asked(2, 1, engines=4, size=2)) == [("10.0.0.1", 2, 3), ("10.0.0.2", 1, 1)]


def test_entries_share_a_node_where_there_are_not() -> None:
    assert placed(gpu_nodes(4), asked(2, 1, engines=1)) == [("10.0.0.1", 3, 1)]


def test_the_tightest_node_takes_the_learners() -> None:
    assert placed(gpu_nodes(8, 2), asked(2, engines=2, size=4)) == [("10.0.0.1", 0, 2), ("10.0.0.2", 2, 0)]


def test_the_drivers_node_is_preferred_for_learners() -> None:
    assert placed(gpu_nodes(8, 8), asked(8, engines=8), home="node-2") == [("10.0.0.1", 0, 8), ("10.0.0.2", 8, 0)]


def test_an_engine_does_not_span_nodes() -> None:
    assert placed(gpu_nodes(6, 6), asked(2, engines=2, size=4)) == [("10.0.0.1", 2, 1), ("10.0.0.2", 0, 1)]
    with pytest.raises(
        CannotPlace, match="no node has room for engine 1 of 1, 8 places beside 1 learner and 0 engines"
    ):
        plan_placement(gpu_nodes(8, 4), asked(1, engines=1, size=8, place=GPU), home="node-1")


def test_workers_spread_over_nodes_before_they_share_cores() -> None:
    three = cpu_nodes(1, 1, 1)
    assert placed(three, on_cpu(1, engines=2)) == [("10.0.0.1", 1, 0), ("10.0.0.2", 0, 1), ("10.0.0.3", 0, 1)]
    assert placed(cpu_nodes(1), on_cpu(1, engines=3)) == [("10.0.0.1", 1, 3)]
    assert placed(cpu_nodes(2), on_cpu(2, 1, engines=2)) == [("10.0.0.1", 3, 2)]


def test_colocated_engines_take_the_places_of_learners() -> None:
    wanted = asked(2, 4, engines=3, size=2, colocate=True)
    assert wanted.num_places == 6
    assert placed(gpu_nodes(4, 2), wanted) == [("10.0.0.1", 4, 2), ("10.0.0.2", 2, 1)]
    with pytest.raises(CannotPlace, match="colocated engine 2 of 2 needs 2 learners on one node"):
        plan_placement(gpu_nodes(4), asked(3, engines=2, size=2, colocate=True))


def test_what_others_use_is_not_there_but_is_of_the_total() -> None:
    nodes = gpu_nodes(8, used={1: 6})
    with pytest.raises(CannotPlace, match=r"no node has room for 4 learners: 10\.0\.0\.1 has 2 places left"):
        plan_placement(nodes, asked(4))
    assert placed(nodes, asked(4), assumes_idle=True) == [("10.0.0.1", 4, 0)]


def test_the_message_has_the_numbers() -> None:
    assert str(asked(2, 1, engines=3, size=2)) == "2 + 1 learners and 3 engines of 2 places: 9 CPU, 9 GPU"
    assert str(asked(1, engines=1)) == "1 learner and 1 engine of 1 place: 2 CPU, 2 GPU"
    assert str(asked(engines=1, size=2)) == "1 engine of 2 places: 2 CPU, 2 GPU"
    text = describe_nodes(gpu_nodes(8, 4, used={2: 3}), ["GPU"])
    assert text == "10.0.0.1 (node-1): 8 of 8 GPU free; 10.0.0.2 (node-2): 1 of 4 GPU free"


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=16),
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(0, 12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_plan_fits_and_every_role_is_in_hardware_order(
    gpus: list[int], learners: list[int], engines: int, size: int, colocate: bool, rng: random.Random
) -> None:
    nodes = gpu_nodes(*gpus)
    wanted = asked(*learners, engines=engines, size=size, colocate=colocate)
    try:
        shares = plan_placement(rng.sample(nodes, len(nodes)), wanted)
    except CannotPlace:
        return
    assert sum(share.num_learners for share in shares) == sum(learners)
    assert sum(share.num_engines for share in shares) == engines
    bundles = []
    for share in shares:
        num = share.num_places(wanted)
        assert num <= share.node.total["GPU"]
        bundles += [BundlePlace(share.node.address, share.node.node_id, device) for device in range(num)]
    places = dict(enumerate(rng.sample(bundles, len(bundles))))
    order = hardware_order(places)
    actor, rollout = split_roles(order, places, shares, wanted)
    for role in (actor, rollout):
        assert role == sorted(role, key=order.index)
    assert (len(actor), len(rollout)) == (sum(learners), engines * size)
    assert colocate or not set(actor) & set(rollout)
    assert not colocate or set(rollout) <= set(actor)
    for first in range(0, len(rollout), size):  # the workers of one engine are neighbours
        group = [places[index] for index in rollout[first : first + size]]
        assert len({place.node_id for place in group}) == 1
        devices = [place.device for place in group]
        assert devices == list(range(devices[0], devices[0] + size))
