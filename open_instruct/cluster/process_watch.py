"""Notices processes that are stopped (SIGSTOP, a debugger, a frozen container), and Ray's own processes when they are gone.

A stopped process keeps its connections but answers no call, so its callers wait until the limit of their wait, half an hour for a
learner. Asking the process for a sign of life would mistake long work for death, because a process that loads a model or compiles
may hold its interpreter for minutes. The kernel knows the difference, so the watch reads `/proc`, on each node in a process of
that node.

    ProcessWatch    watches the run's actors and the processes that they have started: names actors that are dead or stopped
                    for too long
    RayWatch        a thread of the driver that ends the run when Ray itself is gone or stopped, because nothing else could
"""

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from open_instruct.system.cleanup_process import ENGINE_MARK, CleanupProcess
from open_instruct.system.processes import STOPPED, is_in_exec, is_stopped, process_table

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks at the processes."""
KILL_ROUNDS = 20
RUN_MARK = "OPEN_INSTRUCT_RUN"
"""Environment variable that marks Ray's processes of one run, and all that they start."""


def find_stopped(pids: Sequence[int]) -> list[int]:
    """Those of `pids` that are stopped or have started a process that is stopped. Verifier processes are left out, because the
    verifier pool watches them."""
    table = process_table()  # asking for the children of each of `pids` would read the whole table for each of them
    ancestors: set[int] = set()
    for pid, (state, _) in table.items():
        if state in STOPPED and not _forks_cells(pid):
            ancestors.update(_line_of(pid, table))
    return [pid for pid in pids if pid in ancestors]


def _line_of(pid: int, table: Mapping[int, tuple[str, int]]) -> Iterator[int]:
    """The process, the process that started it, and so on."""
    while pid in table:
        yield pid
        pid = table[pid][1]


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:  # the process is gone; Ray reports that
        return []


def _forks_cells(pid: int) -> bool:
    with suppress(psutil.Error):
        return any("open_instruct.system.cells.fork_server" in word for word in psutil.Process(pid).cmdline())
    return False


@dataclass(frozen=True)
class Stopped:
    """A part of the run that is stopped, so that it answers no calls."""

    name: str
    pid: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name} (process {self.pid}) has been stopped for {self.seconds:.0f} s, by SIGSTOP, a debugger or a frozen "
            "container (--stopped_timeout_s sets the limit)"
        )


