"""Imports user files and modules that add verifiers, losses, advantages or workflows. A file is imported once per process."""

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


class UserModuleError(ValueError):
    """A user's module cannot be used; the message says which module and why."""


def import_user_module(name: str) -> ModuleType:
    """Import the module `name`: the path of a file (`my_rewards.py`), or a dotted name that Python finds.

    Raises:
        UserModuleError: the module cannot be imported.
    """
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except FileNotFoundError as error:
        raise UserModuleError(f"{name}: there is no file {error.filename}") from error
    except Exception as error:  # whatever a user's file raises while it is imported
        raise UserModuleError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"user_module_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # never the name of an installed module
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path  # a name that ends in .py has a spec, and a loader
    assert spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
