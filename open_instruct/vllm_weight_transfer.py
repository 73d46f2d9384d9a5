"""The engine's side of weight transfer through Ray objects, for vLLM's weight-transfer API.

vLLM brings `nccl` and `ipc` for GPUs; this one needs neither a GPU nor shared memory, so it serves CPUs and several nodes. It is
registered as `ray_object` by `weight_sync.register_weight_transfer` (a `vllm.general_plugins` entry point, so that worker
processes of tensor-parallel engines know it too) and only imported inside engines.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from open_instruct.vllm_loading import begin_reload, finish_reload


@dataclass
class RayObjectInitInfo(WeightTransferInitInfo):
    """There is nothing to rendezvous."""


@dataclass
class RayObjectUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: whole parameters, one after another in `buffer`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    buffer: np.ndarray  # (bytes,) uint8


class RayObjectWeightTransferEngine(WeightTransferEngine[RayObjectInitInfo, RayObjectUpdateInfo]):
    """Collects buckets and loads them all in `finish_weight_update`: until then the model is untouched and may generate.

    When loading breaks off, the model is half old, half new, and vLLM's reload cannot be begun again: every later update is
    refused, so that the engine stays behind and is replaced.
    """

    init_info_cls = RayObjectInitInfo
    update_info_cls = RayObjectUpdateInfo
    _is_swapping = False

    def init_transfer_engine(self, init_info: RayObjectInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        if self._is_swapping:
            raise RuntimeError("the weights are half old, half new since an update broke off")
        self._buckets: list[RayObjectUpdateInfo] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RayObjectUpdateInfo) -> None:
        self._buckets.append(update_info)

    def finish_weight_update(self) -> None:
        self._is_swapping = True
        begin_reload(self.model)
        self.model.load_weights(self._named_tensors())  # type: ignore[operator]
        finish_reload(self.model, self.model_config)
        self._is_swapping = False
        self._buckets = []

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._buckets:
            flat = torch.from_numpy(bucket.buffer.copy())  # arrays from Ray are read-only
            start = 0
            for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
                element = getattr(torch, dtype)
                end = start + element.itemsize * int(np.prod(shape))
                yield name, flat[start:end].view(element).view(shape)
                start = end

    def shutdown(self) -> None:
        self._buckets = []


def abandon_weight_update(worker: Any) -> None:
    """Forget an update that was begun and not finished; run on a worker by `collective_rpc`.

    For vLLM 0.32, which has no call for it and refuses to begin another. `tests/test_weight_sync.py` breaks an update off.
    """
    getattr(worker, "worker", worker)._weight_update_active = False  # engines wrap their workers
