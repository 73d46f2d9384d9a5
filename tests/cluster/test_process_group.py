"""Learners find each other by the address that the cluster knows their node by."""

import subprocess
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from open_instruct.cluster import network_interface as interfaces
from open_instruct.cluster import process_group
from open_instruct.cluster.network_interface import OF_GLOO, OF_NCCL, network_interface
from open_instruct.device import Device


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose cluster address belongs to `eth1`."""
    addresses = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth1": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(process_group.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", lambda: addresses)
    for name in (OF_GLOO, OF_NCCL):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("node")
def test_the_interface_is_that_of_the_cluster_for_gloo_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_interface(OF_GLOO, OF_NCCL) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert network_interface(OF_GLOO, OF_NCCL) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(("kind", "switched_off"), [("cpu", True), ("cuda", False)])
def test_deepspeeds_table_of_operators_is_touched_on_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, kind: Any, switched_off: bool
) -> None:
    """On GPU the first look at it probes every operator with compilers, for seconds."""
    table: dict[str, bool] = {}
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.ops = SimpleNamespace(__compatible_ops__=table)
    deepspeed.init_distributed = lambda **_: None
    deepspeed.comm = SimpleNamespace(comm=SimpleNamespace(cdb=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(process_group.torch.distributed, "init_process_group", lambda *_, **__: None)
    variables = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "DS_ACCELERATOR", OF_GLOO, OF_NCCL
    for name in variables:
        monkeypatch.setenv(name, "")  # given back after the test
    store: Any = object()
    device = Device(kind, "float32", "sdpa")
    process_group.join(device, ("10.0.0.7", 1), store, rank=0, world_size=1, timeout=timedelta(seconds=1))
    assert ("deepspeed_shm_comm" in table) == switched_off


GROUPS = """
from datetime import timedelta
import torch
from open_instruct.cluster import process_group
from open_instruct.device import Device
from open_instruct.learners.sequence_parallel import SequenceParallel

store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
limit = timedelta(seconds=77)
process_group.join(Device("cpu", "float32", "sdpa"), ("127.0.0.1", store.port), store, rank=0, world_size=1, timeout=limit)

from deepspeed.utils.groups import _clone_world_group

divided = SequenceParallel(size=1, rank=0, world_size=1, attn_implementation="sdpa", config=None, timeout=limit)
for group in (torch.distributed.group.WORLD, _clone_world_group(), divided._group):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


def test_every_group_of_the_learners_has_the_limit_of_the_run() -> None:
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-3:] == ["77.0"] * 3, done.stdout
