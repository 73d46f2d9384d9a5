"""GRPO post-training on Ray, vLLM and DeepSpeed. Start at `grpo_fast.py`."""

import os
import sys

if os.path.basename(sys.argv[0]) in ("-m", "default_worker.py"):
    # Python (`python -m`) and Ray's workers look into the current directory first, so somebody's `hydra.py` or `transformers.py`
    # there would be imported instead of the installed module. Modules that are not installed are still found there.
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())] + [os.getcwd()]
