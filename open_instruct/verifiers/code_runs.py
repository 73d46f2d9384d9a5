"""Runs programs against tests in jailed processes, a few at a time. This is the controller's side of `code_children.py`."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from open_instruct.system.cells.cells import Cell, CellEnded, Cells, UnavailableError
from open_instruct.system.cells.framing import framed
from open_instruct.system.cells.places import Places
from open_instruct.system.sandbox import ONE_THREAD, environment, missing
from open_instruct.verifiers.base import NotScored
from open_instruct.verifiers.code_children import GRACE_S, Programs
from open_instruct.verifiers.code_wire import LARGEST_CALL, MOST_BYTES, as_json, encode

FAILED = object()
"""Stands for a missing value: the program failed, or its value cannot be written as JSON. It equals nothing."""
NOT_LOADED = object()
"""Stands for a missing value: the program ended or hung before it was loaded. It equals nothing."""
MAX_CALLS = 100_000
"""Most calls from one test to its program."""


@dataclass(frozen=True)
class TestResult:
    """The result of one test."""

    passed: bool
    seconds: float


@dataclass(frozen=True)
class Answer:
    """The result of one step: a value, `FAILED` or `NOT_LOADED`."""

    value: Any
    seconds: float


class ProgramEnded(Exception):
    """A process has ended, or must be ended because of its time or its output."""


class CodeRuns:
    """Runs programs on behalf of one event loop. `close` ends all processes.

    Args:
        at_once: programs that run at the same time; by default as many as there are cores.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._places = Places(at_once or len(os.sched_getaffinity(0)))
        self._cells: Cells | None = None

    async def run_tests(self, program: str, tests: Sequence[str], limit_s: float) -> list[TestResult]:
        """Run Python tests, such as `assert f(2) == 4`, against a program. Each test gets the functions and classes that the
        program defines, and `limit_s` seconds. After a test that ended a process, the other tests go on with new processes.

        Raises:
            NotScored: no process can be started here.
        """
        answers: list[Answer] = []
        is_loaded = True
        async with self._places:
            while len(answers) < len(tests):
                async with self._child() as runner, self._child() as tester:
                    steps = [partial(_run_test, runner, tester, program, test) for test in tests[len(answers) :]]
                    is_loaded = await _until_one_ends(
                        runner, program, steps, limit_s, answers, is_second_try=not is_loaded
                    )
        return [TestResult(answer.value is True, answer.seconds) for answer in answers]

    async def run_calls(self, program: str, function: str, calls: Sequence[list[Any]], limit_s: float) -> list[Answer]:
        """The results of a function of a program, or of this method of its class `Solution`, for each list of arguments, as JSON
        values. Raises `NotScored` if no process can be started here."""
        answers: list[Answer] = []
        is_loaded = True
        async with self._places:
            while len(answers) < len(calls):
                async with self._child() as child:
                    steps = [partial(_run_call, child, function, arguments) for arguments in calls[len(answers) :]]
                    is_loaded = await _until_one_ends(
                        child, program, steps, limit_s, answers, is_second_try=not is_loaded
                    )
        return answers

    async def run_stdio(self, program: str, inputs: Sequence[str], limit_s: float) -> list[tuple[str | None, float]]:
        """The program's output for each input, or None if it failed, and the seconds that it took. Each input gets a process of
        its own. Raises `NotScored` if no process can be started here."""
        async with self._places:
            return [await self._run_on(program, text, limit_s) for text in inputs]

    async def _run_on(self, program: str, text: str, limit_s: float) -> tuple[str | None, float]:
        with _Streams.of(text) as streams:
            async with self._child(streams.input, streams.output) as child:
                start = time.monotonic()
                try:
                    async with asyncio.timeout(limit_s + GRACE_S):
                        answer = await child.ask({"do": "stdio", "code": program})
                except (ProgramEnded, TimeoutError):
                    answer = {"error": "ended"}
                seconds = time.monotonic() - start
            is_done = answer.get("error", "") is None and seconds <= limit_s + GRACE_S
            return streams.written() if is_done else None, seconds

    def close(self) -> None:
        if self._cells is not None:
            self._cells.close()

    @asynccontextmanager
    async def _child(self, *streams: int) -> AsyncIterator["Child"]:
        """A new process. `streams` are the file descriptors of its standard input and output, if it needs any."""
        try:
            cell = await self._fork()
        except (UnavailableError, RuntimeError) as error:
            raise NotScored(f"no process for a program: {error}") from error
        try:
            try:
                if streams:
                    socket.send_fds(cell.connection, [b"f"], streams)
                else:
                    cell.connection.sendall(b"f")
            except OSError as error:
                raise NotScored(f"no process for a program: {error}") from error
            yield Child(cell)
        finally:
            cell.kill()

    async def _fork(self) -> Cell:
        """Raises `UnavailableError` if this machine has no jail."""
        if self._cells is None:
            if reasons := missing():
                raise UnavailableError("; ".join(reasons))
            self._cells = Cells(Programs(), environment(ONE_THREAD))
        return await self._cells.fork_async()


