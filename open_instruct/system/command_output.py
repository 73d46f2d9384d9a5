"""How a command that only prints behaves on any terminal and in any pipe. Only Python's own library is needed."""

import io
import os
import sys
from collections.abc import Callable

READER_GONE, INTERRUPTED = 141, 130
"""Exit codes, as shells have them for SIGPIPE and SIGINT."""


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command. Returns its exit code, and ends without a traceback where the reader of its output has gone
    (`… | head -1`) or the user presses Ctrl-C. Characters that the terminal's encoding lacks are shown as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        if sys.stdout is not None:  # it is None where it was closed before the start
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain again at its end
        return READER_GONE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code
