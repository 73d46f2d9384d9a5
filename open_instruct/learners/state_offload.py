"""Moves a learner's memory off its device, tag by tag, while engines use the device, and back again.

    optimizer    moments, and the fp32 master weights where they are separate from the weights
    gradients    gradients, their partitions, and DeepSpeed's buckets for sending them
    weights      the weights that a forward pass reads and that are sent to engines
    reference    the weights of the reference model

DeepSpeed 0.19 can move states itself (`engine.offload_states`), but with torch's AdamW only at stage 2; at stage 3 it needs its
own fused Adam, and at stage 0 it moves nothing. This module moves whole storages instead of tensors: a storage is copied to main
memory and shrunk to nothing, later grown again and filled. Every view into the storage (DeepSpeed keeps parameters, partitions
and gradients as views into flat buffers) stays the same object, and is valid again afterwards. A step then gives the same bits as
without offloading. On CPU the same copies are made, from main memory to main memory, which gains nothing.

While its storage is gone a tensor must not be used in a computation; torch 2.13 does not notice, and reads through a null
pointer. Hence `check_loaded`.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from open_instruct.device import Device
from open_instruct.learners.offload_tags import GRADIENTS, OPTIMIZER, REFERENCE, TAGS, WEIGHTS
from open_instruct.learners.optimizer_step import torch_optimizer

logger = logging.getLogger(__name__)

SMALL_BYTES = 4096
"""Smaller storages stay, because norms, step counters and the like are not worth a copy, and some are read between steps."""


@dataclass(frozen=True)
class _Moved:
    """A storage that has no memory at the moment."""

    storage: torch.UntypedStorage
    num_bytes: int
    content: torch.Tensor | None
    """The storage's bytes, in main memory. None if they are never read again."""

    def restore(self) -> None:
        self.storage.resize_(self.num_bytes)
        if self.content is not None:
            _as_bytes(self.storage).copy_(self.content)


