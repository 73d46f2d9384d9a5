"""The jailed process that runs the tests of a row. Stand-ins, which ask the program's process, replace the program's functions
and objects.

Expected values stay in this process. A stand-in equals no plain value and never sends one to be compared. Only if a test compares
two objects of the program is the program asked whether they are equal.
"""

import builtins
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from open_instruct.verifiers.code_names import names_given
from open_instruct.verifiers.code_wire import (
    ERRORS,
    LARGEST_CALL,
    OPERATORS_OF_ONE,
    OPERATORS_OF_TWO,
    Channel,
    decode,
    encode,
    error_in,
    failure_in,
    new_module,
)

MOST_ITEMS = 100_000
"""Most items of an iterator that a test passes to a program."""
LARGEST_CHUNK = 256
_VERDICTS = {
    *(name for kind in (str, bytes, set, float, int) for name in dir(kind) if name.startswith("is")),
    *("startswith", "endswith", "all", "any", "equals"),
}
"""Methods that answer yes or no about an expected text or set (`f(2).startswith("ab")`). A stand-in refuses them, unless the test
itself has made the object."""


_READABLE = ("__name__", "__dict__")
"""The only attributes with two leading underscores that are asked for. By an `__array_interface__` numpy would read memory."""


class TestProcess:
    """Runs tests one after another."""

    __test__ = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._functions: list[Callable[..., Any]] = []
        """Functions of the test that the program may call."""
        self._remotes: dict[int, Remote] = {}
        self._items: dict[int, Items] = {}
        self._errors: dict[str, type[Exception]] = {}
        """Stand-ins for the exceptions that the program defines."""
        self._made: set[int] = set()
        """Numbers of the objects that the test itself has made, by calling a class of the program."""
        self._has_failed = False
        """Whether an assertion failed in a function of the test that the program called. The program could hide the failure."""

    def test(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a test."""
        for collection in (self._functions, self._remotes, self._items, self._errors, self._made):
            collection.clear()
        self._has_failed = False
        failure = failure_in(lambda: self._run(message))
        return {"done": True, "error": "AssertionError" if self._has_failed else failure.get("error")}

    def _run(self, message: dict[str, Any]) -> None:
        code, exports = message["code"], message["offered"]
        callables, values, errors = ({str(name) for name in exports[kind]} for kind in ("names", "values", "errors"))
        scope = names_given(code, callables | values, message["program"])
        self._errors = {name: _error_type(name, exports["errors"][name]) for name in errors & scope.exports}
        names = new_module("test")
        names |= (
            scope.values | {name: Remote(self, ["name", name]) for name in callables & scope.exports} | self._errors
        )
        for name in values & scope.exports:
            if name in code:
                names[name] = self.operator("value", Remote(self, ["name", name]))
        exec(compile(code, "test", "exec"), names)

    # --- asking the program

    def call(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Have the program's process call something. Changes that the call makes to its mutable arguments are repeated here."""
        codes = [encode(argument, self._give) for argument in arguments]
        data = {"tuple": [{"tuple": codes}, encode(keywords, self._give)]}
        answer = self._ask({"do": "call", "function": {"object": function}, "arguments": data})
        updates = answer.get("arguments", {"list": codes})
        if not isinstance(updates, dict) or not isinstance(updates.get("list"), list) or "value" not in answer:
            raise error_in(answer, self._errors)
        for argument, before, after in zip(arguments, codes, updates["list"], strict=True):
            if before != after:
                _make_same(argument, self._rebuilt(after))
        value = self._rebuilt(answer["value"])
        if isinstance(value, Remote) and function[0:1] == ["name"] and _is_class_name(function[1]):
            self._made.add(reference_of(value))
        return value

    def is_made(self, reference: Any) -> bool:
        """Whether the test has made this object by calling a class, so that it does not expect a text or a set in its place."""
        return isinstance(reference, int) and reference in self._made

    def operator(self, name: str, *arguments: Any) -> Any:
        return self.call(["operator", name], arguments, {})

    def take(self, number: int, limit: int) -> tuple[list[Any], bool, Exception | None]:
        """The next items of an iterator of the program, whether there are no more, and what it raised after them."""
        answer = self._ask({"do": "take", "object": number, "most": limit}, may_fail=True)
        items = self._rebuilt({"list": answer.get("items")})
        error = error_in(answer, self._errors) if answer.get("error") is not None else None
        return items, answer.get("is_over") is True or not items, error

    def items(self, number: int) -> "Items":
        """The iterator with this number. There is only one, so that no item is lost between two loops."""
        return self._items.setdefault(number, Items(self, number))

    def _ask(self, call: dict[str, Any], *, may_fail: bool = False) -> dict[str, Any]:
        self._channel.send({"call": call}, LARGEST_CALL)
        while "function" in (answer := self._channel.receive()):
            self._channel.send({"call": {"do": "return"} | self._call_of_program(answer)}, LARGEST_CALL)
        if answer.get("error") is not None and not may_fail:
            raise error_in(answer, self._errors)
        return answer

    def _call_of_program(self, message: dict[str, Any]) -> dict[str, Any]:
        """Serve a call by the program of a function that the test has passed to it."""
        result: dict[str, Any] = {}

        def call() -> None:
            arguments, keywords = self._rebuilt(message["arguments"])
            result["value"] = encode(self._functions[message["function"]](*arguments, **keywords), self._give)

        failure = failure_in(call)
        self._has_failed |= "AssertionError" in failure.get("kinds", ())
        return failure or result

    def _rebuilt(self, data: Any) -> Any:
        try:
            return decode(data, self._remote)
        except Exception as error:  # a program's answer may be anything
            raise RuntimeError("the program's answer makes no sense") from error

    def _remote(self, number: Any) -> "Remote":
        if not isinstance(number, int):
            raise ValueError("not the number of an object")
        return self._remotes.setdefault(number, Remote(self, number))  # the same stand-in each time, for `is`

    def _give(self, value: Any) -> Any:
        """The reference under which the program gets a value that is not plain data."""
        if isinstance(value, Remote):
            return reference_of(value)
        if callable(value):
            name = getattr(value, "__name__", "")
            if getattr(builtins, name, None) is value:
                return ["builtin", name]
            self._functions.append(value)
            return ["function", len(self._functions) - 1]
        if isinstance(value, Iterator):
            return ["iterator", encode(list(itertools.islice(value, MOST_ITEMS)), self._give)]
        raise TypeError(f"{type(value).__name__} cannot be given to a program")


# --- stand-ins --------------------------------------------------------------------------------------------------------


class Remote:
    """A function or an object of the program, as a test sees it."""

    __slots__ = ("__process", "__reference")

    def __init__(self, process: TestProcess, reference: Any) -> None:
        object.__setattr__(self, "_Remote__process", process)
        object.__setattr__(self, "_Remote__reference", reference)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return self.__process.call(self.__reference, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        is_inner = name.startswith("__") and name not in _READABLE
        if is_inner or (name in _VERDICTS and not self.__process.is_made(self.__reference)):
            raise AttributeError(name)
        return self.__process.operator("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__process.operator("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__process.operator("delattr", self, name)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Remote) and self.__process.operator("eq", self, other) is True

    def __iter__(self) -> "Items":
        iterator = self.__process.operator("iter", self)
        number = reference_of(iterator) if isinstance(iterator, Remote) else None
        if not isinstance(number, int):
            raise TypeError("the program gives no iterator")
        return self.__process.items(number)

    def __next__(self) -> Any:
        if not isinstance(self.__reference, int):
            raise TypeError("no iterator")
        return next(self.__process.items(self.__reference))

    def __contains__(self, item: Any) -> bool:
        """The search runs in this process, because a `__contains__` of the program would receive the expected value."""
        return any(element is item or element == item for element in self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self.__process.operator("isinstance", instance, self) is True

    def __copy__(self) -> Any:
        return self.__process.operator("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__process.operator("deepcopy", self)


def _asked(name: str) -> Any:
    def ask(self: Remote, *arguments: Any) -> Any:
        return process_of(self).operator(name, self, *arguments)

    return ask


def _asked_of_two(name: str) -> Any:
    """An operator that asks the program only if the other operand is also an object of the program. Otherwise `f(2) - 1.4` would
    send the expected value."""

    def ask(self: Remote, other: Any) -> Any:
        return process_of(self).operator(name, self, other) if isinstance(other, Remote) else NotImplemented

    return ask


for _name in OPERATORS_OF_ONE.split():
    setattr(Remote, f"__{_name}__", _asked(_name))
for _name in OPERATORS_OF_TWO.split():
    setattr(Remote, f"__{_name.rstrip('_')}__", _asked_of_two(_name))


def reference_of(remote: Remote) -> Any:
    """The program's reference for a stand-in: the number of an object, or `["name", <name>]`."""
    return object.__getattribute__(remote, "_Remote__reference")


def process_of(remote: Remote) -> TestProcess:
    return object.__getattribute__(remote, "_Remote__process")


class Items:
    """An iterator of the program. Items are fetched in growing chunks, because the iterator may never end."""

    def __init__(self, process: TestProcess, number: int) -> None:
        self._process, self._number = process, number
        self._ready: deque[Any] = deque()
        self._most, self._is_over = 1, False
        self._error: Exception | None = None

    def __iter__(self) -> "Items":
        return self

    def __next__(self) -> Any:
        if not self._ready and not self._is_over:
            items, self._is_over, self._error = self._process.take(self._number, self._most)
            self._ready.extend(items)
            self._most = min(2 * self._most, LARGEST_CHUNK)
        if self._ready:
            return self._ready.popleft()
        error, self._error = self._error, None
        raise error or StopIteration


def _is_class_name(name: str) -> bool:
    """Whether a name looks like a class: `Trie` and `LRUCache` do, `trie`, `Find_Max` and `F` do not."""
    return name[:1].isupper() and "_" not in name and not name.isupper()


def _error_type(name: str, kinds: list[str]) -> type[Exception]:
    """A stand-in for an exception class of the program, derived from the same builtin type."""
    return type(name, (next((ERRORS[kind] for kind in kinds if kind in ERRORS), Exception),), {})


def _make_same(argument: Any, copy: Any) -> None:
    """Change a mutable argument of the test in the way in which the call has changed the program's copy."""
    if type(argument) is not type(copy):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = copy
    elif isinstance(argument, deque):
        argument.clear()
        argument.extend(copy)
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(copy)
