"""The process of one reward function. It loads the function, says what it needs, and answers calls until its input ends.

    stdin   one start message, then calls      stdout   a description, then answers      what the function prints goes to stderr

The function itself has an empty input, and processes that it forks have neither of these pipes: the death of this process is seen
at once.

Calls of an `async` function run side by side; those of another function one after another. In the jail (`system/sandbox.py`) the
process can only compute.
"""

import asyncio
import os
import signal
import sysconfig
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from open_instruct.rewards.functions import (
    RewardCall,
    RewardFunction,
    RewardFunctionError,
    arguments_of,
    describe,
    load,
    numbers_of,
)
from open_instruct.system.cells.framing import packed, receive, receive_async, send, unpacked
from open_instruct.system.sandbox import (
    GIB,
    Jail,
    be_killed_first,
    confine,
    python_files,
)

MOST_BYTES = 2**26
"""Most bytes of one answer."""
LONGEST_ERROR = 500
"""Characters of an error's text."""
JAIL_BYTES = 4 * GIB
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where Python and its packages are."""


def main() -> None:
    """Run the process."""
    calls, answers = _own_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = unpacked(receive(calls))
    target, is_jailed = start["target"], start["is_jailed"]
    try:
        function = load(target)
        description = describe(function, target)
    except RewardFunctionError as error:
        _write(answers, {"error": str(error)[:LONGEST_ERROR]})
        return
    if is_jailed:
        _go_to_jail(target, cpu_s=start["cpu_s"])
    _write(answers, {"needed": description.needed, "is_async": description.is_async})
    if description.is_async:
        asyncio.run(_answer_side_by_side(function, calls, answers, timeout_s=start["timeout_s"]))
    else:
        with suppress(EOFError):
            while True:
                _write(answers, _answer(function, unpacked(receive(calls))))


def _own_pipes() -> tuple[int, int]:
    """The descriptors of calls and answers, out of the function's way: it may print, read its input, and start processes."""
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def close_in_child() -> None:
        os.close(calls)
        os.close(answers)

    os.register_at_fork(after_in_child=close_in_child)
    return calls, answers


def _go_to_jail(target: str, *, cpu_s: int) -> None:
    """From now on the process can only compute, and read Python's installation and the folder of the function's file."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    file = target.partition(":")[0]
    beside = [str(Path(file).resolve().parent)] if file.endswith(".py") else []
    jail = Jail(readable=(*python_files(["open_instruct"]), *beside), memory_bytes=JAIL_BYTES, cpu_s=cpu_s)
    be_killed_first()
    confine(jail)


def _answer(function: RewardFunction, message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a call: the rewards and what the function has logged, or why there are none."""
    call = RewardCall(**message["call"])
    log = _Logged(len(call.texts))
    began = time.perf_counter()
    try:
        result = function(**arguments_of(function, call, log_extra=log.extra, log_metric=log.metric))
        rewards = numbers_of(result, len(call.texts))
    except Exception as error:  # a user's function may raise anything, and only this group is not scored then
        return {"number": message["number"], "error": in_words(error)}
    return {"number": message["number"], "rewards": rewards, "seconds": time.perf_counter() - began, **log.as_json()}


async def _answer_async(function: RewardFunction, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    call = RewardCall(**message["call"])
    log = _Logged(len(call.texts))
    began, limit = time.perf_counter(), asyncio.timeout(timeout_s)
    try:
        arguments = arguments_of(function, call, log_extra=log.extra, log_metric=log.metric)
        async with limit:
            rewards = numbers_of(await function(**arguments), len(call.texts))
    except (Exception, asyncio.CancelledError) as error:  # as above
        if isinstance(error, asyncio.CancelledError) and _is_ending():
            raise
        is_late = isinstance(error, TimeoutError) and limit.expired()
        return {"number": message["number"], "error": "timeout" if is_late else in_words(error)}
    return {"number": message["number"], "rewards": rewards, "seconds": time.perf_counter() - began, **log.as_json()}


def _is_ending() -> bool:
    """Whether the call itself is cancelled, because its process ends, and not a task that its function waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _answer_side_by_side(function: RewardFunction, calls: int, answers: int, *, timeout_s: float) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(calls, "rb"))
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        _write(answers, await _answer_async(function, message, timeout_s))

    with suppress(EOFError):
        while True:
            task = loop.create_task(answer(unpacked(await receive_async(reader.read))))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


class _Logged:
    """What a function logs during one call for so many responses."""

    def __init__(self, num_responses: int) -> None:
        self._num_responses = num_responses
        self._metrics: dict[str, float] = {}
        self._extra: dict[str, list[str]] = {}

    def metric(self, name: str, value: float) -> None:
        self._metrics["_".join(str(name).split())] = float(value)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if isinstance(values, str | bytes) or len(values) != self._num_responses:
            number = "a text" if isinstance(values, str | bytes) else f"{len(values)} values"
            completions = f"{self._num_responses} completions"
            raise ValueError(f"log_extra({column!r}): {number} for {completions}. Give a list with a value for each")
        self._extra[str(column)] = [str(value) for value in values]

    def as_json(self) -> dict[str, Any]:
        return {"metrics": self._metrics, "extra": self._extra}


def in_words(error: BaseException) -> str:
    """The last line of the error's traceback, and the place in the user's code where it happened: where it called what is
    installed, if the error came from there."""
    lines = traceback.format_exception_only(error)[-1].strip()
    ours = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    frames = [frame for frame in frames if not frame.filename.startswith(INSTALLED)] or frames
    place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return lines[:LONGEST_ERROR] + place


def _write(descriptor: int, message: dict[str, Any]) -> None:
    content = packed(message)
    if len(content) > MOST_BYTES:
        error = f"it logged more than {MOST_BYTES >> 20} MiB for one prompt. Give log_extra shorter texts"
        content = packed({"number": message["number"], "error": error})
    send(descriptor, content)


if __name__ == "__main__":
    main()
