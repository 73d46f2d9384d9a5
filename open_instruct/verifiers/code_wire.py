"""How values are sent between the program's process and the test's process: as JSON, from which the reader rebuilds plain values.

A value of any other type stays in its process, and a number stands for it. So methods of a program's types never run in the
test's process.
"""

import builtins
import datetime
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

from open_instruct.system.cells import framing

MOST_BYTES = 2**20
"""Most bytes of a program's message, and of its output."""
LARGEST_CALL = 4 * MOST_BYTES
"""Most bytes of a test's message, which contains the row's own data as arguments."""
DEEPEST = 50
OPERATORS_OF_ONE = "len str repr bool hash getitem setitem delitem neg pos abs invert"
OPERATORS_OF_TWO = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge"
"""Operators that a test may apply to one object of the program, and to two. Names as in `operator` and `builtins`."""
LARGEST_IN_JSON = 2**53
ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration)
    if not issubclass(kind, BaseExceptionGroup)
}
"""Python's own exceptions, which are sent by name."""


class TooMuch(ValueError):
    """A message, or a value in it, is too large or nested too deep."""


_ATOMS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    # Hexadecimal, because Python limits the number of decimal digits, and converting them is slow.
    "int": (int, lambda value: hex(int.__int__(value)), lambda text: int(text, 16)),
    "float": (float, float.__repr__, float),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "decimal": (Decimal, Decimal.__str__, Decimal),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),  # after its subclass `datetime`
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
"""Types with a text that holds the whole value: type, to text, from text."""
_COMPOUNDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    "list": (list, list.__iter__, list),
    "tuple": (tuple, tuple.__iter__, tuple),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "deque": (deque, deque.__iter__, deque),
    "keys": (type({}.keys()), iter, lambda parts: dict.fromkeys(parts).keys()),
    "values": (type({}.values()), iter, lambda parts: dict(enumerate(parts)).values()),
    "items": (type({}.items()), iter, lambda parts: dict(parts).items()),
    "counter": (Counter, Counter.items, lambda parts: Counter(dict(parts))),
    "complex": (complex, lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    "range": (range, lambda value: (value.start, value.stop, value.step), lambda parts: range(*parts)),
    "slice": (slice, lambda value: (value.start, value.stop, value.step), lambda parts: slice(*parts)),
    "fraction": (Fraction, lambda value: (value.numerator, value.denominator), lambda parts: Fraction(*parts)),
    "timedelta": (
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda parts: datetime.timedelta(*parts),
    ),
}
"""Types that are made of other values: type, to parts, from parts."""


def encode(value: Any, keep: Callable[[Any], Any], depth: int = 0) -> Any:
    """A value as JSON. `keep` is called for a value that is not plain data, and the number or list that it returns stands for it.

    Values of types derived from plain types (`defaultdict`, a named tuple) become plain; so do numpy's numbers and arrays.
    """
    if depth > DEEPEST:
        raise TooMuch("nested too deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and abs(int.__int__(value)) < LARGEST_IN_JSON:
        return int.__int__(value)
    for name, (kind, to_text, _) in _ATOMS.items():
        if isinstance(value, kind):
            return {name: to_text(value)}
    for name, (kind, to_parts, _) in _COMPOUNDS.items():
        if isinstance(value, kind):
            return {name: [encode(part, keep, depth + 1) for part in to_parts(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(part, keep, depth + 1) for part in pair] for pair in dict.items(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, depth + 1)
    return {"object": keep(value)}


def decode(data: Any, remote: Callable[[Any], Any], depth: int = 0) -> Any:
    """The value that `encode` has turned into JSON; `remote` makes the stand-in of an object. Raises `ValueError` for any other
    JSON, and whatever the types of the parts raise for values that do not fit."""
    if depth > DEEPEST:
        raise TooMuch("nested too deep")
    if data is None or type(data) in (bool, str, int):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not plain data")
    ((name, content),) = data.items()
    if name in _ATOMS and isinstance(content, str):
        return _ATOMS[name][2](content)
    if name in _COMPOUNDS and isinstance(content, list):
        return _COMPOUNDS[name][2]([decode(part, remote, depth + 1) for part in content])
    if name == "dict":
        return {decode(key, remote, depth + 1): decode(value, remote, depth + 1) for key, value in content}
    if name == "object" and type(content) in (int, list):
        return remote(content)
    raise ValueError("not plain data")


def as_json(data: Any) -> Any:
    """The value that `encode` has turned into JSON, if JSON itself has such values; tuples become lists. The controller uses this
    function and rebuilds no other types, because some can be made to take long. Raises `ValueError` for other values."""
    if data is None or type(data) in (bool, str, int):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not plain data")
    ((name, content),) = data.items()
    if name in ("int", "float") and isinstance(content, str):
        return _ATOMS[name][2](content)
    if name in ("list", "tuple") and isinstance(content, list):
        return [as_json(part) for part in content]
    if name == "dict" and isinstance(content, list):
        pairs = [(key, as_json(value)) for key, value in content]
        if all(isinstance(key, str) for key, _ in pairs):
            return dict(pairs)
    raise ValueError("no value of JSON")


# --- messages ---------------------------------------------------------------------------------------------------------


class Channel:
    """A child's messages to and from the controller."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def receive(self) -> dict[str, Any]:
        """The next message. Raises `EOFError` when the controller has closed the channel."""
        return json.loads(framing.receive(self._descriptor))

    def send(self, message: dict[str, Any], max_bytes: int = MOST_BYTES) -> None:
        content = json.dumps(message).encode()
        if len(content) > max_bytes:
            content = json.dumps({"error": "too much"}).encode()
        framing.send(self._descriptor, framing.framed(content))


def failure_in(call: Callable[[], object]) -> dict[str, Any]:
    """What `call` raised, as a message: the names of its type and of all base types, and its arguments if they are small plain
    data. Empty if `call` raised nothing, or only `sys.exit(0)`."""
    try:
        call()
    except SystemExit as error:
        return {} if error.code in (None, 0) else {"error": "SystemExit"}
    except BaseException as error:  # a program may raise anything
        kinds = [kind.__name__[:100] for kind in type(error).__mro__]
        return {"error": kinds[0], "kinds": kinds[:20], "arguments": _small(error.args)}
    return {}


def error_in(message: dict[str, Any], errors: Mapping[str, type[Exception]] | None = None) -> Exception:
    """The exception in a message of `failure_in`, with the nearest type among `errors` and Python's own exceptions;
    `RuntimeError` if there is none.

    Never `StopIteration` or `SystemExit`, with which a program could end a loop of the test (`all(map(f, …))`), or the test
    itself.
    """
    kinds, name = message.get("kinds"), message.get("error")
    types = ERRORS | dict(errors or {})
    matches = (
        [types[kind] for kind in kinds if isinstance(kind, str) and kind in types] if isinstance(kinds, list) else []
    )
    if matches:
        try:
            return matches[0](*decode(message.get("arguments"), lambda _: None))
        except Exception:  # the type may need other arguments, or the message may be nonsense
            return matches[0]()
    return RuntimeError(f"the program failed: {name}")


def _small(arguments: Any) -> Any:
    def refuse(value: Any) -> int:
        raise TypeError(type(value).__name__)

    try:
        data = encode(list(arguments), refuse)
    except Exception:  # the arguments of a program's exception may be anything
        return {"list": []}
    return data if len(json.dumps(data)) <= 4096 else {"list": []}


def new_module(name: str) -> dict[str, Any]:
    """The namespace of a new module. It is added to `sys.modules`, because dataclasses look up their own module there."""
    module = sys.modules[name] = ModuleType(name)
    return vars(module)
