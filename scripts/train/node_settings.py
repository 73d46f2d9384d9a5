"""What the environment says of this node: its place among all, the settings of the script, and Ray's authentication."""

import secrets
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 6379
DEFAULT_JOIN_TIMEOUT_S = 600.0
RAY_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# --- which node this is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """This node among all."""

    rank: int
    num_nodes: int
    head_host: str
    """Name or address; empty on a single node."""

    @property
    def is_head(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Surroundings:
    """Where a launcher says which node this is. Of several names the first one that is set counts."""

    name: str
    rank: tuple[str, ...]
    num_nodes: tuple[str, ...]
    head: tuple[str, ...]
    hint: str = ""
    """What may be wrong if the rank is missing."""


TORCHRUN = Surroundings("torchrun", ("NODE_RANK", "GROUP_RANK"), ("NNODES",), ("MASTER_ADDR",))
BEAKER = Surroundings(
    "Beaker", ("BEAKER_REPLICA_RANK",), ("BEAKER_REPLICA_COUNT",), ("BEAKER_LEADER_REPLICA_HOSTNAME",)
)
SLURM = Surroundings(
    "Slurm",
    ("SLURM_NODEID",),
    ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    ("MASTER_ADDR", "SLURM_JOB_NODELIST"),
    hint=" Start the command on every node: srun --ntasks-per-node=1",
)


def read_place(environment: Mapping[str, str]) -> Place:
    """This node's place, from the launcher that set its rank.

    Raises:
        ValueError: a variable is missing or makes no sense; the message names it.
    """
    for surroundings in (TORCHRUN, BEAKER, SLURM):
        if any(environment.get(name) for name in surroundings.rank):
            return _read_place(surroundings, environment)
    for surroundings in (TORCHRUN, BEAKER, SLURM):
        for name in surroundings.num_nodes:
            if (environment.get(name) or "1") != "1":
                rank = " or ".join(surroundings.rank)
                hint = surroundings.hint
                raise ValueError(
                    f"{name}={environment[name]}, but {rank} is not set: which of them is this node?{hint}"
                )
    return Place(0, 1, "")


def _read_place(surroundings: Surroundings, environment: Mapping[str, str]) -> Place:
    def read(names: tuple[str, ...]) -> tuple[str, str]:
        for name in names:
            if environment.get(name):
                return name, environment[name]
        raise ValueError(f"{surroundings.name} says which node this is, but {' or '.join(names)} is not set")

    def number(names: tuple[str, ...]) -> int:
        name, text = read(names)
        if not text.isdecimal():
            raise ValueError(f"{name}={text}: must be a whole number")
        return int(text)

    rank, num_nodes = number(surroundings.rank), number(surroundings.num_nodes)
    if rank >= num_nodes:
        raise ValueError(f"this node is number {rank} of {num_nodes}: ranks count from 0 to {num_nodes - 1}")
    if surroundings is SLURM and environment.get("SLURM_LOCALID", "0") != "0":
        raise ValueError("Slurm started several tasks on this node: it takes one, --ntasks-per-node=1")
    if num_nodes == 1:
        return Place(0, 1, "")
    name, head = read(surroundings.head)
    return Place(rank, num_nodes, first_host_of_slurm(head) if name == "SLURM_JOB_NODELIST" else head)


def first_host_of_slurm(node_list: str) -> str:
    """The first of `gpu[07-09],login1`, as Slurm reads it."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise ValueError(
            f"SLURM_JOB_NODELIST={node_list}: scontrol, which reads it, is not here (in a container?). Set MASTER_ADDR to the "
            "first node's name"
        ) from None
    hosts = done.stdout.split()
    if done.returncode != 0 or not hosts:
        raise ValueError(f"scontrol show hostnames {node_list}: {done.stderr.strip() or 'no answer'}")
    return hosts[0]


# --- settings ---------------------------------------------------------------------------------------------------------


def authentication(environment: Mapping[str, str], num_nodes: int) -> dict[str, str]:
    """RAY_AUTH_MODE, spelled out for every process of this node.

    Whoever reaches a Ray without a token runs what they like on it. Several nodes listen on the network, so that has to be asked
    for. A single node gets a token of its own, and listens on the loopback interface alone (with the setting that Ray has for
    Windows and macOS).

    For Ray 2.60: without it a head turns authentication on where it finds a token, and workers and drivers do not; they then
    fail for ever with InvalidAuthToken. tests/project/test_ray_node_setup.py notices.

    Raises:
        ValueError: a token is asked for, or needed, and is not here.
    """
    interface = {RAY_ON_LOOPBACK: "0" if num_nodes == 1 else "1"}
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    if mode not in ("", "token"):
        return {"RAY_AUTH_MODE": mode, **interface}
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(environment.get("RAY_AUTH_TOKEN")) or (path.is_file() and bool(path.read_text().strip()))
    if not has_token and (mode or environment.get("RAY_AUTH_TOKEN_PATH")):
        raise ValueError(
            f"Ray's authentication wants a token, and this node has none: {path} has none in it and RAY_AUTH_TOKEN is not set. "
            "Set RAY_AUTH_TOKEN to the same token on every node, or RAY_AUTH_MODE=disabled on every node"
        )
    if not has_token and num_nodes == 1:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **interface}
    if not has_token:
        raise ValueError(
            "Ray's nodes would let anybody in who reaches them over the network, and run what they are told: there is no "
            "token. Set RAY_AUTH_TOKEN to the same token on every node (openssl rand -hex 32 makes one); or, where the network "
            "is closed to others, RAY_AUTH_MODE=disabled on every node"
        )
    return {"RAY_AUTH_MODE": "token", **interface}


@dataclass(frozen=True)
class Settings:
    """What the environment says beside the place."""

    place: Place
    port: int
    join_timeout_s: float
    start_args: tuple[str, ...]
    logs: str
    environment: dict[str, str]
    """Of everything that is started here."""

    @property
    def node_name(self) -> str:
        return name_of(self.place.rank)


def name_of(rank: int) -> str:
    return f"rank{rank}"


def read_settings(environment: Mapping[str, str]) -> Settings:
    """All of it, or one `ValueError` that names what is wrong."""
    place = read_place(environment)
    port = _positive(environment, "RAY_NODE_PORT", _free_port() if place.num_nodes == 1 else DEFAULT_PORT)
    without = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    return Settings(
        place,
        int(port),
        _positive(environment, "RAY_JOIN_TIMEOUT_S", DEFAULT_JOIN_TIMEOUT_S),
        tuple(shlex.split(environment.get("RAY_START_ARGS", ""))),
        environment.get("RAY_NODE_LOGS", ""),
        without | authentication(environment, place.num_nodes),
    )


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{name}={text}: must be a number above 0")
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
