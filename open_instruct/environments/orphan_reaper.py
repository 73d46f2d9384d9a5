"""The processes that a fork server has forked, and the processes that these leave behind.

    fork server ── forks ──► an environment's process ── starts ──► programs and servers, in sessions of their own too

A process whose parent has ended becomes a child of the nearest subreaper above it (`man 2 PR_SET_CHILD_SUBREAPER`). The fork
server and the environments are subreapers. So while an environment lives, all its descendants stay below it. Once it has ended,
the descendants that are left become children of the fork server, which kills them. To kill a process group would not be enough,
because MCP servers lead groups of their own. No process id comes to mean another process here, because a child's id stays taken
until its parent has reaped it.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress

from open_instruct.system.processes import process_table

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 3.0
"""Longest wait for killed processes to end. The kernel may delay the end of a process that waits for a device."""


def become_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class OrphanReaper:
    """The children of this process, which becomes a subreaper."""

    def __init__(self) -> None:
        become_subreaper()
        self._known: set[int] = set()

    def forked(self, environment: int) -> None:
        """Note the process of an environment as a known child."""
        self._known.add(environment)

    def have_loaded(self) -> None:
        """Note all current children as known. Loaded code may have started processes that all environments share."""
        self._known |= _children()

    def clear_up(self) -> None:
        """Reap the children that have ended, and kill the processes that ended environments have left behind. A process that is
        killed here is reaped by the next call (SIGCHLD triggers it), which then also kills that process's children."""
        if self._reap():
            _kill(_children() - self._known)

    def end(self) -> None:
        """Kill all children, and all processes that they have started."""
        deadline = time.monotonic() + KILL_S
        while (children := _children()) and time.monotonic() < deadline:
            _kill(children)
            if not self._reap():
                time.sleep(0.005)

    def _reap(self) -> bool:
        """Reap all children that have ended. Returns whether there were any."""
        has_ended = False
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self._known.discard(pid)
                has_ended = True
        return has_ended


def _kill(children: set[int]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _children() -> set[int]:
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
