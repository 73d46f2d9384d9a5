"""Makes this node part of a Ray cluster for as long as one command runs; what `ray_node_setup.sh` starts on every node.

    head     starts Ray ─► waits until all nodes have joined ─► runs the command with RAY_ADDRESS ─► stops Ray, exits like it
    workers  wait for the head ─► join ─► stay until the head has gone ─► stop Ray, exit with 0

Which node this is: from NODE_RANK (or GROUP_RANK), NNODES and MASTER_ADDR as with torchrun, or from Beaker's or Slurm's
variables; with none of them it is the only one. All optional:

    RAY_NODE_PORT        of the head, 6379; a single node takes any free one
    RAY_JOIN_TIMEOUT_S   how long to wait for the head, and for all nodes: 600
    RAY_START_ARGS       further words for `ray start`, such as "--num-cpus 8 --object-store-memory 1000000000"
    RAY_NODE_LOGS        a directory that Ray's logs of this node are copied to at the end, into node<rank>/
    RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH   Ray's own; they have to be the same on every node

Signals reach the command, each once, and nothing else: Ray's processes block SIGTERM and SIGINT, and a worker that gets one stays
until the head has gone, because the run may be writing its checkpoint (a second one ends it at once). A closed terminal ends
nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from node_ray import SIGNALS, RayNode, Refused, ask_cluster, check_same_authentication
from node_settings import Settings, name_of, read_settings

START_S = 180.0
"""Ray on this node may take so long to answer, whatever the limit for the others is."""
POLL_S = 0.5
STAY_POLL_S = 2.0
"""How often a worker looks whether the head is still there."""
HEAD_SILENT_S = 30.0
"""A head that neither answers nor refuses has gone after this long; Ray itself gives it up after about as long."""
REFUSALS = 3
"""One that refuses connections has gone at once, give or take a hiccup."""


class Signals:
    """What is done with SIGTERM and SIGINT: at first they end the script."""

    def __init__(self) -> None:
        self.deliver: Callable[[int], None] = _leave
        for number in SIGNALS:
            signal.signal(number, self._received)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _go_on_without_terminal)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.deliver(number)


def _go_on_without_terminal(_number: int, _frame: FrameType | None) -> None:
    """A connection that breaks off on one node ends neither Ray there nor the command."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _leave(number: int) -> None:
    raise SystemExit(128 + number)


def run_head(settings: Settings, node: RayNode, signals: Signals, command: Sequence[str]) -> int:
    """The command's exit code."""
    role = ["--head", "--port", str(settings.port), "--include-dashboard=false"]
    if address := own_address(settings.place.head_host):
        role += ["--node-ip-address", address]
    node.start(role)
    address = f"{wait_for_all(settings, node)}:{settings.port}"
    say(settings, f"all {settings.place.num_nodes} nodes are there, RAY_ADDRESS={address}")
    process = subprocess.Popen(command, env={**settings.environment, "RAY_ADDRESS": address}, start_new_session=True)
    signals.deliver = process.send_signal
    code = process.wait()
    return code if code >= 0 else 128 - code


def own_address(host: str) -> str:
    """The address of this machine that `host` means, or nothing where only Ray can find it out (a name for 127.0.0.1)."""
    with suppress(OSError), socket.socket() as probe:
        address = socket.gethostbyname(host) if host else "127.0.0.1"
        probe.bind((address, 0))
        return "" if address.startswith("127.") else address
    return ""


def wait_for_all(settings: Settings, node: RayNode) -> str:
    """Until every rank has joined; the head's address. The time limit is for the others: it begins when the head answers."""
    wanted = [name_of(rank) for rank in range(settings.place.num_nodes)]
    present: dict[str, str] = {}
    deadline = time.monotonic() + max(settings.join_timeout_s, START_S)
    while not set(wanted) <= set(present):
        if not node.is_alive:
            raise RuntimeError(f"Ray did not start on the head:\n{node.last_words()}")
        if time.monotonic() > deadline:
            here = ", ".join(f"{name} at {address}" for name, address in sorted(present.items())) or "none"
            missing = ", ".join(name for name in wanted if name not in present)
            raise RuntimeError(
                f"{len(present)} of {len(wanted)} nodes have joined after {settings.join_timeout_s:g} s: {here}. Missing: "
                f"{missing}. Was this command started there too, with the same RAY_NODE_PORT, and can it reach port "
                f"{settings.port} of this node? RAY_JOIN_TIMEOUT_S sets the limit"
            )
        time.sleep(POLL_S)
        was_there = bool(present)
        present = ask_cluster(f"127.0.0.1:{settings.port}", settings.environment) or {}
        if present and not was_there:
            deadline = time.monotonic() + settings.join_timeout_s
    return present[wanted[0]]


