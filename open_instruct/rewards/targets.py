"""Makes the names of reward functions (`--reward_funcs`) from the functions themselves, for the Python interface."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from open_instruct.config.verifier_options import PICKLE
from open_instruct.storage.atomic_file import write_atomically


def is_target(text: str) -> bool:
    """Whether a text names a function and not a verifier."""
    return any(mark in text for mark in (":", "."))


def targets_of(rewards: Sequence[Callable[..., Any] | str], directory: Path) -> list[str]:
    """A name for each function: its file or module. A function that another process cannot import, because it belongs to a
    script, a notebook or another function, is pickled by value into `directory`."""
    return [
        reward if isinstance(reward, str) else _importable(reward) or _pickled(reward, place, directory)
        for place, reward in enumerate(rewards)
    ]


def _importable(function: Callable[..., Any]) -> str | None:
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not function or not file:
        return None
    where = module.__name__ if "." in module.__name__ else str(Path(file).resolve())
    return f"{where}:{name}" if where == module.__name__ or where.endswith(".py") else None


def _pickled(function: Callable[..., Any], place: int, directory: Path) -> str:
    import cloudpickle

    name = getattr(function, "__name__", "")
    path = directory / f"{name if name.isidentifier() else f'reward_{place}'}{PICKLE}"
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"rewards: {function!r:.80} is no function. Give functions, or names of verifiers.")
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # anything that the function refers to may refuse
        raise ValueError(
            f"rewards: {name or function!r} cannot be sent to another process ({type(error).__name__}: {error}). Write it into "
            "a file of its own, or let it make inside what it uses."
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return str(path)
