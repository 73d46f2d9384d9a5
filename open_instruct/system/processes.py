"""What the kernel says of a process."""

from contextlib import suppress

import psutil


def is_stopped(process: psutil.Process) -> bool:
    """By SIGSTOP, a debugger or a frozen container: it does nothing and answers nobody, but is there."""
    with suppress(psutil.Error):
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
