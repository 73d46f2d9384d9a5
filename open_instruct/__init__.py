"""GRPO post-training on Ray, vLLM and DeepSpeed. Start at `grpo_fast.py`."""

import gc
import os
import sys
from typing import Any

__all__ = ["GRPO", "GRPOResult", "RunFailed"]

# Torch, vLLM and DeepSpeed make a million objects when they are imported, and all of them stay. While the process starts,
# Python's garbage collector would scan them again and again, after every 700 new objects.
gc.set_threshold(max(20_000, gc.get_threshold()[0]), *gc.get_threshold()[1:])

if os.path.basename(sys.argv[0]) in ("-m", "default_worker.py"):
    # Python (`python -m`) and Ray's workers look into the current directory first, so a user's `hydra.py` or `transformers.py`
    # there would be imported instead of the installed module. Modules that are not installed are still found there.
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())] + [os.getcwd()]


def __getattr__(name: str) -> Any:
    """`from open_instruct import GRPO` imports the program then, so that `import open_instruct` stays light."""
    if name in __all__:
        from open_instruct import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
