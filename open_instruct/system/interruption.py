"""What a signal does to a run, whichever door it came through: the exception that ends it, exit codes, a terminal that goes."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_PREEMPTED = 85
"""After SIGTERM: what was done is kept, the same command goes on from there."""
EXIT_INTERRUPTED = 130
"""After Ctrl-C."""


class Interrupted(BaseException):
    """A signal asked the run to end. No failure, so whoever catches `Exception` lets it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = exit_code_of(number)


def exit_code_of(number: int) -> int:
    return EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_INTERRUPTED


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end this process with their exit codes also where there is nothing to save: while options and data are
    read, and after the last checkpoint. A terminal that is closed (SIGHUP) ends nothing. The step loop has handlers of its own.
    """
    handlers = {signal.SIGTERM: _leave, signal.SIGINT: _leave, signal.SIGHUP: _go_on_without_terminal}
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        if before[number] is not signal.SIG_IGN:  # nohup
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(exit_code_of(number))


def _go_on_without_terminal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.isatty(descriptor):
                _point_nowhere(descriptor)
    logger.warning(
        "the terminal is gone (SIGHUP): the run goes on, and tells what it does in its output directory alone"
    )


def tell(text: str) -> None:
    """Print; where nobody reads any more (a closed pipe or terminal), go on without."""
    try:
        print(text, flush=True)
    except OSError as error:
        _point_nowhere(sys.stdout.fileno())  # else Python itself fails with what is still in the buffer when it ends
        logger.warning("nobody reads what is printed any more (%s)", error)


def _point_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