class ProcessWatch:
    """Watches the processes of a run's actors on all nodes.

    Args:
        actors: returns the actors by name; called each time, because engines are replaced.
        limit_s: a process that has been stopped for longer is reported.
    """

    def __init__(self, actors: Callable[[], Mapping[str, Any]], limit_s: float) -> None:
        self._actors = actors
        self._limit_s = limit_s
        self._home = ray.get_runtime_context().get_node_id()
        self._find_stopped = ray.remote(find_stopped)  # only once, because Ray keeps every remote function
        self._eyes: dict[str, Any] = {}
        """The task that is looking at the processes of another node now, by node."""
        self._names: dict[tuple[str, int], str] = {}
        self._since: dict[tuple[str, int], float] = {}
        """When a process was first seen stopped, by node and process id."""
        self._looked_at = 0.0
        self.dead: list[str] = []
        """Names of actors that Ray knew to be dead when it was last asked."""

    def stopped(self) -> list[Stopped]:
        """Parts that have been stopped for too long, each reported once. Looks at most every `EVERY_S`, and never waits."""
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return []
        self._looked_at = now
        self._look(now)
        late = [place for place, since in self._since.items() if now - since > self._limit_s]
        return [Stopped(self._names[place], place[1], now - self._since.pop(place)) for place in late]

    def _look(self, now: float) -> None:
        by_node = self._pids_by_node()
        self._note(self._home, find_stopped(by_node.pop(self._home, [])), now)
        for node, ref in list(self._eyes.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._eyes[node]
                with suppress(ray.exceptions.RayError):  # `NodeWatch` reports lost nodes
                    self._note(node, ray.get(ref), now)
        for node, pids in by_node.items():
            if node not in self._eyes:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                ask = self._find_stopped.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
                self._eyes[node] = ask.remote(pids)

    def _pids_by_node(self) -> dict[str, list[int]]:
        """Process ids of the actors that are alive now, by node."""
        actors = ray._private.state.actors()
        self._names.clear()
        self.dead = []
        for name, actor in self._actors().items():
            facts = actors.get(actor._actor_id.hex(), {})
            if facts.get("State") == "DEAD":
                self.dead.append(name)
            if facts.get("State") == "ALIVE" and facts.get("Pid"):
                self._names[facts["Address"]["NodeID"], facts["Pid"]] = name
        by_node: dict[str, list[int]] = {}
        for node, pid in self._names:
            by_node.setdefault(node, []).append(pid)
        self._since = {place: since for place, since in self._since.items() if place in self._names}
        return by_node

    def _note(self, node: str, stopped: Sequence[int], now: float) -> None:
        for place in self._names:
            if place[0] == node and place[1] not in stopped:
                self._since.pop(place, None)
        for pid in stopped:
            if (node, pid) in self._names:
                self._since.setdefault((node, pid), now)


# --- Ray's own processes ----------------------------------------------------------------------------------------------


class RayWatch(threading.Thread):
    """Ends this process, and everything Ray has started on this machine, when Ray itself is gone or stopped for too long.

    When Ray is gone, the driver's calls into Ray may never return, not even `ray.shutdown`, and after a minute Ray ends the
    driver without a line in the log. So this thread logs what happened and ends the process with code 1.
    """

    def __init__(self, processes: Mapping[str, int], mark: str, limit_s: float) -> None:
        super().__init__(name="ray-watch", daemon=True)
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._mark = mark
        self._limit_s = limit_s
        self._over = threading.Event()

    def run(self) -> None:
        stopped_since: dict[str, float] = {}
        while not self._over.wait(EVERY_S / 2):
            now = time.monotonic()
            for name, process in self._processes.items():
                if _is_gone(process):
                    self._end(f"{name} (process {process.pid}) is gone")
                if not is_stopped(process):
                    stopped_since.pop(name, None)
                elif now - stopped_since.setdefault(name, now) > self._limit_s:
                    self._end(f"{name} (process {process.pid}) has been stopped for {self._limit_s:.0f} s")

    def stop(self) -> None:
        """Stop watching, because Ray is about to end on purpose."""
        self._over.set()

    def _end(self, cause: str) -> None:
        if self._over.is_set():
            return
        logger.error(
            "%s, and nothing works without it. Start the same command again to go on from the last checkpoint.", cause
        )
        for handler in logging.getLogger().handlers:
            handler.flush()
        kill_processes(psutil.Process().children(recursive=True))
        kill_marked(self._mark)
        os._exit(1)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return True


def ray_processes_here() -> dict[str, int]:
    """Process ids of this run's Ray on this machine, by name. The GCS may be on another machine."""
    node = ray._private.worker._global_node
    if node is None:
        return {}
    names = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}
    if node.head:
        return {
            names[kind]: processes[0].process.pid
            for kind, processes in node.all_processes.items()
            if kind in names and processes
        }
    belongs_to = {"gcs_server": node.session_name, "raylet": node.raylet_socket_name}
    return {
        names[name]: process.pid
        for process in psutil.process_iter(["name", "cmdline"])
        if (name := process.info["name"]) in names
        and any(belongs_to[name] in word for word in process.info["cmdline"] or ())
    }


@contextmanager
def marked() -> Iterator[str]:
    """All processes that are started in the block, and all processes that those start later, carry the mark."""
    mark = os.environ[RUN_MARK] = uuid.uuid4().hex
    try:
        yield mark
    finally:
        del os.environ[RUN_MARK]


@contextmanager
def nothing_is_left(mark: str) -> Iterator[None]:
    """Put this around a run that has started its own Ray. When this process is killed, Ray's processes on this machine and all
    processes that carry the mark are ended too.

    Ray itself leaves its agents running for a minute, because they try to report the raylet's end to the GCS, which is gone.
    """
    cleanup = CleanupProcess(f"{RUN_MARK}={mark}")
    cleanup.tell(process.pid for process in family_of_ray_here())
    try:
        yield
    finally:
        cleanup.dismiss()


def family_of_ray_here() -> list[psutil.Process]:
    """The processes of this run's Ray on this machine, and all processes that these have started."""
    return [process for pid in ray_processes_here().values() for process in _family(pid)]


def kill_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes that still run, except processes that clean up after an engine. For Ray's processes the mark is not
    enough, because Ray's agents write their title over the environment that holds the mark."""
    for process in processes:
        with suppress(psutil.Error):
            if not any(ENGINE_MARK in word for word in process.cmdline()):
                process.kill()


def kill_marked(mark: str) -> None:
    """Kill every process on this machine that carries the mark, including stopped processes, which cannot end by themselves.

    Processes that clean up after an engine are left to finish.
    """
    for _ in range(KILL_ROUNDS):  # killed processes may just have started others, which are found in the next round
        if not sum(_kill_if_marked(directory, mark) for directory in Path("/proc").glob("[0-9]*")):
            return
        time.sleep(0.1)


def _kill_if_marked(directory: Path, mark: str) -> bool:
    """Kill the process of this directory of `/proc` if it carries the mark. Returns whether it did, or whether that cannot be
    known yet."""
    with suppress(OSError):
        command = (directory / "cmdline").read_bytes()
        if not command:
            return is_in_exec(directory)
        words = (directory / "environ").read_bytes().split(b"\0")
        if f"{RUN_MARK}={mark}".encode() in words and ENGINE_MARK.encode() not in command:
            os.kill(int(directory.name), signal.SIGKILL)
            return True
    return False
