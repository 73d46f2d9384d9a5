"""Finds out why the process of an engine's core did not start. vLLM's exception does not say why; its printed output does."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOT_STARTED = "Engine core initialization failed"
"""The beginning of vLLM's error message."""
MOST_BYTES = 2**20
"""Bytes at the end of the output that are searched for the cause."""
_ERROR = re.compile(
    r"^\([^)]*\) ERROR [^\]]*\] (?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE
)
"""The last line of a traceback that a process of vLLM has logged."""


@contextmanager
def cause_is_told() -> Iterator[None]:
    """Put this around the start of an engine. If the engine's core fails to start, the error says why, and where its output is.

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
    """The first error that a process of vLLM has logged, because it causes the later errors; "" if there is none."""
    match = _ERROR.search(output)
    return match["error"].strip() if match else ""


def _output_files() -> Iterator[Path]:
    """The files that this process prints to. Its child processes have inherited them."""
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
