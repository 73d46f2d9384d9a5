"""The transports that send weights from learners to engines, by name.

| name | for | engines receive |
|---|---|---|
| `nccl` | engines and learners on GPUs of their own | in one collective, straight into the model |
| `ipc` | engines and learners that share GPUs | each from memory that it shares with a learner, straight into the model |
| `ray_object` | everything, on one node or many, even without a GPU | each as Ray objects; the model changes once all arrived |
| `gloo`, `shm` | machines without a GPU | as with `nccl` and `ipc`, through the same classes of vLLM (`cpu_transports`) |
"""

from typing import Literal, get_args

WeightTransport = Literal["nccl", "ipc", "ray_object", "gloo", "shm"]
NCCL, IPC, RAY_OBJECT, GLOO, SHM = get_args(WeightTransport)
IN_ONE_COLLECTIVE = frozenset({NCCL, GLOO})
"""Engines receive together, so if one engine fails in the middle, no engine has the new weights."""
SHARES_HANDLES = frozenset({IPC, SHM})
"""Engines receive handles of memory, which contain Python classes."""
NEEDS_GPU = frozenset({NCCL, IPC})
WITHOUT_GPU = frozenset({GLOO, SHM})
ABORT_FILE = "OPEN_INSTRUCT_ABORT_UPDATE_FILE"
"""Environment variable of an engine's processes that names a file. Once the file exists, the weights that the processes wait for
will never be sent."""
