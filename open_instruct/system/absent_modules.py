"""Hides a module from a library that imports it without need: DeepSpeed would import mlflow wherever mlflow is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Importing one of the modules `names` raises `ImportError` in the block, unless it was imported before."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say: not to be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
