"""What runs in the jailed processes of the code verifiers: a program of the model, or the tests of a row. Never both in one.

    controller ──► program's process: runs the program, answers calls     (knows no test)
        └────────► test's process: runs one test; a name of the program is a `Remote`, whose calls go to the program's process

Arguments and results travel as plain data: numbers, texts, lists and so on, rebuilt by the reader from JSON. A result of a type
that the program has made itself stays with the program; it equals nothing. So a program can make a test pass by returning the
right value and in no other way.
"""

import contextlib
import fcntl
import importlib
import io
import json
import os
import resource
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from open_instruct.system.sandbox import Jail, die_with_parent, limit_to_computing, restrict_calls

MOST_BYTES = 2**20
"""Of a message, of a program's input and of its output."""
PIPE_SIZE = 1031
"""F_SETPIPE_SZ of `linux/fcntl.h`."""
GRACE_S = 1.0
"""Beside the limit of a test: a busy machine takes a while to start a process."""
DEEPEST = 50
LARGEST_IN_JSON = 2**53
CHANNEL, FEED, CAPTURE = 3, 4, 5
"""File descriptors of a child: to the controller; where its standard input is written; where its standard output is read."""
OFTEN_IMPORTED = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re statistics "
    "string typing numpy"
)
"""Modules that programs need often, with spaces between them."""


class TooMuch(ValueError):
    """A message, or what is in it, is too large or nested too deep."""


# --- plain data -------------------------------------------------------------------------------------------------------


