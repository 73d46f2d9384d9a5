"""Sends the log to its destinations: the files of a run, and the terminal."""

import logging
import sys
from pathlib import Path
from typing import Any

from open_instruct.system.secret_masking import MaskingFormatter


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`, because the live line replaces `sys.stderr` to show log lines above itself."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _: Any) -> None:
        pass


class _FileHandler(logging.FileHandler):
    """If the file cannot be written, reports it once instead of printing a traceback for each line."""

    _has_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_told:
            self._has_told = True
            print(f"{self.baseFilename} cannot be written ({error}); the log goes on only here", file=sys.stderr)


COMPONENTS = "open_instruct.components"
"""Name of the logger for events of single components, which are too many for the terminal."""


def setup_logging(output_dir: str | Path, verbose: bool = False, *, component_log: str | None = None) -> Path:
    """Send the driver's log to `output_dir/logs/driver.log` and to stderr; returns the file's path. With `component_log` a file
    of that name is written too, in the format that the fully async policy documents.

    stderr shows INFO of this package, and warnings of all packages. With `verbose` it shows the same as the file: DEBUG of this
    package, and INFO of all packages. Another call moves the log to another directory.
    """
    path = Path(output_dir) / "logs" / "driver.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [_FileHandler(path), _StderrHandler()]
    formatter = MaskingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    for handler in handlers:
        handler.setFormatter(formatter)
    if component_log is not None:
        handlers.append(_FileHandler(Path(output_dir) / component_log))
        handlers[-1].setFormatter(MaskingFormatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    if not verbose:
        handlers[1].addFilter(_is_for_the_user)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "_open_instruct", False)]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler._open_instruct = True  # pyrefly: ignore
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("open_instruct").setLevel(logging.DEBUG)
    return path


def _is_for_the_user(record: logging.LogRecord) -> bool:
    ours = record.name == "__main__" or record.name.startswith("open_instruct")
    return record.levelno >= (logging.INFO if ours and record.name != COMPONENTS else logging.WARNING)
