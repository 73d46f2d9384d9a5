"""The jailed process that runs a program of the model. It is asked for results of functions, or for output. It knows no test."""

import atexit
import builtins
import contextlib
import copy
import functools
import importlib
import json
import operator
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from open_instruct.verifiers.code_wire import (
    OPERATORS_OF_ONE,
    OPERATORS_OF_TWO,
    Channel,
    decode,
    encode,
    error_in,
    failure_in,
    new_module,
)

USUAL_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io json "
    "typing"
)
"""Modules whose names a program can use without an import, as in LiveCodeBench and open-instruct."""
MOST_NAMES = 5000
DEEPEST_RECURSION = 50_000
"""The limit of LiveCodeBench."""
CHUNK_BYTES = 2**16

OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name, None) or getattr(builtins, name)
    for name in f"{OPERATORS_OF_ONE} {OPERATORS_OF_TWO} eq iter getattr setattr delattr isinstance".split()
} | {"copy": copy.copy, "deepcopy": copy.deepcopy, "value": lambda value: value}
"""What a test may do with objects of the program in addition to calling them."""


@functools.cache
def usual_names() -> dict[str, Any]:
    """Names that a program finds defined at its beginning. They hide no builtin (`pow` is not `math.pow`)."""
    names: dict[str, Any] = {}
    for module in USUAL_MODULES.split():
        exec(f"from {module} import *", names)
    names |= {module: importlib.import_module(module) for module in ("sys", *USUAL_MODULES.split())}
    return {name: value for name, value in names.items() if not hasattr(builtins, name)}


class ProgramProcess:
    """Serves the controller's messages. Each public method does what one kind of message asks for, and returns the answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """Numbers of the objects by `id`. The objects are kept alive, so no other object can get the same `id`."""
        self._names: dict[str, Any] = {}
        self._offered: set[str] = set()

    def program(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a program, so that its functions can be called. Returns the names that it has defined: callables, values, and
        exceptions with their base types."""
        self._names, failure = _run("program", message["code"])
        defaults, sentinel = usual_names(), object()
        definitions = {
            name: value
            for name, value in self._names.items()
            if not name.startswith("__")
            and not isinstance(value, ModuleType)
            and defaults.get(name, sentinel) is not value
        }
        names = list(definitions)[-MOST_NAMES:]
        self._offered = set(names)
        return failure | {
            "names": [name for name in names if callable(definitions[name])],
            "values": [name for name in names if not callable(definitions[name])],
            "errors": {
                name: [kind.__name__ for kind in definitions[name].__mro__]
                for name in names
                if _is_error(definitions[name])
            },
        }

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function, a method or an operator."""
        result: dict[str, Any] = {}

        def call() -> None:
            function = decode(message["function"], self._find)
            arguments, keywords = decode(message["arguments"], self._find)
            result["value"] = encode(function(*arguments, **keywords), self._keep)
            updates = encode(list(arguments), self._keep)
            if updates["list"] != message["arguments"]["tuple"][0]["tuple"]:  # they may be large
                result["arguments"] = updates  # the arguments after the call

        return failure_in(call) or result

    def method(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a method of a new `Solution`, or, if there is no such method, a function of the program."""
        result: dict[str, Any] = {}

        def call() -> None:
            owner, name = self._names.get("Solution"), message["name"]
            if not isinstance(owner, type) or not hasattr(owner, name):
                function = self._find(["name", name])
            else:
                function = getattr(owner(), name)
            result["value"] = encode(function(*decode(message["arguments"], self._find)), self._keep)

        return failure_in(call) or result

    def take(self, message: dict[str, Any]) -> dict[str, Any]:
        """The next items of an iterator: at most as many as the message asks for, and fewer if they are large."""
        iterator = self._objects[message["object"]]
        items: list[Any] = []
        is_over = False

        def take() -> None:
            nonlocal is_over
            size = 0
            while len(items) < message["most"] and size < CHUNK_BYTES:
                try:
                    item = next(iterator)
                except StopIteration:
                    is_over = True
                    return
                items.append(encode(item, self._keep))
                size += len(json.dumps(items[-1]))

        return failure_in(take) | {"items": items, "is_over": is_over}

    def stdio(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a program whose standard input and output the controller holds."""
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        ours = sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.argv = ["program"]
        atexit._clear()  # handlers inherited from the process that this one was forked from
        _, failure = _run("__main__", message["code"])
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        failure_in(atexit._run_exitfuncs)  # their errors are ignored, as Python does
        for stream in (sys.stdout, ours):
            with contextlib.suppress(Exception):  # a program may have closed or replaced it
                stream.flush()
        return {"error": failure.get("error")}

    def _keep(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def _find(self, reference: Any) -> Any:
        """The object that a test refers to, by its number or by a kind and a name."""
        if isinstance(reference, int):
            return self._objects[reference]
        kind, content = reference
        if kind == "name":
            if content not in self._offered:
                raise NameError(f"name {content!r} is not defined")
            return self._names[content]
        if kind == "function":
            return lambda *arguments, **keywords: self._ask_test(content, arguments, keywords)
        if kind == "iterator":
            return iter(decode(content, self._find))
        return OPERATORS[content] if kind == "operator" else getattr(builtins, content)

    def _ask_test(self, function: int, arguments: Any, keywords: Any) -> Any:
        """Call a function of the test, which is waiting for this process. Before it answers, it may call the program in turn."""
        self._channel.send({"function": function, "arguments": encode((arguments, keywords), self._keep)})
        while (message := self._channel.receive())["do"] != "return":
            self._channel.send({"call": self.call, "take": self.take}[message["do"]](message))
        if message.get("error") is not None:
            raise error_in(message)
        return decode(message["value"], self._find)


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _run(name: str, code: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run code as a module of this name. Returns the module's namespace, and the result of `failure_in`."""
    sys.setrecursionlimit(DEEPEST_RECURSION)
    names = new_module(name)
    names.update(usual_names())
    return names, failure_in(lambda: exec(compile(code, "program", "exec"), names))
