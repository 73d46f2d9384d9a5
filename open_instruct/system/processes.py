"""What the kernel says about a process."""

from contextlib import suppress

import psutil


def is_stopped(process: psutil.Process) -> bool:
    """Whether SIGSTOP, a debugger or a frozen container has stopped the process: it exists, but does and answers nothing."""
    with suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