def run_worker(settings: Settings, node: RayNode, signals: Signals) -> int:
    """0 once the head has gone."""
    address = f"{settings.place.head_host}:{settings.port}"
    join(settings, node, address, signals)
    say(settings, f"joined the head at {address}")
    while not head_has_gone(settings.place.head_host, settings.port):
        if not node.is_alive:
            raise RuntimeError(f"Ray ended on this node while the head is still there:\n{node.last_words()}")
        time.sleep(STAY_POLL_S)
    say(settings, "the head has gone: so does this node")
    return 0


def _stay_for_now(settings: Settings, signals: Signals, number: int) -> None:
    say(settings, f"{signal.Signals(number).name}: stays until the head has gone; a second one ends it at once")
    signals.deliver = _leave


def join(settings: Settings, node: RayNode, address: str, signals: Signals) -> None:
    """Wait for the head, which may come up later than this node, and become part of its cluster.

    From then on the head may run the command, so a signal no longer ends this node.
    """
    deadline = time.monotonic() + settings.join_timeout_s

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"never joined: {what} at {address} within {settings.join_timeout_s:g} s (RAY_JOIN_TIMEOUT_S). Was this "
                    "command started on the head, and do RAY_NODE_PORT and the head's name agree?"
                )
            time.sleep(POLL_S)

    def has_joined() -> bool:
        if not node.is_alive:
            raise RuntimeError(f"Ray did not start on this node:\n{node.last_words()}")
        if signals.deliver is _leave and head_has_gone(host, port):  # a signal came, and the head has followed it
            return True
        return settings.node_name in (ask_cluster(address, settings.environment) or {})

    host, port = settings.place.head_host, settings.port
    wait_for(lambda: knock(host, port) is True, "no head answered")
    wait_for(lambda: check_same_authentication(address, settings.environment), "no Ray answered")
    signals.deliver = lambda number: _stay_for_now(settings, signals, number)
    node.start(["--address", address])
    wait_for(has_joined, "this node did not become part of the cluster")


def knock(host: str, port: int) -> bool | None:
    """True if somebody listens, False if nobody does, None if there is no telling."""
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # the host does not answer, or its name is not known yet
        return None


def head_has_gone(host: str, port: int) -> bool:
    """Look until there is certainty: an answer, several refusals in a row, or silence for long."""
    silent_since, refusals = time.monotonic(), 0
    while (answer := knock(host, port)) is not True:
        refusals = refusals + 1 if answer is False else 0
        if refusals == REFUSALS or time.monotonic() - silent_since > HEAD_SILENT_S:
            return True
        time.sleep(POLL_S)
    return False


def say(settings: Settings, text: str) -> None:
    print(
        f"ray_node_setup, node {settings.place.rank} of {settings.place.num_nodes}: {text}", file=sys.stderr, flush=True
    )


def main(command: Sequence[str]) -> int:
    if not command:
        print(f"usage: ray_node_setup.sh COMMAND …\n\n{__doc__}", file=sys.stderr)
        return 2
    try:
        settings = read_settings(os.environ)
    except ValueError as mistake:
        print(f"ray_node_setup: {mistake}", file=sys.stderr)
        return 2
    signals = Signals()
    node = RayNode(settings)
    try:
        if settings.place.is_head:
            return run_head(settings, node, signals, command)
        return run_worker(settings, node, signals)
    except (RuntimeError, Refused, OSError) as error:
        say(settings, str(error))
        return 1
    finally:
        signals.deliver = lambda _number: None  # it is ending anyway
        node.stop()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
