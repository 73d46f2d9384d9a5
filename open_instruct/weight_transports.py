"""The ways that weights take from learners to engines, by name.

| name | for | engines receive |
|---|---|---|
| `nccl` | engines and learners on GPUs of their own | in one collective, straight into the model |
| `ipc` | engines and learners that share GPUs | each from memory that it shares with a learner, straight into the model |
| `ray_object` | everything, on one node or many, without a GPU too | each as Ray objects; the model changes when all have come |
| `gloo`, `shm` | machines without a GPU | as with `nccl` and `ipc`, through the same classes of vLLM (`cpu_transports`) |
"""

from typing import Literal, get_args

WeightTransport = Literal["nccl", "ipc", "ray_object", "gloo", "shm"]
NCCL, IPC, RAY_OBJECT, GLOO, SHM = get_args(WeightTransport)
IN_ONE_COLLECTIVE = frozenset({NCCL, GLOO})
"""Engines receive together, so when one engine fails in the middle, no engine has the weights."""
SHARES_HANDLES = frozenset({IPC, SHM})
"""Engines are sent handles of memory, which have Python classes in them."""
NEEDS_GPU = frozenset({NCCL, IPC})
WITHOUT_GPU = frozenset({GLOO, SHM})
ABORT_FILE = "OPEN_INSTRUCT_ABORT_UPDATE_FILE"
"""Environment variable of an engine's processes that names a file. Once the file is there, nobody will send the weights that the
processes wait for."""
