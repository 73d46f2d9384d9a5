"""Why the process of an engine's core did not start. vLLM tells its caller only that it did not; the rest was printed."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOT_STARTED = "Engine core initialization failed"
"""What vLLM's error begins with."""
MOST_BYTES = 2**20
"""Of the output that are looked at, from the end."""
_ERROR = re.compile(
    r"^\([^)]*\) ERROR [^\]]*\] (?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE
)
"""The last line of a traceback that a process of vLLM has logged."""


@contextmanager
def cause_is_told() -> Iterator[None]:
    """In the block an engine is started. If its core fails, the error says why, and where the core's output is.

    Raises:
        RuntimeError: that error, in place of vLLM's.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(NOT_STARTED):
            raise
        paths = list(_output_files())
        for path in paths:
            if cause := cause_in(_end_of(path)):
                raise RuntimeError(f"the engine's core did not start: {cause} (all of its output: {path})") from error
        if not paths:
            raise
        raise RuntimeError(f"{error} It is in {' or '.join(map(str, paths))}.") from error


def cause_in(output: str) -> str:
    """The first error that a process of vLLM has logged, because those after it follow from it; "" if there is none."""
    found = _ERROR.search(output)
    return found["error"].strip() if found else ""


def _output_files() -> Iterator[Path]:
    """The files that this process prints to, which those that it starts have inherited."""
    for descriptor in (1, 2):
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                yield path


def _end_of(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_BYTES))
        return file.read().decode(errors="replace")
    return ""
