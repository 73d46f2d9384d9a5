"""Several nodes on one machine: each has its own resources, objects travel between them, and nothing is left behind."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from clusters import Node, marked, ray_nodes
from whole_runs import assert_no_shared_memory_is_left, shared_memory

pytestmark = pytest.mark.extended

PASS_ARRAYS_AROUND = """
import os
import socket
import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=0)
class Neighbour:
    def make(self):
        return np.arange(1_250_000)  # 10 MB

    def take(self, array):
        with open("/proc/net/dev") as lines:
            received = sum(int(line.split()[1]) for line in lines if line.strip().startswith("eth0:"))
        return int(array.sum()), socket.gethostname(), received, os.stat("/dev/shm").st_dev

ray.init(log_to_driver=False)
nodes = sorted(ray.nodes(), key=lambda node: node["Resources"]["CPU"])
on = lambda node: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
actors = [Neighbour.options(scheduling_strategy=on(node)).remote() for node in nodes]
arrays = [actor.make.remote() for actor in actors]
for number, (node, actor) in enumerate(zip(nodes, actors)):
    total, host, received, shared_memory = ray.get(actor.take.remote(arrays[number - 1]), timeout=60)
    assert total == sum(range(1_250_000))
    print("node", node["NodeManagerAddress"], node["Resources"]["CPU"], host, received, shared_memory)
"""
NODES = [Node(num_cpus=1), Node(num_cpus=2), Node(num_cpus=3)]


@pytest.mark.parametrize("own_networks", [False, True], ids=["one network", "own networks"])
def test_objects_travel_between_nodes(own_networks: bool) -> None:
    before, interfaces = shared_memory(), network_interfaces()
    with ray_nodes(NODES, own_networks=own_networks) as cluster:
        done = cluster.run([sys.executable, "-c", PASS_ARRAYS_AROUND], timeout_s=120)
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("node ")]
        assert [float(line[1]) for line in lines] == [1.0, 2.0, 3.0], done.stdout
        assert {line[0] for line in lines} == set(cluster.node_addresses)
        if own_networks:
            assert [line[2] for line in lines] == ["node0", "node1", "node2"]
            assert all(int(line[3]) > 10_000_000 for line in lines)  # what its neighbour made came over the network
            assert len({line[4] for line in lines}) == len(NODES)
    assert not marked(cluster.mark)
    assert_no_shared_memory_is_left(before)
    assert network_interfaces() == interfaces


@pytest.mark.alone
def test_a_killed_node_is_gone_at_once_and_a_failing_test_leaves_nothing() -> None:
    before, commands = orphaned_ray_agents(), []

    def fails() -> None:
        with ray_nodes(NODES[:2]) as cluster:
            cluster.kill_node(1)
            assert not marked(f"{cluster.mark}-1")
            assert marked(f"{cluster.mark}-0")
            commands.append((subprocess.Popen(cluster.on_head(["sleep", "600"])), cluster.mark))
            raise RuntimeError("of the test")

    with pytest.raises(RuntimeError, match="of the test"):
        fails()
    [(left_running, mark)] = commands
    assert left_running.wait(timeout=10) == -9
    assert not marked(mark)
    assert orphaned_ray_agents() <= before


def orphaned_ray_agents() -> set[str]:
    """Process ids of Ray's agents without a node: by themselves they stay for a minute or two after theirs was killed."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_agent = (
                (directory / "cmdline").read_bytes().startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))
            )
            parent = (directory / "stat").read_text().rpartition(")")[2].split()[1]
            if is_agent and b"raylet" not in Path(f"/proc/{parent}/cmdline").read_bytes():
                found.add(directory.name)
    return found


def network_interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}