class StateOffload:
    """Moves the states of one DeepSpeed engine, and of its reference model, by tag.

    Call its methods between two `engine.step()`s or two `engine.backward()`s, on every rank alike. Ranks do not wait for each
    other in them.
    """

    def __init__(self, device: Device, engine: Any, ref_model: Any = None) -> None:
        self._device = device
        self._engine = engine
        self._ref_model = ref_model
        self._moved: dict[str, list[_Moved]] = {}
        self._spare: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Unused buffers in main memory, by their bytes. They are kept for the next time that the same storages move."""
        self._warned: set[str] = set()

    @property
    def offloaded(self) -> frozenset[str]:
        """Tags that are off the device."""
        return frozenset(self._moved)

    def offload(self, tags: Sequence[str] | None = None) -> int:
        """Move these tags off the device (None: all). Returns the bytes that this process really released, as measured.

        At most one storage exists twice at any time. Tags that are already off the device stay off.
        """
        before = self._settled_memory()
        for tag in _checked(tags):
            if tag not in self._moved:
                self._release_gathered(tag)
                scratch = _scratch(self._engine) if tag == GRADIENTS else ()
                self._moved[tag] = [self._move(storage, keep_content=True) for storage in self._storages(tag)]
                self._moved[tag] += [self._move(storage, keep_content=False) for storage in self._resident(scratch)]
        return max(before - self._settled_memory(), 0)

    def reload(self, tags: Sequence[str] | None = None) -> None:
        """Move these tags back (None: all), with the very bytes that they had. Tags on the device stay as they are.

        Memory that torch has cached is returned to the device, because engines may wake up at the same time.
        """
        for tag in _checked(tags):
            moved = self._moved.get(tag, [])
            while moved:
                moved[-1].restore()
                last = moved.pop()
                if last.content is not None and self._device.memory.keeps_host_buffers:
                    self._spare[last.num_bytes].append(last.content)
            self._moved.pop(tag, None)
        self._device.synchronize()
        self._device.memory.return_freed()

    def check_loaded(self, *tags: str, task: str) -> None:
        """Raise if one of `tags`, which `task` needs, is off the device."""
        if missing := [tag for tag in tags if tag in self._moved]:
            raise RuntimeError(f"{task} needs {' and '.join(missing)} on the device: call wake_up({missing}) first")

    def _move(self, storage: torch.UntypedStorage, *, keep_content: bool) -> _Moved:
        num_bytes, content = storage.nbytes(), None
        if keep_content:
            spare = self._spare[num_bytes]
            content = spare.pop() if spare else self._device.memory.host_buffer(num_bytes)
            content.copy_(_as_bytes(storage))
        storage.resize_(0)
        return _Moved(storage, num_bytes, content)

    def _settled_memory(self) -> int:
        self._device.synchronize()
        self._device.memory.return_freed()
        return self._device.memory.in_use_bytes()

    def _release_gathered(self, tag: str) -> None:
        """Free whole parameters that stage 3 has gathered ahead of their use, because only the partitions are moved."""
        model = {WEIGHTS: self._engine, REFERENCE: self._ref_model}.get(tag)
        release = getattr(model, "empty_partition_cache", None)
        if release is not None:
            release()

    def _storages(self, tag: str) -> list[torch.UntypedStorage]:
        """Storages that belong to `tag` and to no earlier tag."""
        pointers = {tensor.untyped_storage()._cdata for tensor in _scratch(self._engine)}
        for earlier in TAGS[: TAGS.index(tag)]:
            pointers |= {tensor.untyped_storage()._cdata for tensor in self._tensors(earlier)}
        own = [storage for storage in self._resident(self._tensors(tag)) if storage._cdata not in pointers]
        fixed = sum(storage.nbytes() for storage in own if not storage.resizable())
        if fixed and tag not in self._warned:
            self._warned.add(tag)
            logger.warning("%s: %d bytes stay on the device: numpy has seen them, or torch.load made them", tag, fixed)
        return [storage for storage in own if storage.resizable()]

    def _tensors(self, tag: str) -> Iterable[torch.Tensor]:
        if tag == REFERENCE:
            return [] if self._ref_model is None else _module_tensors(self._ref_model)
        return {WEIGHTS: _module_tensors, OPTIMIZER: _optimizer_tensors, GRADIENTS: _gradient_tensors}[tag](
            self._engine
        )

    def _resident(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """The storages behind `tensors`, each once, that are on the device and worth moving."""
        kind = self._device.learner_device.type
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == kind and storage.nbytes() >= SMALL_BYTES:
                storages[storage._cdata] = storage
        return list(storages.values())


def _checked(tags: Sequence[str] | None) -> list[str]:
    if tags is None:
        return list(TAGS)
    if unknown := sorted(set(tags) - set(TAGS)):
        raise ValueError(f"unknown tags {unknown}; give some of {list(TAGS)}")
    return [tag for tag in TAGS if tag in tags]


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


# --- what DeepSpeed 0.19.8 holds where --------------------------------------------------------------------------------


def _module_tensors(model: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers. At stage 2 parameters are views into one flat buffer. At stage 3 they are empty: `ds_tensor` holds
    their partition, and `ds_secondary_tensor` the larger partition of `--deepspeed_zpg`, unless the optimizer has dropped it."""
    for parameter in model.parameters():
        yield parameter.data
        for name in ("ds_tensor", "ds_secondary_tensor"):
            if (partition := getattr(parameter, name, None)) is not None:
                yield partition.data
    yield from model.buffers()


def _masters(engine: Any) -> Iterator[torch.Tensor]:
    """The master weights, which the optimizer updates. At stage 3 the optimizer holds them only during a step."""
    wrapper = engine.optimizer
    for group in torch_optimizer(engine).param_groups:
        yield from group["params"]
    yield from getattr(wrapper, "fp32_partitioned_groups_flat", [])


def _optimizer_tensors(engine: Any) -> Iterator[torch.Tensor]:
    yield from _masters(engine)
    for state in torch_optimizer(engine).state.values():
        yield from _tensors_in(state)


def _gradient_tensors(engine: Any) -> Iterator[torch.Tensor]:
    for parameter in (*engine.module.parameters(), *_masters(engine)):
        if parameter.grad is not None:
            yield parameter.grad
    for name in ("all_grad_tensors", "averaged_gradients", "grad_partitions_flat_buffer"):
        yield from _tensors_in(getattr(engine.optimizer, name, None))


def _scratch(engine: Any) -> list[torch.Tensor]:
    """Stage 3's buckets, and the buffer through which gradients pass to an optimizer in main memory. They are large, and unused
    between two backward passes, so their bytes need not be kept."""
    buckets = getattr(engine.optimizer, "ipg_buckets", {}).values()
    full = [bucket.elements for bucket in buckets if bucket.elements]
    assert not full, f"in the middle of a backward pass: gradients of {full} elements have not been reduced"
    way_to_main_memory = getattr(engine.optimizer, "temp_grad_buffer_for_gpu_offload", None)
    return [*(tensor for bucket in buckets for tensor in _tensors_in(bucket.buffer)), *_tensors_in(way_to_main_memory)]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
