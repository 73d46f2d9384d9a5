"""How a run reacts to signals, in every program: the exception that ends the run, the exit codes, and a closed terminal."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_PREEMPTED = 85
"""Exit code after SIGTERM: the run's work is kept, and the same command resumes it."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Interrupted(BaseException):
    """A signal asked the run to end. This is not a failure, so it is no `Exception`, and `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = exit_code_of(number)


def exit_code_of(number: int) -> int:
    return EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_INTERRUPTED


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """In the block, SIGTERM and Ctrl-C end this process with their exit codes. Use it while there is nothing to save: while
    options and data are read, and after the last checkpoint. The step loop has its own handlers. A closed terminal (SIGHUP) does
    not end the process.
    """
    handlers = {signal.SIGTERM: _leave, signal.SIGINT: _leave, signal.SIGHUP: _go_on_without_terminal}
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:  # nohup ignores SIGHUP, and that must stay so
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def survive_terminal() -> None:
    """From now on a closed terminal (SIGHUP) does not end this process, as in `ends_by_signals`."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _go_on_without_terminal)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(exit_code_of(number))


def _go_on_without_terminal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.isatty(descriptor):
                _point_nowhere(descriptor)
    logger.warning("the terminal is closed (SIGHUP): the run goes on, and writes its log only to its output directory")


def tell(text: str) -> None:
    """Print `text`. If stdout has no reader any more (a closed pipe or terminal), go on without printing."""
    try:
        print(text, flush=True)
    except OSError as error:
        _point_nowhere(sys.stdout.fileno())  # else Python fails on exit, when it writes the rest of the buffer
        logger.warning("stdout is closed (%s): the run goes on without printing", error)


def _point_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
