"""Facts that the kernel reports about a process, and small processes of our own.

Needs the standard library alone, so that small processes start at once.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

STOPPED = frozenset("Tt")
"""The kernel's letters for processes that SIGSTOP or a debugger has stopped."""


def words_of(function: Callable[[], object]) -> list[str]:
    """The command that runs a function of a module of ours, which needs the standard library alone, in a process of its own. The
    words behind it are the function's, in `sys.argv`; what it returns is the exit code."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    module, name = function.__module__, function.__name__
    code = f"import sys; sys.path.append({package!r}); from {module} import {name}; sys.exit({name}())"
    return [sys.executable, "-I", "-S", "-c", code]


def is_stopped(process: "psutil.Process") -> bool:
    """Whether SIGSTOP, a debugger or a frozen container has stopped the process. A stopped process exists but does nothing."""
    import psutil  # imported late, because it is no part of the standard library

    with suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def process_table() -> dict[int, tuple[str, int]]:
    """State (the kernel's letter) and parent of every process on this machine, by process id. Reads each process once."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *_ = file.read().rpartition(b")")[2].split()
                table[int(name)] = state.decode(), int(parent)
    return table


def is_in_exec(directory: "Path") -> bool:
    """Whether the process of this directory of `/proc`, which showed no command line, is about to run a program.

    For a moment in `exec` the kernel shows neither the command line nor the environment of a process. For zombies and for its own
    threads the kernel never shows them, but these have no program. If a command line is shown, so is the environment.
    """
    with suppress(OSError):
        return bool((directory / "exe").readlink())
    return False
