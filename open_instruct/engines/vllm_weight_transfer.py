"""The worker's side of weight transfer, for vLLM's weight-transfer API; only imported inside engines.

vLLM has weight-transfer engines for `nccl` and `ipc`. This module adds a check of every tensor to both, and to NCCL a way to
abort when its group breaks. It also has an engine of our own that receives weights as Ray objects, which need neither a GPU nor
shared memory. `vllm_plugin` registers them.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from open_instruct.device_memory import DeviceMemory
from open_instruct.engines.vllm_weight_loading import abandon_reload, begin_reload, fingerprints, finish_reload
from open_instruct.lora_merge import BaseOfAdapter
from open_instruct.weight_transports import ABORT_FILE

ABORT_POLL_S = 0.1
"""How often a worker that waits for weights checks whether the update was broken off."""
JOIN_S = 10.0
"""Longest wait for the thread that aborts. vLLM gives an abort 5 s."""


@dataclass
class RayObjectInitInfo(WeightTransferInitInfo):
    """Empty, because Ray objects need no rendezvous."""


@dataclass
class RayObjectUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: whole parameters, one after another in `buffer`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    buffer: np.ndarray | bytes  # (bytes,) uint8; bytes where it was sent through msgpack
    base: dict[str, Any] | None = None
    """A `BaseOfAdapter`, if the bucket holds only adapters."""


class RayObjectWeightTransferEngine(WeightTransferEngine[RayObjectInitInfo, RayObjectUpdateInfo]):
    """Collects buckets and loads all of them in `finish_weight_update`. Until then the model is untouched and may generate."""

    init_info_cls = RayObjectInitInfo
    update_info_cls = RayObjectUpdateInfo
    _is_swapping = False

    def init_transfer_engine(self, init_info: RayObjectInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        self._buckets: list[RayObjectUpdateInfo] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RayObjectUpdateInfo) -> None:
        self._buckets.append(update_info)

    def finish_weight_update(self) -> None:
        self._is_swapping = True
        base = self._buckets[0].base
        weights = self._named_tensors() if base is None else self._merged_tensors(BaseOfAdapter(**base))
        begin_reload(self.model)
        self.model.load_weights(weights)  # type: ignore[operator]
        finish_reload(self.model, self.model_config)
        self._is_swapping = False
        self._buckets = []

    def abandon_weight_update(self) -> None:
        """Drop the buckets. If loading broke off, make the model loadable again."""
        self._buckets = []
        if self._is_swapping:
            abandon_reload(self.model, self.model_config)
            self._is_swapping = False

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._buckets:
            flat = torch.frombuffer(bytearray(bucket.buffer), dtype=torch.uint8)  # the received buffer is read-only
            start = 0
            for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
                element = getattr(torch, dtype)
                end = start + element.itemsize * int(np.prod(shape))
                yield name, flat[start:end].view(element).view(shape)
                start = end

    def _merged_tensors(self, base: BaseOfAdapter) -> Iterator[tuple[str, torch.Tensor]]:
        return base.merged(self._tensors_of_files.items(), dict(self._named_tensors()), self.device)

    @cached_property
    def _tensors_of_files(self) -> dict[str, torch.Tensor]:
        """The weights in the model's files, as vLLM reads them. Weights from safetensors are views of the files, so the operating
        system can take their memory back."""
        loader: Any = get_model_loader(replace(self.vllm_config.load_config, use_tqdm_on_load=False))
        return dict(loader.get_all_weights(self.model_config, self.model))

    def shutdown(self) -> None:
        self._buckets = []


class WatchedReload:
    """Starts and ends an update as vLLM's own engines do, with our account of every tensor."""

    model: torch.nn.Module
    model_config: Any

    def start_weight_update(self) -> None:
        begin_reload(self.model)

    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config)

    def abandon_weight_update(self) -> None:
        abandon_reload(self.model, self.model_config)


class WatchedIPCEngine(WatchedReload, IPCWeightTransferEngine):
    """vLLM's IPC engine, extended to notice tensors that the model has no place for.

    As in vLLM, the end of an update releases the learner's buffer. Otherwise the learner could not free it until the next update.
    """

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()

    def abandon_weight_update(self) -> None:
        super().abandon_weight_update()
        self._packed_importer.close()


class AbortableNCCLEngine(WatchedReload, NCCLWeightTransferEngine):
    """vLLM's NCCL engine, extended to stop waiting for weights that will not come.

    An NCCL broadcast has no time limit: when a member of the group dies, the other members wait for ever. So a thread checks for
    the file which says that the update was broken off, and aborts the communicator once this file exists.
    """

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        with AbortWatch(self._abort) as watch:
            super().receive_weights(update_info)
        if watch.has_aborted:  # an aborted communicator silently leaves receive buffers as they were
            raise RuntimeError("the update was broken off; the weights that have come are not whole")

    def _abort(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.destroy()


class AbortWatch:
    """During the `with` block, calls `abort` in a thread as soon as the file that the variable `ABORT_FILE` names exists."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._file = Path(os.environ[ABORT_FILE])
        self._is_over = threading.Event()
        self.has_aborted = False
        self._thread = threading.Thread(target=self._watch, name="abort-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=JOIN_S)

    def _watch(self) -> None:
        while not self._is_over.wait(ABORT_POLL_S):
            if self._file.exists():
                self.has_aborted = True
                self._abort()
                return


class WorkerExtension:
    """Our methods that vLLM adds to its workers (`worker_extension_cls`); `collective_rpc` calls them by name."""

    vllm_config: Any
    weight_transfer_engine: Any
    model_runner: Any

    def weight_fingerprints(self) -> dict[str, float]:
        return fingerprints(self.model_runner.model)

    def memory_in_use_bytes(self) -> int:
        return DeviceMemory(current_platform.device_type).in_use_by_all_bytes()  # type: ignore[arg-type]

    def abandon_weight_update(self) -> None:
        """Forget an update that was begun and not finished. vLLM 0.32 has no call for this.

        Layers that had received nothing have their old weights afterwards. Other layers may have new weights or none, so the
        model may not be used before a whole update, unless nothing at all had arrived.
        """
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon_weight_update()
        self._weight_update_active = False
