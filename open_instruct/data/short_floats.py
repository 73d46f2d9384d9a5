"""Floats of 16 and 32 bits as the numbers that were written: 0.1, and not 0.10000000149011612, in columns of any depth.

list<float>                        [0.10000000149011612]                    ─►  [0.1]
struct<ground_truth: float>        {"ground_truth": 0.10000000149011612}    ─►  {"ground_truth": 0.1}
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def as_written(kind: "pa.DataType") -> Callable[[Any], Any]:
    """A function for the values that pyarrow gives for a type: the value with its short floats as they were written."""
    return _change(kind) or _unchanged


def _change(kind: "pa.DataType") -> Callable[[Any], Any] | None:
    """As `as_written`; None if the type holds no short float."""
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        return _shortest_float32 if types.is_float32(kind) else _shortest_float16
    if types.is_dictionary(kind):
        return _change(kind.value_type)
    if types.is_struct(kind):
        return _of_fields({field.name: change for field in kind if (change := _change(field.type))})
    if types.is_map(kind):
        return _of_pairs(_change(kind.key_type), _change(kind.item_type))
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # the kinds of lists
        return _of_items(_change(kind.value_type))
    return None


def _of_fields(changes: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    def change(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: changes[name](part) if name in changes else part for name, part in value.items()}

    return change if changes else None


def _of_pairs(
    change_key: Callable[[Any], Any] | None, change_value: Callable[[Any], Any] | None
) -> Callable[[Any], Any] | None:
    key_as_written, value_as_written = change_key or _unchanged, change_value or _unchanged

    def change(value: Any) -> Any:
        return value and [(key_as_written(key), value_as_written(part)) for key, part in value]

    return change if change_key or change_value else None


def _of_items(change_item: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    item_as_written = change_item or _unchanged

    def change(value: Any) -> Any:
        return [item_as_written(item) for item in value] if isinstance(value, list) else value

    return change if change_item else None


def _unchanged(value: Any) -> Any:
    return value


def _shortest_float32(value: Any) -> float | None:
    return None if value is None else float(str(np.float32(value)))


def _shortest_float16(value: Any) -> float | None:
    return None if value is None else float(str(np.float16(value)))
