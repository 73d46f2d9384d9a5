"""One command on every node: who is the head, who is missing, what ends when, and that nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from clusters import MARK, kill_marked, make_network, marked
from whole_runs import assert_no_shared_memory_is_left, shared_memory

SCRIPT = Path(__file__).parents[2] / "scripts" / "train" / "ray_node_setup.sh"
sys.path.insert(0, str(SCRIPT.parent))

from node_settings import RAY_ON_LOOPBACK, authentication, first_host_of_slurm, read_place, read_settings  # noqa: E402
from ray_node_setup import own_address  # noqa: E402

pytestmark = pytest.mark.extended

SMALL = "--num-cpus 1 --object-store-memory 80000000"
SHOW_CLUSTER = """
import ray
ray.init(log_to_driver=False)
print("cluster", sorted(node["NodeName"] for node in ray.nodes() if node["Alive"]), ray.cluster_resources()["CPU"])
raise SystemExit(7)
"""
WAIT_FOR_SIGTERM = """
import signal, sys, time
import ray
ray.init(log_to_driver=False)
received = []
signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
print("ready", flush=True)
while not received:
    time.sleep(0.1)
print("alive at the end:", sum(node["Alive"] for node in ray.nodes()), flush=True)
sys.exit(85)
"""

# --- which node this is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, "")),
        ({"NNODES": "1", "NODE_RANK": "0"}, (0, 1, "")),
        ({"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a"}, (2, 3, "a")),
        ({"NNODES": "3", "GROUP_RANK": "1", "MASTER_ADDR": "a"}, (1, 3, "a")),
        (
            {"BEAKER_REPLICA_RANK": "1", "BEAKER_REPLICA_COUNT": "2", "BEAKER_LEADER_REPLICA_HOSTNAME": "b"},
            (1, 2, "b"),
        ),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "c"}, (0, 1, "")),
        ({"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "c[7-8]"}, (1, 2, "first-of-c[7-8]")),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "c", "MASTER_ADDR": "m"}, (1, 2, "m")),
        (
            {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "m", "SLURM_NODEID": "1", "SLURM_NNODES": "9"},
            (0, 2, "m"),
        ),
    ],
)
def test_place_is_read_from_the_launcher(
    environment: dict[str, str], place: tuple[int, int, str], scontrol: Path
) -> None:
    found = read_place(environment)
    assert (found.rank, found.num_nodes, found.head_host) == place
    assert found.is_head == (place[0] == 0)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"NODE_RANK": "0"}, "NNODES is not set"),
        ({"NODE_RANK": "1", "NNODES": "2"}, "MASTER_ADDR is not set"),
        ({"NODE_RANK": "2", "NNODES": "2", "MASTER_ADDR": "a"}, "number 2 of 2"),
        ({"NODE_RANK": "x", "NNODES": "2"}, "NODE_RANK=x"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK or GROUP_RANK is not set"),
        ({"BEAKER_REPLICA_RANK": "0", "BEAKER_REPLICA_COUNT": "2"}, "BEAKER_LEADER_REPLICA_HOSTNAME is not set"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "srun --ntasks-per-node=1"),
        ({"SLURM_NODEID": "0"}, "SLURM_NNODES or SLURM_JOB_NUM_NODES is not set"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "2"}, "MASTER_ADDR or SLURM_JOB_NODELIST is not set"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        read_place(environment)


def test_without_scontrol_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="Set MASTER_ADDR"):
        first_host_of_slurm("c[7-8]")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's program in PATH; it answers with two hosts."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "first-of-%s\\nsecond\\n" "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


@pytest.mark.parametrize(
    ("environment", "has_file", "mode"),
    [
        ({}, False, None),
        ({}, True, "token"),
        ({"RAY_AUTH_TOKEN": "t"}, False, "token"),
        ({"RAY_AUTH_MODE": "disabled"}, True, "disabled"),
        ({"RAY_AUTH_MODE": "Token"}, True, "token"),
        ({"RAY_AUTH_MODE": "token"}, False, None),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, True, None),
    ],
)
def test_authentication_is_spelled_out(
    environment: dict[str, str], has_file: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if has_file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t\n")
    if mode is None:
        with pytest.raises(
            ValueError, match=r"Set RAY_AUTH_TOKEN to the same token on every node.*RAY_AUTH_MODE=disabled"
        ):
            authentication(environment, 2)
    else:
        assert authentication(environment, 2) == {"RAY_AUTH_MODE": mode, RAY_ON_LOOPBACK: "1"}


def test_a_single_node_keeps_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    one, other = authentication({}, 1), authentication({}, 1)
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert authentication({"RAY_AUTH_MODE": "disabled"}, 1) == {"RAY_AUTH_MODE": "disabled", RAY_ON_LOOPBACK: "0"}


def test_settings() -> None:
    two = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "elsewhere"}
    settings = read_settings({**two, "RAY_START_ARGS": "--labels 'a=b c'"})
    assert (settings.port, settings.join_timeout_s, settings.start_args) == (6379, 600.0, ("--labels", "a=b c"))
    assert "RAY_ADDRESS" not in settings.environment
    with pytest.raises(ValueError, match="RAY_JOIN_TIMEOUT_S=soon"):
        read_settings({**two, "RAY_JOIN_TIMEOUT_S": "soon"})


def test_a_name_for_this_very_machine_is_not_an_address_for_others() -> None:
    assert own_address("localhost") == ""
    assert own_address("192.0.2.77") == ""  # of somebody else


# --- with Ray ---------------------------------------------------------------------------------------------------------


class Nodes:
    """Nodes of one cluster, each a run of the script with a mark of its own and a token for all."""

    def __init__(self, tmp_path: Path, num_nodes: int = 2, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self._tmp_path = tmp_path
        self._common = {
            "NNODES": str(num_nodes),
            "MASTER_ADDR": "127.0.0.1",
            "RAY_NODE_PORT": str(20_000 + os.getpid() % 10_000),
            "RAY_START_ARGS": SMALL,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.mark,
            "RAY_JOIN_TIMEOUT_S": "180",
            "PYTHON": sys.executable,
            "TMPDIR": str(tmp_path),
            **environment,
        }

    def start(self, rank: int, code: str = "", enter: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
        """A node that runs Python code once all are there; `enter` puts it into a network."""
        own = {"NODE_RANK": str(rank), MARK: f"{self.mark}-{rank}"}
        return subprocess.Popen(
            [*enter, "bash", str(SCRIPT), sys.executable, "-c", code],
            env={**os.environ, **self._common, **own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def assert_nothing_is_left(self, shared_memory_before: set[str]) -> None:
        assert not marked(self.mark)
        assert_no_shared_memory_is_left(shared_memory_before)
        assert not list(self._tmp_path.glob("ray*"))


def end(process: subprocess.Popen[str], timeout_s: float = 240.0) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    directory = Path(f"/tmp/oi{uuid.uuid4().hex[:6]}")  # pytest's own are too long for the path of a socket
    directory.mkdir()
    all_nodes = Nodes(directory)
    yield all_nodes
    kill_marked(all_nodes.mark)
    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
    directory.rmdir()


def test_two_nodes_with_a_token_run_one_command_and_leave_nothing(nodes: Nodes) -> None:
    before = shared_memory()
    worker = nodes.start(1)  # the head may come up later
    time.sleep(1.0)
    head = nodes.start(0, SHOW_CLUSTER)
    code, output = end(head)
    assert code == 7, output
    assert "cluster ['rank0', 'rank1'] 2.0" in output
    code, output = end(worker, 60.0)
    assert code == 0, output
    assert "the head has gone" in output
    nodes.assert_nothing_is_left(before)


@pytest.mark.alone
def test_a_node_without_the_token_is_told_so_and_the_head_says_who_is_missing(nodes: Nodes) -> None:
    before = shared_memory()
    head = nodes.start(0, SHOW_CLUSTER, RAY_JOIN_TIMEOUT_S="12")
    worker = nodes.start(1, RAY_AUTH_MODE="disabled")
    code, output = end(worker)
    assert code == 1, output
    assert "wants Ray's authentication token, and this node has none" in output
    code, output = end(head)
    assert code == 1, output
    assert "1 of 2 nodes have joined after 12 s: rank0 at" in output
    assert "Missing: rank1" in output
    assert "cluster" not in output  # the command was never run
    nodes.assert_nothing_is_left(before)


@pytest.mark.alone
def test_a_worker_without_a_head_gives_up(nodes: Nodes) -> None:
    code, output = end(nodes.start(1, RAY_JOIN_TIMEOUT_S="1"), 20.0)
    assert code == 1, output
    assert "never joined: no head answered" in output
    nodes.assert_nothing_is_left(shared_memory())


@pytest.mark.alone
def test_sigterm_to_everybody_reaches_the_command_while_all_nodes_are_still_there(nodes: Nodes) -> None:
    before = shared_memory()
    head, worker = nodes.start(0, WAIT_FOR_SIGTERM), nodes.start(1)
    wait_for_line(head, "ready")
    for pid in marked(f"{nodes.mark}-1"):
        os.kill(pid, signal.SIGTERM)  # some schedulers signal whatever belongs to the job
    head.send_signal(signal.SIGTERM)
    code, output = end(head, 90.0)
    assert code == 85, output
    assert "alive at the end: 2" in output
    code, output = end(worker, 60.0)
    assert code == 0, output
    assert "stays until the head has gone" in output
    nodes.assert_nothing_is_left(before)


@pytest.mark.slow
def test_nodes_in_networks_of_their_own_find_the_head_by_its_name(nodes: Nodes) -> None:
    with ExitStack() as cleanup:
        enter, _ = make_network(2, cleanup)
        head = nodes.start(0, SHOW_CLUSTER, enter[0], MASTER_ADDR="node0")
        worker = nodes.start(1, "", enter[1], MASTER_ADDR="node0")
        code, output = end(head)
        assert code == 7, output
        assert "RAY_ADDRESS=10.77.0.1:" in output
        assert "cluster ['rank0', 'rank1'] 2.0" in output
        assert end(worker, 60.0)[0] == 0


@pytest.mark.slow
def test_a_wrong_token_and_one_that_the_head_does_not_want_are_told_apart(nodes: Nodes) -> None:
    head = nodes.start(0, SHOW_CLUSTER, RAY_JOIN_TIMEOUT_S="25")
    code, output = end(nodes.start(1, RAY_AUTH_TOKEN="another"))
    assert code == 1, output
    assert "this node has another one" in output
    assert end(head)[0] == 1
    head = nodes.start(0, SHOW_CLUSTER, RAY_JOIN_TIMEOUT_S="25", RAY_AUTH_MODE="disabled")
    code, output = end(nodes.start(1))
    assert code == 1, output
    assert "and the head at 127.0.0.1" in output
    assert "has not" in output
    assert end(head)[0] == 1


@pytest.mark.slow
def test_killed_outright_it_takes_ray_along_and_the_others_end(nodes: Nodes) -> None:
    head, worker = nodes.start(0, WAIT_FOR_SIGTERM), nodes.start(1)
    wait_for_line(head, "ready")
    head.kill()
    code, output = end(worker, 60.0)
    assert code == 0, output
    # The command sees the end of Ray by itself. Ray's agent, too, but it tries for a minute to report it to the control store,
    # which has ended as well.
    deadline = time.monotonic() + 90.0
    while left := [line for line in map(command_line, marked(nodes.mark)) if line and b"-c" not in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_ray_that_ends_under_a_worker_is_an_error_there(nodes: Nodes) -> None:
    head, worker = nodes.start(0, WAIT_FOR_SIGTERM), nodes.start(1)
    wait_for_line(head, "ready")
    for pid in marked(f"{nodes.mark}-1"):
        if b"raylet/raylet" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    code, output = end(worker, 60.0)
    assert code == 1, output
    assert "Ray ended on this node while the head is still there" in output
    head.send_signal(signal.SIGTERM)
    assert end(head)[0] == 85


@pytest.mark.slow
def test_one_node_needs_no_variables_and_keeps_logs_where_told(nodes: Nodes, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("NNODES", "NODE_RANK", "MASTER_ADDR", "RAY_NODE_PORT"), "")
    process = nodes.start(0, SHOW_CLUSTER, **nothing, RAY_NODE_LOGS=str(tmp_path / "logs"))
    code, output = end(process)
    assert code == 7, output
    assert "cluster ['rank0'] 1.0" in output
    assert (tmp_path / "logs" / "node0" / "raylet.out").exists()


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read the output up to a line; there is no limit but the test's."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"ended with {process.wait()} and never said {text!r}")


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_closed_terminal_ends_no_node() -> None:
    program = "import os, signal, ray_node_setup; ray_node_setup.Signals(); os.kill(os.getpid(), signal.SIGHUP); print('here')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPT.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "here\n")


def test_logs_that_cannot_be_kept_do_not_change_how_a_command_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    program = """
import sys
from node_ray import RayNode
from node_settings import read_settings
node = RayNode(read_settings({"RAY_NODE_LOGS": sys.argv[1]}))
(node._temp_dir / "session_2000" / "logs").mkdir(parents=True)
node.stop()
assert not node._temp_dir.exists()
"""
    words = [sys.executable, "-c", program, str(tmp_path / "logs")]
    done = subprocess.run(words, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ray's logs are not all in" in done.stderr