def encode(value: Any, keep: Callable[[Any], int], depth: int = 0) -> Any:
    """A value as JSON. What is no plain data is kept by `keep`, and its number stands for it.

    Values of types that are derived from plain ones (`Counter`, a named tuple) become plain; so do numpy's numbers and arrays.
    """
    if depth > DEEPEST:
        raise TooMuch("nested too deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": int.__repr__(value)} if abs(int.__int__(value)) >= LARGEST_IN_JSON else int.__int__(value)
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    for kind in (bytes, bytearray):
        if isinstance(value, kind):
            return {kind.__name__: value.hex()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = kind
            return {kind.__name__: [encode(one, keep, depth + 1) for one in items.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(part, keep, depth + 1) for part in pair] for pair in dict.items(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, depth + 1)
    return {"object": keep(value)}


def decode(data: Any, remote: Callable[[int], Any], depth: int = 0) -> Any:
    """What `encode` made JSON of; `remote` makes the stand-in of an object. Raises `ValueError` for anything else."""
    if depth > DEEPEST:
        raise TooMuch("nested too deep")
    if data is None or type(data) in (bool, str, int):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not plain data")
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content)
    if kind == "float":
        return float(content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind in ("list", "tuple", "set", "frozenset"):
        makers: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
        return makers[kind](decode(one, remote, depth + 1) for one in content)
    if kind == "dict":
        return {decode(key, remote, depth + 1): decode(value, remote, depth + 1) for key, value in content}
    if kind == "object" and type(content) is int:
        return remote(content)
    raise ValueError("not plain data")


# --- a child ----------------------------------------------------------------------------------------------------------


def serve(keeper: int, descriptor: int, silent: int, jail: Jail) -> None:
    """Become a child of the code verifiers: shut in, with a channel to the controller, and do what it says until it closes."""
    try:
        die_with_parent(keeper)
        _arrange_descriptors(descriptor, silent)
        limit_to_computing(jail)
        restrict_calls(jail)
        Child().run()
    finally:
        os._exit(0)


def _arrange_descriptors(descriptor: int, silent: int) -> None:
    feed_end, feed = os.pipe()
    capture, capture_end = os.pipe()
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (feed_end, capture_end, silent, descriptor, feed, capture)]
    for target, one in enumerate(moved):
        os.dup2(one, target)
    os.closerange(CAPTURE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for pipe in (FEED, CAPTURE):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, PIPE_SIZE, MOST_BYTES)
    os.set_blocking(CAPTURE, False)


class Child:
    """Does what messages ask for."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._names: dict[str, Any] = {}

    def run(self) -> None:
        while (message := self.receive()) is not None:
            action = {"program": self._load, "call": self._call, "stdio": self._stdio, "test": self._test}[
                message["do"]
            ]
            self.send(action(message))

    def receive(self) -> dict[str, Any] | None:
        head = self._read(8)
        return json.loads(self._read(struct.unpack("!Q", head)[0])) if len(head) == 8 else None

    def send(self, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        if len(content) > MOST_BYTES:
            content = json.dumps({"error": "too much"}).encode()
        content = struct.pack("!Q", len(content)) + content
        while content:  # the jail allows `read` and `write` alone
            content = content[os.write(CHANNEL, content) :]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (part := os.read(CHANNEL, min(size - len(data), 2**16))):
            data += part
        return bytes(data)

    # --- the program's process

    def _load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a program, so that its functions can be called."""
        names: dict[str, Any] = {"__name__": "program"}
        error = _error_of(lambda: exec(compile(message["code"], "program", "exec"), names))
        self._names = names
        public = [name for name, value in names.items() if callable(value) and not name.startswith("__")]
        return {"error": error, "names": public[:1000]}

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function, or a method of an object that an earlier call has given."""
        target = message["target"]
        result: dict[str, Any] = {}

        def call() -> None:
            function = self._objects[target] if isinstance(target, int) else self._names[target]
            for name in message["path"]:
                function = getattr(function, name)
            arguments, named = decode(message["arguments"], self._objects.__getitem__)
            value = function(*arguments, **named)
            if type(value).__name__ == "generator":
                value = list(value)
            result["value"] = encode(value, self._keep)
            result["arguments"] = encode(list(arguments), self._keep)  # as the call has left them

        error = _error_of(call)
        return {"error": error} if error else result

    def _keep(self, value: Any) -> int:
        self._objects[len(self._objects)] = value
        return len(self._objects) - 1

    def _stdio(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a program on an input, and say what it has written."""
        data = message["input"].encode()
        if len(data) > MOST_BYTES - 4096:
            return {"error": "too much"}
        os.write(FEED, data)
        os.close(FEED)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
        sys.argv = ["program"]
        names: dict[str, Any] = {"__name__": "__main__"}
        error = _error_of(lambda: exec(compile(message["code"], "program", "exec"), names))
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        written = b""
        with contextlib.suppress(OSError):
            written = os.read(CAPTURE, MOST_BYTES)
        return {"error": error, "output": written.decode(errors="replace")}

    # --- the test's process

    def _test(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a test. The names of the program are stand-ins."""
        names: dict[str, Any] = {name: Remote(self, name) for name in message["names"]} | {"__name__": "test"}
        return {"done": True, "error": _error_of(lambda: exec(compile(message["code"], "test", "exec"), names))}

    def ask(self, target: str | int, path: Sequence[str], arguments: Any) -> Any:
        """Have the program's process call something. Changes that the call makes to lists and the like are made here too."""

        def refuse(value: Any) -> int:
            raise TypeError(f"{type(value).__name__} cannot be given to a program")

        own = {"do": "call", "target": target, "path": list(path), "arguments": encode(arguments, refuse)}
        self.send({"call": own})
        answer = self.receive()
        if answer is None or answer.get("error") is not None or "value" not in answer:
            raise RuntimeError(f"the program failed: {(answer or {}).get('error')}")
        after = decode(answer["arguments"], lambda number: Remote(self, number))
        for given, left in zip(arguments[0], after, strict=True):
            _make_same(given, left)
        return decode(answer["value"], lambda number: Remote(self, number))


class Remote:
    """A function or an object of the program, as a test sees it. It equals nothing and contains nothing."""

    def __init__(self, child: Child, target: str | int, path: tuple[str, ...] = ()) -> None:
        self.__child, self.__target, self.__path = child, target, path

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.__child.ask(self.__target, self.__path, (arguments, named))

    def __getattr__(self, name: str) -> "Remote":
        return Remote(self.__child, self.__target, (*self.__path, name))

    def __eq__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        raise TypeError("an object of the program is neither true nor false")

    __hash__ = object.__hash__


def _make_same(given: Any, left: Any) -> None:
    if type(given) is not type(left) or given == left:
        return
    if isinstance(given, list | bytearray):
        given[:] = left
    elif isinstance(given, dict | set):
        given.clear()
        given.update(left)


def _error_of(call: Callable[[], None]) -> str | None:
    """The name of what `call` raised; None if it came to its end. `sys.exit(0)` is an end."""
    try:
        call()
    except SystemExit as error:
        return None if error.code in (None, 0) else "SystemExit"
    except BaseException as error:  # a program may raise anything
        return type(error).__name__[:100]
    return None


def prepare() -> None:
    """In the process from which children are forked: import what programs often need, before there is a jail around it."""
    for name in OFTEN_IMPORTED.split():
        importlib.import_module(name)
