"""Sends new weights from the learners to the engines.

    learner rank 0..M-1          DeepSpeedWeightSource: every rank gathers, bucket by bucket (a collective under ZeRO-3)
      rank 0: sender ──────────► WeightUpdateClient ──────────► LLMRayActor × N: start, update…, finish(version)

An engine takes an update whole or not at all, and each engine confirms the version it serves. Senders: vLLM's own `nccl` and
`ipc` trainer engines on GPU, `RayObjectSender` everywhere else; all three call the engines through vLLM's weight-transfer API.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import ray
import torch

from open_instruct.device import Device
from open_instruct.engines.weight_update_client import WeightUpdateClient
from open_instruct.learners.checkpoint_format import CheckpointFormat
from open_instruct.learners.lora import Adapters, adapter_parameters, merged_name
from open_instruct.lora_merge import BaseOfAdapter
from open_instruct.weight_transports import GLOO, IN_ONE_COLLECTIVE, RAY_OBJECT, SHM

CHUNK_BYTES = 2**30
"""Most bytes that a learner shares at once with an engine on the same GPU. A larger parameter is shared whole."""
BUCKET_BYTES = 256 * 2**20
"""A bucket holds whole parameters up to about this size, so that a learner never holds a second copy of the model."""


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype as sent, and full shape of one parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class DeepSpeedWeightSource:
    """The trained weights under the names and in the shapes of the checkpoint, at every ZeRO stage. Iteration yields weights with
    adapters merged in; `adapter` gives only the adapters.

    Iterate it on every rank at once, because under ZeRO-3 each layer is gathered by a collective. Every iteration begins from the
    start. At most one layer is held in addition to the model itself.
    """

    def __init__(self, module: torch.nn.Module, *, zero_stage: int) -> None:
        self._module = module
        self._zero_stage = zero_stage
        self._adapters = Adapters(module)
        self._is_checked = False
        """Whether a whole pass has found the loaded weights finite."""

    @cached_property
    def _format(self) -> CheckpointFormat:
        return CheckpointFormat(self._module)

    @cached_property
    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in self._format.metadata()]

    def metadata(self) -> list[ParamMeta]:
        """Describes the tensors that iteration will yield, in order, without gathering anything."""
        return list(self._metadata)

    def held_names(self) -> None:
        """None, because every rank holds (or gathers) every parameter."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        tensors = {merged: tensor for name, tensor in state.items() if (merged := merged_name(name)) is not None}
        for group in self._format.groups:
            for name, weight in self._format.convert(self._gathered({name: tensors[name] for name in group})).items():
                if not self._is_checked:
                    _check_finite(name, weight)
                yield name, weight
        self._is_checked = True

    @cached_property
    def base_of_adapter(self) -> BaseOfAdapter | None:
        """What engines merge the adapters into if only `adapter()` is sent; None if all weights have to be sent."""
        return self._adapters.base(dict(self._format.metadata()))

    def check(self) -> None:
        """Raises ValueError if a weight that was loaded is not finite. Every rank has to call it."""
        if not self._is_checked:
            for _ in self:
                pass

    def adapter(self) -> dict[str, torch.Tensor]:
        """The weights of the adapters by their names in peft's files, in main memory. Every rank has to call it."""
        parameters = adapter_parameters(self._module)
        if self._zero_stage != 3:
            return {name: weight.detach().cpu() for name, weight in parameters.items()}
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: weight.detach().cpu().clone() for name, weight in parameters.items()}

    def _gathered(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._zero_stage != 3:
            return {name: self._adapters.merged(name, weight.detach()) for name, weight in weights.items()}
        import deepspeed

        parameters = [weight for weight in weights.values() if isinstance(weight, torch.nn.Parameter)]
        parameters += self._adapters.parameters_of(weights)
        with deepspeed.zero.GatheredParameters(parameters):
            return {name: self._adapters.merged(name, weight.detach()).clone() for name, weight in weights.items()}


def _check_finite(name: str, weight: torch.Tensor) -> None:
    """Raises `ValueError` if the weight is not finite. Called when weights are sent for the first time. Later weights are finite,
    because an optimizer step is left out if its gradient is not finite."""
    if weight.is_floating_point() and not (is_finite := weight.isfinite()).all():
        raise ValueError(
            f"{name}: {int((~is_finite).sum())} of {weight.numel()} weights are not finite (NaN or infinite) as the learner has "
            "loaded them, so no engine gets any. Check the model's files, or the checkpoint that the run goes on from."
        )


class WeightSender(Protocol):
    """The object that a learner calls once a step, on every rank, to send its weights."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None:
        """Release the connection with the engines."""


class RayObjectSender:
    """Packs the weights into buckets and passes them to the engines as Ray objects. If possible (`base_of_adapter`) it sends only
    the adapters, and the engines merge them into the weights of the model's files."""

    def __init__(self, *, client: WeightUpdateClient, source: DeepSpeedWeightSource, is_sender: bool) -> None:
        self._client = client
        self._source = source
        self._is_sender = is_sender

    def send_weights(self) -> None:
        if (base := self._source.base_of_adapter) is not None:
            self._source.check()
            weights, header = iter(self._source.adapter().items()), {"base": asdict(base)}
        else:
            weights, header = iter(self._source), {}
        if not self._is_sender:
            for _ in weights:  # take part in the gathers
                pass
            return
        self._client.start_weight_update()
        for bucket in pack_buckets(weights, max_bytes=BUCKET_BYTES):
            self._client.update_weights({"bucket": ray.put(bucket | header)})
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Does nothing, because there is no connection to release."""


def pack_buckets(weights: Iterator[tuple[str, torch.Tensor]], *, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Group whole parameters into buckets of about `max_bytes`: names, dtypes, shapes and one (bytes,) uint8 buffer."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield _pack(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield _pack(bucket)


def _pack(bucket: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [tuple(tensor.shape) for _, tensor in bucket],
        # `cat` copies. If numpy saw a parameter itself, the parameter's storage could no longer leave its memory.
        "buffer": torch.cat(flat).numpy(),
    }


def make_weight_sender(
    device: Device,
    *,
    rank: int,
    client: WeightUpdateClient,
    source: DeepSpeedWeightSource,
    num_engine_workers: int,
    find_address: Callable[[], tuple[str, int]],
) -> WeightSender:
    """Connect this learner rank to the engines by `device.weight_transport`; call on every rank.

    `num_engine_workers` counts the worker processes of all engines (engines x tensor parallelism); `find_address` gives a host
    and a free port of this machine for the rendezvous of a collective.
    """
    transport = device.weight_transport
    if transport == RAY_OBJECT:
        return RayObjectSender(client=client, source=source, is_sender=rank == 0)
    if transport in (GLOO, SHM):
        from open_instruct.engines import cpu_transports

        cpu_transports.stand_in_for_cuda()
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    device.keep_current_stream()
    if transport in IN_ONE_COLLECTIVE:
        init_info = _collective_init_info(rank, num_engine_workers + 1, find_address)
    else:
        init_info = ipc_init_info(rank, source)
    sender = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)  # type: ignore[arg-type]
    client.abort_group = lambda: _destroy_group(sender)
    return sender


def _collective_init_info(rank: int, world_size: int, find_address: Callable[[], tuple[str, int]]) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    host, port = find_address()
    # One buffer instead of two: engines hold 1 GiB less, and layerwise reload never sees a buffer that is being refilled.
    return NCCLTrainerInitInfo(
        rank=rank, master_address=host, master_port=port, world_size=world_size, packed_num_buffers=1
    )


def ipc_init_info(rank: int, source: DeepSpeedWeightSource) -> Any:
    """Options for sending in chunks. If the model were sent as a whole, each rank would hold a second copy of it at stage 3."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    sizes = [math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata()]
    buffer_bytes = max(min(CHUNK_BYTES, sum(sizes)), max(sizes))
    return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)


def _destroy_group(sender: Any) -> None:
    if (group := getattr(sender, "model_update_group", None)) is not None:
        group.destroy()