async def _until_one_ends(
    runner: "Child",
    program: str,
    steps: Sequence[Callable[[dict[str, Any]], Awaitable[Any]]],
    limit_s: float,
    answers: list[Answer],
    *,
    is_second_try: bool,
) -> bool:
    """Load the program and take steps, until all are taken or a step ends a process; that step has failed. Returns whether the
    program was loaded. If it was not, the caller tries once more, because the machine may have been busy. If the program is not
    loaded at the second try, all steps have failed."""
    start = time.monotonic()
    try:
        async with asyncio.timeout(limit_s + GRACE_S):
            exports = await runner.ask({"do": "program", "code": program})
    except (ProgramEnded, TimeoutError):
        if is_second_try:
            answers += [Answer(NOT_LOADED, time.monotonic() - start)] * len(steps)
        return False
    try:
        if exports.get("error") is not None:
            answers += [Answer(FAILED, time.monotonic() - start)] * len(steps)
            return True
        for step in steps:
            start = time.monotonic()
            async with asyncio.timeout(limit_s + GRACE_S):
                value = await step(exports)
            answers.append(Answer(value, time.monotonic() - start))
    except (ProgramEnded, TimeoutError):
        answers.append(Answer(FAILED, time.monotonic() - start))
    return True


async def _run_test(runner: "Child", tester: "Child", program: str, test: str, exports: dict[str, Any]) -> bool:
    """Pass the test's calls on to the program, and the answers back, until the test is over. The test's process reads the imports
    in `program`, the program's text."""
    message = await tester.ask({"do": "test", "code": test, "program": program, "offered": exports}, LARGEST_CALL)
    for _ in range(MAX_CALLS):
        call = message.get("call")
        if not isinstance(call, dict):
            if "done" not in message:  # the call was too large, and the test still waits for an answer
                raise ProgramEnded
            return message.get("done") is True and message.get("error") is None
        message = await tester.ask(await runner.ask(call), LARGEST_CALL)
    raise ProgramEnded


async def _run_call(child: "Child", function: str, arguments: list[Any], exports: dict[str, Any]) -> Any:
    def refuse(value: Any) -> int:
        raise TypeError(type(value).__name__)  # arguments come from JSON

    answer = await child.ask({"do": "method", "name": function, "arguments": encode(arguments, refuse)})
    if answer.get("error") is not None or "value" not in answer:
        return FAILED
    try:
        return as_json(answer["value"])
    except (ValueError, TypeError, RecursionError):
        return FAILED


class _Streams:
    """Standard input and output of a program. The output is read while the program runs, because a pipe holds little."""

    def __init__(self, stdin: int, reader: int, stdout: int) -> None:
        self.input, self.output, self._end = stdin, stdout, reader
        self._data = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reader, self._read)

    @classmethod
    @contextmanager
    def of(cls, text: str) -> Iterator["_Streams"]:
        """Streams with `text` as input. Raises `NotScored` if the machine has no memory or no files left."""
        with ExitStack() as stack:
            try:
                stdin = os.memfd_create("input")
                stack.callback(os.close, stdin)
                with open(stdin, "wb", closefd=False) as file:
                    file.write(text.encode(errors="replace"))
                os.lseek(stdin, 0, os.SEEK_SET)
                reader, stdout = os.pipe()
            except OSError as error:
                raise NotScored(f"no input or output for a program: {error}") from error
            os.set_blocking(reader, False)
            stack.callback(os.close, stdout)
            streams = cls(stdin, reader, stdout)
            stack.callback(streams._stop)
            yield streams

    def written(self) -> str | None:
        """The output so far; None if there is too much of it."""
        while self._read():
            pass
        return self._data.decode(errors="replace") if len(self._data) <= MOST_BYTES else None

    def _read(self) -> bool:
        """Read a part, if there is one. After too much output the pipe is closed, so that the program fails at once."""
        try:
            part = os.read(self._end, 2**16) if self._end >= 0 else b""
        except BlockingIOError:
            return False
        self._data += part
        if not part or len(self._data) > MOST_BYTES:
            self._stop()
        return bool(part)

    def _stop(self) -> None:
        if self._end >= 0:
            self._loop.remove_reader(self._end)
            os.close(self._end)
            self._end = -1


class Child:
    """Messages to and from one process."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def ask(self, message: dict[str, Any], max_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """The answer to a message. Raises `ProgramEnded` if the process ends, or answers nonsense or more than `max_bytes`."""
        try:
            return await self._cell.ask(framed(json.dumps(message).encode()), most_bytes=max_bytes)
        except CellEnded as error:
            raise ProgramEnded from error
