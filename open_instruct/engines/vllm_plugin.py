"""Makes our weight transports and CPU kernels known to vLLM. Every process of every engine imports it, so it imports little."""

import os
from importlib.metadata import entry_points
from typing import Any

from open_instruct.weight_transports import GLOO, IPC, NCCL, RAY_OBJECT, SHM

GROUP = "vllm.general_plugins"
"""Group of entry points. Each process of vLLM loads all of them, or only those that vLLM's environment variable names."""
CHOSEN = "VLLM_PLUGINS"
OURS = "open_instruct_weight_transfer", "open_instruct_cpu_kernels"

_ENGINE_CLASSES = {
    NCCL: ("open_instruct.engines.vllm_weight_transfer", "AbortableNCCLEngine"),
    IPC: ("open_instruct.engines.vllm_weight_transfer", "WatchedIPCEngine"),
    RAY_OBJECT: ("open_instruct.engines.vllm_weight_transfer", "RayObjectWeightTransferEngine"),
    GLOO: ("open_instruct.engines.cpu_transports", "GlooWeightTransferEngine"),
    SHM: ("open_instruct.engines.cpu_transports", "SharedMemoryWeightTransferEngine"),
}


def plugins_are_found(_args: Any) -> list[str]:
    """Mistakes in the environment because of which the processes of an engine would not know our weight transports."""
    if not {point.name for point in entry_points(group=GROUP)}.issuperset(OURS):
        return [
            "open_instruct is not installed in this Python, so vLLM does not find its weight transfer. Run "
            "`pip install --no-deps -e .` in the repository, as scripts/setup_gpu.sh and scripts/setup_cpu.sh do."
        ]
    chosen = os.environ.get(CHOSEN)
    if chosen is not None and not set(chosen.split(",")).issuperset(OURS):
        return [f"{CHOSEN}={chosen}: vLLM would not load {' and '.join(OURS)}. Add them, or unset {CHOSEN}."]
    return []


def engine_backend(transport: str) -> str:
    """The name under which vLLM knows the engine's side of a transport, ours or vLLM's own."""
    return f"open_instruct_{transport}"


def register_weight_transfer() -> None:
    """Register the engine's side of each transport with vLLM in this process. Our `vllm.general_plugins` entry point."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, (module, name) in _ENGINE_CLASSES.items():
        if engine_backend(transport) not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(engine_backend(transport), module, name)


def register_cpu_kernels() -> None:
    """Register the kernels for CPU with vLLM in this process. Our other `vllm.general_plugins` entry point."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import open_instruct.engines.cpu_kernels  # noqa: F401 - registers them
