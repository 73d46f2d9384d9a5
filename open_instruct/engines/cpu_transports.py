"""Weight transports for a machine without a GPU that work like those for GPUs: `gloo` like `nccl`, `shm` like `ipc`.

Both run vLLM's own classes on both sides, packed as on GPU. This module answers the calls that these classes make to CUDA
(`stand_in_for_cuda`). So start, update and finish are three calls, the model changes as the weights arrive, a collective hangs
when a member dies, and a shared buffer is refilled while others may still read it. A bug of the GPU transports therefore
appears here too, where tests can see it.

For vLLM 0.32. `tests/scenarios/test_gpu_transports.py` notices when the classes ask CUDA for something else.
"""

import threading
import time
import weakref
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import base, ipc_engine, nccl_common, nccl_engine, packed_tensor

from open_instruct.engines.engine_cleanup import SHARED_MEMORY, mapped
from open_instruct.engines.vllm_weight_transfer import AbortableNCCLEngine, WatchedIPCEngine

POLL_S = 0.0005
"""How often a broadcast checks whether it is done or was aborted."""
FOREVER = timedelta(days=1)
"""NCCL has no time limit of its own, so gloo gets none either."""
THIS_NODE = "cpu"
"""Stands in for the UUID of the GPU that a learner and an engine share."""


class GlooWeightTransferEngine(AbortableNCCLEngine):
    """vLLM's NCCL engine over gloo."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in_for_cuda()
        super().__init__(*args, **kwargs)


class SharedMemoryWeightTransferEngine(WatchedIPCEngine):
    """vLLM's IPC engine over shared memory of the node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in_for_cuda()
        super().__init__(*args, **kwargs)


class GlooCommunicator:
    """Replaces vLLM's `PyNcclCommunicator`. A broadcast waits until it is done or aborted, even when a member has died."""

    def __init__(self, group: StatelessProcessGroup) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.device = torch.device("cpu")
        self._group: Any = torch.distributed.ProcessGroupGloo(group.store, group.rank, group.world_size, FOREVER)
        self._is_aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self._is_aborted.is_set():
            return
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        work = self._group.broadcast([tensor], options)
        while not self._is_aborted.is_set():
            if work.is_completed() and _has_succeeded(work):
                return
            time.sleep(POLL_S)

    def destroy(self) -> None:
        self._is_aborted.set()
        self._group = None


def _has_succeeded(work: Any) -> bool:
    """False where a member has died, which gloo notices and NCCL does not."""
    try:
        return work.wait()
    except RuntimeError:
        return False


def stand_in_for_cuda() -> None:
    """In this process, replace CUDA by functions for CPU in vLLM's NCCL and IPC engines. Calling it again does nothing."""
    assert not torch.cuda.is_available(), "gloo and shm are for machines without a GPU"
    stand_in: Any = _TorchOnCPU()
    for module in (base, ipc_engine, nccl_common, nccl_engine, packed_tensor):
        module.torch = stand_in
    for module in (ipc_engine, packed_tensor):
        module.reduce_tensor = _share  # type: ignore[assignment]
    torch.multiprocessing.reductions.rebuild_cuda_tensor = _open_shared  # type: ignore[assignment]
    nccl_common.stateless_init_process_group = _join_group  # type: ignore[assignment]


def _join_group(master_address: str, master_port: int, rank: int, world_size: int, device: object) -> GlooCommunicator:
    group = StatelessProcessGroup.create(master_address, master_port, rank, world_size)
    return GlooCommunicator(group)


def _share(tensor: torch.Tensor) -> tuple[Any, tuple]:
    """Like torch's `reduce_tensor` for a CUDA tensor: returns a function and its arguments. Another process of the node calls the
    function to open the same memory.

    As in `reduce_tensor`, classes are among the arguments, and msgpack refuses classes.
    """
    _remove_what_nobody_has_open()
    shared = tensor.untyped_storage()
    manager, handle, num_bytes = shared._share_filename_cpu_()
    path = SHARED_MEMORY / handle.decode().removeprefix("/")
    if path not in _in_use:
        _in_use.add(path)
        weakref.finalize(shared, _note_end, path)
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return _open_shared, (
        torch.Tensor,
        shape,
        stride,
        offset,
        torch.UntypedStorage,
        tensor.dtype,
        0,
        manager,
        handle,
        num_bytes,
    )


_in_use: set[Path] = set()
"""Files of the shared memory that this process uses now."""
_done_with: set[Path] = set()
"""Files that this process no longer uses. The last process to close such a file removes it."""


def _note_end(path: Path) -> None:
    _in_use.discard(path)
    _done_with.add(path)


def _remove_what_nobody_has_open() -> None:
    """Remove files that no process has open. torch counts the users of a file inside the file. An engine that was killed would
    stay in this count, and torch would never remove the file."""
    _done_with.intersection_update([path for path in _done_with if path.exists()])
    if not _done_with:
        return
    has_open = {inode for pid in psutil.pids() for inode in mapped(pid)}
    for path in list(_done_with):
        with suppress(FileNotFoundError):
            if path.stat().st_ino not in has_open:
                path.unlink()
                _done_with.discard(path)


def _open_shared(
    _tensor_class: type,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    storage_class: Any,
    dtype: torch.dtype,
    _device_index: int | None,
    manager: bytes,
    handle: bytes,
    num_bytes: int,
) -> torch.Tensor:
    storage = storage_class._new_shared_filename_cpu(manager, handle, num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class _TorchOnCPU:
    """The module `torch`, with stand-ins for what needs a GPU."""

    def __init__(self) -> None:
        stream = SimpleNamespace(synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda device: stream,
            stream=lambda _: nullcontext(),
            current_stream=lambda: stream,
            synchronize=lambda: None,
            ipc_collect=lambda: None,
            get_device_properties=lambda _: SimpleNamespace(uuid=THIS_NODE),
        )
        self.accelerator = SimpleNamespace(current_device_index=lambda: 0, synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
        return torch.empty(*size, device="cpu" if device == "cuda" else device, **kwargs)
