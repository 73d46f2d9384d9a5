"""Ray clusters of several nodes on this machine.

    with ray_nodes([Node(), Node(), Node(num_cpus=4)]) as cluster:
        cluster.run([sys.executable, "driver.py"], timeout_s=60)      as on the head node, with RAY_ADDRESS set
        cluster.kill_node(2)                                          its whole process tree, at once

Each node is a `ray start --block` with CPUs, object store and temporary directory of its own. `own_networks` puts each node
into a network namespace (10.77.0.1, 10.77.0.2, …, joined by a switch), with a host name and a /dev/shm of its own: whatever
goes from one to another crosses a network then, and shared memory cannot help. That needs root and `unshare`, `nsenter`, `ip`.
Process ids and the other files are still shared.

Namespaces last as long as a process that holds them, holders and nodes die with the process that made them, and what the nodes
have started carries a mark in its environment: so nothing is left, also when a test fails or is killed.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MARK = "OPEN_INSTRUCT_TEST_NODE"
RAY = str(Path(sys.executable).with_name("ray"))
PORT_IN_NAMESPACE = 6379
START_S = 90.0
KILL_S = 15.0
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "SIGKILL"]


@dataclass(frozen=True)
class Node:
    """What a node offers."""

    num_cpus: float = 2
    object_store_bytes: int = 100_000_000
    resources: str = "{}"
    """Further ones, as JSON."""


@dataclass
class Cluster:
    """Nodes that are up, the head first. `address` is RAY_ADDRESS for whoever runs on the head node."""

    address: str
    node_addresses: list[str]
    mark: str
    enter: list[list[str]]
    """Per node, the words that put a command onto it."""
    started: list[subprocess.Popen] = field(default_factory=list)

    def on_head(self, words: Sequence[str]) -> list[str]:
        """The command as one that runs on the head node, wherever it is started."""
        environment = {"RAY_ADDRESS": self.address, **self.environment("command")}
        return [*self.enter[0], "env", *(f"{name}={value}" for name, value in environment.items()), *words]

    def environment(self, part: object) -> dict[str, str]:
        """What all processes of a part need: the cluster's token (Ray's setting has to be the same everywhere), and the mark."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.mark, MARK: f"{self.mark}-{part}"}

    def run(self, words: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command on the head node; stdout and stderr come back together. It is killed after `timeout_s`."""
        return subprocess.run(
            self.on_head(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def kill_node(self, number: int) -> None:
        """As if its power went: all processes of the node at once, the nodes' own and those of actors."""
        kill_marked(f"{self.mark}-{number}")
        self.started[number].wait(timeout=KILL_S)


@contextmanager
def ray_nodes(nodes: Sequence[Node], *, own_networks: bool = False) -> Iterator[Cluster]:
    """A cluster of `nodes`, the first of which is the head; all have joined. Nothing of it is left afterwards."""
    with ExitStack() as cleanup:
        mark = uuid.uuid4().hex
        scratch = Path(tempfile.mkdtemp(prefix="oi"))  # short: paths of sockets have to fit into 107 characters
        cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
        if own_networks:
            enter, addresses = make_network(len(nodes), cleanup)
            port = PORT_IN_NAMESPACE
        else:
            enter, addresses = [[] for _ in nodes], [_address_of_this_machine()] * len(nodes)
            port = _free_port()
        cluster = Cluster(f"{addresses[0]}:{port}", addresses, mark, enter)
        cleanup.callback(kill_marked, mark)
        for number, node in enumerate(nodes):  # the head has to be there before the others
            log = scratch / f"node{number}.log"
            cluster.started.append(_start(cluster, number, node, scratch / str(number), log))
            if number in (0, len(nodes) - 1):
                _wait_until_started(cluster.started, scratch)
        yield cluster


def _start(cluster: Cluster, number: int, node: Node, temp_dir: Path, log: Path) -> subprocess.Popen:
    port = cluster.address.rpartition(":")[2]
    role = ["--head", "--port", port, "--include-dashboard=false"] if number == 0 else ["--address", cluster.address]
    words = [
        *(RAY, "start", "--block", "--disable-usage-stats", *role),
        *("--node-ip-address", cluster.node_addresses[number]),
        *("--num-cpus", f"{node.num_cpus:g}"),
        *("--object-store-memory", str(node.object_store_bytes)),
        *("--resources", node.resources),
        *("--temp-dir", str(temp_dir)),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        return subprocess.Popen(
            [*DIE_WITH_PARENT, *cluster.enter[number], *words],
            env=environment | cluster.environment(number),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_started(processes: Sequence[subprocess.Popen], logs: Path) -> None:
    """`ray start` says so once the node is known to the cluster."""
    deadline = time.monotonic() + START_S
    for number, process in enumerate(processes):
        log = logs / f"node{number}.log"
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, f"node {number} ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"node {number} is not up after {START_S:g} s:\n{log.read_text()}"
            time.sleep(0.1)


# --- networks ---------------------------------------------------------------------------------------------------------


def make_network(num_nodes: int, cleanup: ExitStack) -> tuple[list[list[str]], list[str]]:
    """A namespace with a switch and one per node, joined by cables; the words that enter each node's, and the addresses."""
    names = [f"node{number}" for number in range(num_nodes)]
    addresses = [f"10.77.0.{number + 1}" for number in range(num_nodes)]
    hosts = "\n".join(["127.0.0.1 localhost", *map(" ".join, zip(addresses, names, strict=True))])
    switch = _hold_namespace(cleanup)
    _check(*_enter(switch), "ip", "link", "add", "switch", "type", "bridge")
    _check(*_enter(switch), "ip", "link", "set", "switch", "up")
    enter = []
    for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
        node = _hold_namespace(cleanup)
        cable = f"cable{number}"
        _check(
            *(*_enter(switch), "ip", "link", "add", cable, "master", "switch", "up", "type", "veth"),
            *("peer", "name", "eth0", "netns", str(node)),
        )
        set_up = (
            f"ip link set lo up && ip link set eth0 up && ip addr add {address}/24 dev eth0 && hostname {name} && "
            "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && "
            f"printf '%s\\n' '{hosts}' > /run/hosts && mount --bind /run/hosts /etc/hosts"
        )
        _check(*_enter(node), "bash", "-c", set_up)
        enter.append(_enter(node))
    return enter, addresses


def _hold_namespace(cleanup: ExitStack) -> int:
    """The process id of a sleeper with network, mounts and host name of its own."""
    sleeper = subprocess.Popen([*DIE_WITH_PARENT, "unshare", "--net", "--mount", "--uts", "sleep", "infinity"])
    cleanup.callback(sleeper.wait, KILL_S)
    cleanup.callback(sleeper.kill)
    ours = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + START_S
    while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n":  # before that it is on its way there
        assert sleeper.poll() is None, "network namespaces need root"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.readlink(f"/proc/{sleeper.pid}/ns/net") != ours
    return sleeper.pid


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", f"--wd={Path.cwd()}"]


def _check(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _address_of_this_machine() -> str:
    """The one that Ray would choose; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# --- processes --------------------------------------------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """Process ids of all that has `mark`, or one that begins with it, in the environment (zombies have none)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(entry.startswith(wanted) for entry in environment):
            found.append(int(directory.name))
    return found


def with_children(pids: list[int]) -> list[int]:
    """Ray's agents write their title over their environment: they are known by their parent, as long as that is there."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(directory.name))
    return pids + [child for pid in pids for child in children.get(pid, []) if child not in pids]


def kill_marked(mark: str) -> None:
    """SIGKILL until nothing with this mark is there any more."""
    deadline = time.monotonic() + KILL_S
    while pids := with_children(marked(mark)):
        assert time.monotonic() < deadline, f"processes {pids} do not end"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
