"""Ray on this node: its processes, and what the cluster that they belong to answers."""

import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from node_settings import Settings

ANSWER_S = 30.0
"""Longest wait for what the cluster says of itself."""
KILL_S = 15.0
"""Longest that killed processes may take to be gone."""
KILL_POLL_S = 0.5
LONGEST_PARENT = 28
"""Characters of a directory below which the paths of Ray's sockets fit into the 107 that a socket's may have."""
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _deaf_and_mortal() -> None:
    """Of Ray's processes, which inherit the mask: signals pass them by, and they die with this script."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class RayNode:
    """Ray's processes of this node, and all that they have started."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        parent = tempfile.gettempdir()
        self._temp_dir = Path(tempfile.mkdtemp(prefix="ray", dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"))
        self._output = self._temp_dir / "start.log"
        self._process: subprocess.Popen | None = None
        # What loses its parent becomes a child of this process, so that `stop` finds and ends it.
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, role: Sequence[str]) -> None:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role]
        words += ["--node-name", self._settings.node_name, "--temp-dir", str(self._temp_dir)]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*words, *self._settings.start_args],
                env=self._settings.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_deaf_and_mortal,
            )

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """End everything that was started here, and remove what it kept in shared memory and in files."""
        mapped = set[str]()
        deadline = time.monotonic() + KILL_S
        while (found := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
            mapped |= _shared_memory_of(found)
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=KILL_POLL_S)
        for path in mapped - _shared_memory_of(psutil.process_iter()):
            Path(path).unlink(missing_ok=True)
        if self._settings.logs:
            self._keep_logs(Path(self._settings.logs) / f"node{self._settings.place.rank}")
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _keep_logs(self, target: Path) -> None:
        """Copy Ray's logs. A full disk does not change how the command ended."""
        for session in self._temp_dir.glob("session_2*/logs"):
            try:
                shutil.copytree(session, target, dirs_exist_ok=True, symlinks=True)
            except OSError as error:  # `shutil.Error` is one too
                print(f"Ray's logs are not all in {target}: {error}", file=sys.stderr, flush=True)


def _shared_memory_of(processes: Any) -> set[str]:
    """Files in /dev/shm that the processes have mapped; those that cannot be looked at are somebody else's."""
    paths = set[str]()
    for process in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, _, path = line.partition("/dev/shm/")
                if path and not path.endswith("(deleted)"):
                    paths.add(f"/dev/shm/{path}")
    return paths


# --- what the cluster answers -----------------------------------------------------------------------------------------


class Refused(Exception):
    """Head and this node do not agree on authentication; trying again would not help."""


def ask_cluster(address: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Nodes that are alive: name to address. None while there is no answer.

    In a process of its own, because Ray reads its authentication once in each.

    Raises:
        Refused: the token is wrong or missing.
    """
    words = [sys.executable, "-c", _ASK, address]
    asking = subprocess.Popen(words, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer, complaints = asking.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:  # with a wrong token Ray tries on
        asking.kill()
        answer, complaints = asking.communicate(timeout=ANSWER_S)
    if "InvalidAuthToken" in complaints:
        raise Refused
    if asking.returncode != 0:
        return None
    return {name: address for name, _, address in (line.partition(" ") for line in answer.splitlines())}


_ASK = """
import sys
from ray._raylet import GcsClient

nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10).values()
for node in nodes:
    if node.state == node.ALIVE:
        print(node.node_name, node.node_manager_address)
"""


def check_same_authentication(address: str, environment: Mapping[str, str]) -> bool:
    """Whether the head answers; it has to want exactly the token that this node has.

    Raises:
        Refused: says on which side the token is missing.
    """
    has_token = environment["RAY_AUTH_MODE"] == "token"
    advice = "Set RAY_AUTH_TOKEN to the same token on every node, or RAY_AUTH_MODE=disabled on every node."
    try:
        if ask_cluster(address, environment) is None:
            return False
    except Refused:
        state = "has another one" if has_token else "has none"
        raise Refused(
            f"the head at {address} wants Ray's authentication token, and this node {state}. {advice}"
        ) from None
    if has_token and _is_open(address, environment):
        raise Refused(f"this node has Ray's authentication turned on, and the head at {address} has not. {advice}")
    return True


def _is_open(address: str, environment: Mapping[str, str]) -> bool:
    """Whether the head answers without a token. Ray would let the node join, and its parts then refuse one another."""
    try:
        return ask_cluster(address, {**environment, "RAY_AUTH_MODE": "disabled"}) is not None
    except Refused:
        return False
