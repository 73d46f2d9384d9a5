"""What a signal does to a run, whichever door it came through: the exception that ends it, and the exit codes."""

import signal

EXIT_PREEMPTED = 85
"""After SIGTERM: what was done is kept, the same command goes on from there."""
EXIT_INTERRUPTED = 130
"""After Ctrl-C."""


class Interrupted(Exception):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = EXIT_PREEMPTED if number == signal.SIGTERM else EXIT_INTERRUPTED
