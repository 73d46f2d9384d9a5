"""What the kernel says about a process."""

from contextlib import suppress
from pathlib import Path

import psutil


def is_stopped(process: psutil.Process) -> bool:
    """Whether SIGSTOP, a debugger or a frozen container has stopped the process: it exists, but does and answers nothing."""
    with suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def is_in_exec(directory: Path) -> bool:
    """Whether the process of this directory of `/proc`, which showed no command line, is about to run a program.

    For a moment in `exec` the kernel shows neither command line nor environment, as it does of zombies and of its own threads for
    good. These have no program. Where a command line is shown, the environment is there too.
    """
    with suppress(OSError):
        return bool((directory / "exe").readlink())
    return False
