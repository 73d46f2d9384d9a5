"""Takes the arrays out of a payload and puts them back, to send them between processes as bytes, without pickling them. Pure.

A payload is made of dicts, lists and tuples. Its bytes are sent as two halves, because Ray sends an argument or a result of up to
100 KiB from process to process without its object store, in half the time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGNMENT = 16
"""Each array begins at a multiple of this many bytes within its half."""


@dataclass(frozen=True)
class Packed:
    """A payload, with the bytes of its arrays kept apart."""

    skeleton: Any
    """The payload with a `_Slot` in place of each array."""
    halves: tuple[bytes, ...]
    """Two halves; empty while they are sent as separate arguments or results."""


@dataclass(frozen=True)
class _Slot:
    """Where an array's bytes are."""

    half: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


def pack(payload: Any) -> Packed:
    """Take the numeric arrays out of a payload of dicts, lists and tuples; `unpack` puts them back."""
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    filled = [0, 0]

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
            return leaf
        half = int(filled[1] < filled[0])
        place = _Slot(half, filled[half], leaf.dtype.str, leaf.shape)
        halves[half].extend([leaf.tobytes(), bytes(-leaf.nbytes % ALIGNMENT)])
        filled[half] += leaf.nbytes + -leaf.nbytes % ALIGNMENT
        return place

    return Packed(_map_leaves(payload, slot), tuple(b"".join(half) for half in halves))


def unpack(skeleton: Any, halves: Sequence[bytes]) -> Any:
    """The payload that `pack` was given. No array is copied, so the arrays are read-only."""

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        count = math.prod(leaf.shape)
        return np.frombuffer(halves[leaf.half], leaf.dtype, count, leaf.offset).reshape(leaf.shape)

    return _map_leaves(skeleton, array)


def without_tensors(payload: Any) -> Any:
    """The payload with a NumPy array in place of each torch tensor. Array and tensor share memory; an array is not pickled."""

    def array(leaf: Any) -> Any:
        is_tensor = type(leaf).__module__.partition(".")[0] == "torch" and hasattr(leaf, "numpy")
        return leaf.detach().cpu().numpy() if is_tensor else leaf

    return _map_leaves(payload, array)


def _map_leaves(payload: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(payload, dict):
        return {key: _map_leaves(value, change) for key, value in payload.items()}
    if isinstance(payload, list | tuple):
        values = [_map_leaves(value, change) for value in payload]
        return type(payload)(*values) if hasattr(payload, "_fields") else type(payload)(values)
    return change(payload)


def num_array_bytes(payload: Any) -> int:
    """Bytes of all arrays in a payload of dicts, lists, tuples and dataclasses."""
    return sum(array.nbytes for array in _arrays(payload))


def _arrays(payload: Any) -> Iterator[np.ndarray]:
    if isinstance(payload, np.ndarray):
        yield payload
    elif isinstance(payload, dict):
        for value in payload.values():
            yield from _arrays(value)
    elif isinstance(payload, list | tuple):
        for value in payload:
            yield from _arrays(value)
    elif hasattr(payload, "__dataclass_fields__"):
        yield from _arrays(vars(payload))
