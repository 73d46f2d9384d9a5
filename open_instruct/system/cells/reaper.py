"""Ends what a process has started, also what has lost its parent. Needs the standard library alone.

    fork server ── forks ──► a cell ── starts ──► programs and servers, in sessions of their own too

A process whose parent has ended becomes a child of the nearest subreaper above it (`man 2 PR_SET_CHILD_SUBREAPER`). The fork
server and its cells are subreapers. So while a cell lives, all its descendants stay below it. Once it has ended, the descendants
that are left become children of the fork server, which kills them. To kill a process group would not be enough, because MCP
servers lead groups of their own. No process id comes to mean another process here, because a child's id stays taken until its
parent has reaped it.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from open_instruct.system.processes import process_table

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_S = 3.0
"""Longest wait for killed processes to end. The kernel may delay the end of a process that waits for a device."""


def become_subreaper() -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends. `parent` is the process id of that thread."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


class Reaper:
    """The children of this process, which becomes a subreaper."""

    def __init__(self) -> None:
        become_subreaper()
        self._known: set[int] = set()

    def forked(self, cell: int) -> None:
        """Note the process of a cell as a known child."""
        self._known.add(cell)

    def have_loaded(self) -> None:
        """Note all current children as known. Loaded code may have started processes that all cells share."""
        self._known |= children()

    def clear_up(self) -> None:
        """Reap the children that have ended, and kill the processes that ended cells have left behind. A process that is killed
        here is reaped by the next call (SIGCHLD triggers it), which then also kills that process's children."""
        if ended := reap():
            self._known -= ended
            kill(children() - self._known)


def reap() -> set[int]:
    """Remove all children that have ended from the kernel's process table."""
    ended = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def kill(pids: Iterable[int]) -> None:
    """Kill children of this process."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_children(limit_s: float = KILL_S) -> None:
    """Kill all children of this process, which is a subreaper, and all processes that they have started."""
    deadline = time.monotonic() + limit_s
    while (pids := children()) and time.monotonic() < deadline:
        kill(pids)
        if not reap():
            time.sleep(0.005)


def children() -> set[int]:
    """The children of this process. Some kernels list them; on others the whole process table is read."""
    try:
        pids: set[int] = set()
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                pids.update(map(int, file.read().split()))
        return pids
    except FileNotFoundError:
        me = os.getpid()
        return {pid for pid, (_, parent) in process_table().items() if parent == me}
