"""Has reward functions score groups of responses, each function in processes of its own, which can be killed.

submit(group) ─► event loop in a thread ── call ─► process of function f (server.py), at most `num_processes` of them
                                        └─ call ─► process of function g            an async function has one process

a call takes longer than `timeout_s`    its process is killed; its group is not scored: "timeout"
a process ends                          its groups are not scored: "crash"
the function raises, or returns nonsense     the group is not scored: "error: <function>: <last line of the traceback>"
"""

import asyncio
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from open_instruct.config.verifier_options import RewardFunctionSpec
from open_instruct.rewards.functions import Description, RewardCall, RewardFunctionError
from open_instruct.rewards.server import MOST_BYTES
from open_instruct.system.cells.framing import packed, receive_async, unpacked
from open_instruct.system.cells.places import Places
from open_instruct.system.cells.supervised import Supervised
from open_instruct.system.event_loop_thread import EventLoopThread
from open_instruct.system.sandbox import environment

logger = logging.getLogger(__name__)

START_S = 120.0
"""Longest time that a process may take to import its function."""
GRACE_S = 2.0
"""An async function is stopped at its limit by its process; after this much more the process is killed."""
MOST_SIDE_BY_SIDE = 64
"""Groups that an async function may score at once."""
CALLS_IN_A_JAIL = 64
"""Groups after which a jailed process is replaced, so that no damage by a response lasts."""
END_S = 2.0
"""Longest wait for a killed process to end."""
SLOW_S = 5.0
"""A call that takes longer is told in the log."""
TELL_S = 60.0
LONGEST_FAILURE = 500


@dataclass(frozen=True)
class FunctionResult:
    """What one function says of a group."""

    rewards: list[float | None]
    """For each response; None: the function does not score it."""
    failure: str = ""
    """Why no response was scored: `timeout`, `crash`, `unavailable` or `error`, and behind a colon what happened; "" if all went
    well."""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the function gave to `log_metric`."""
    extra: Mapping[str, list[str]] = field(default_factory=dict)
    """What the function gave to `log_extra`: texts, by column."""


class RewardFunctions:
    """The reward functions of a run. Any thread may use them; their creator closes them.

    Args:
        timeout_s: seconds that one function may take for the responses to one prompt.
        num_processes: most processes of one function.
        is_jailed: whether the processes can only compute.
    """

    def __init__(
        self, specs: Sequence[RewardFunctionSpec], *, timeout_s: float, num_processes: int, is_jailed: bool = False
    ) -> None:
        self._calls = EventLoopThread("reward functions")
        self._functions = [
            _Function(spec, timeout_s=timeout_s, num_processes=num_processes, is_jailed=is_jailed) for spec in specs
        ]
        self.specs = tuple(specs)

    def describe(self) -> list[Future[Description]]:
        """For each function what it needs. The futures raise `RewardFunctionError` for one that cannot be used."""
        return [self._calls.submit(function.describe) for function in self._functions]

    def submit(self, call: RewardCall) -> Future[list[FunctionResult]]:
        """What each function says of a group. Raises `RuntimeError` after `close`."""

        async def score() -> list[FunctionResult]:
            return list(await asyncio.gather(*(function.score(call) for function in self._functions)))

        return self._calls.submit(score)

    def close(self) -> None:
        """End all processes; groups that are not scored yet are given up."""
        self._calls.close(self._end)

    async def _end(self) -> None:
        await asyncio.gather(*(function.close() for function in self._functions))


class _Function:
    """One function and its processes. Lives in the event loop."""

    def __init__(self, spec: RewardFunctionSpec, *, timeout_s: float, num_processes: int, is_jailed: bool) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._is_jailed = is_jailed
        self._starting = asyncio.Lock()
        self._description: Description | None = None
        self._places = Places(1)
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._dying: list[_Process] = []
        """Processes that were killed."""
        self._told_at = -math.inf

    async def describe(self) -> Description:
        """Starts the first process, if none was started."""
        async with self._starting:
            if self._description is None:
                process = await self._start()
                self._description = description = process.description
                self._places = Places(MOST_SIDE_BY_SIDE if description.is_async else self._num_processes)
                self._idle.append(process)
        return self._description

    async def score(self, call: RewardCall) -> FunctionResult:
        if not call.texts:
            return FunctionResult([])
        try:
            await self.describe()
            async with self._places:
                answer = await self._ask(call)
        except TimeoutError:
            failure = "timeout"
        except (OSError, EOFError, ValueError) as error:
            failure = f"unavailable: {error}" if isinstance(error, RewardFunctionError) else "crash"
        else:
            result = _result(answer, self._spec.name, len(call.texts))
            self._tell_if_slow(result.seconds, len(call.texts))
            return result
        if failure == "timeout":
            self._tell_if_slow(math.inf, len(call.texts))
        return FunctionResult([None] * len(call.texts), f"{failure}: {self._spec.name}")

    async def close(self) -> None:
        for process in list(self._processes):
            self._kill(process)
        await asyncio.gather(*(process.ended() for process in self._dying))

    async def _ask(self, call: RewardCall) -> dict[str, Any]:
        process = await self._take()
        try:
            is_async = process.description.is_async
            answer = await process.ask(call, self._timeout_s + (GRACE_S if is_async else 0.0))
        except BaseException:  # its state is not known any more
            self._kill(process)
            raise
        self._give_back(process)
        return answer

    async def _take(self) -> "_Process":
        """A process for one call. All calls of an async function share one."""
        async with self._starting:
            while self._idle:
                process = self._idle[-1] if self._idle[-1].description.is_async else self._idle.pop()
                if process.is_alive:
                    return process
                self._kill(process)
            process = await self._start()
            if process.description.is_async:
                self._idle.append(process)
            return process

    def _give_back(self, process: "_Process") -> None:
        process.num_calls += 1
        if process.description.is_async:
            return
        if self._is_jailed and process.num_calls >= CALLS_IN_A_JAIL:
            self._kill(process)
        else:
            self._idle.append(process)

    async def _start(self) -> "_Process":
        process = _Process(self._spec.target, timeout_s=self._timeout_s, is_jailed=self._is_jailed)
        self._processes.add(process)
        try:
            await process.start()
        except BaseException:
            self._kill(process)
            raise
        return process

    def _kill(self, process: "_Process") -> None:
        if process not in self._processes:
            return
        process.kill()
        process.ended()
        self._processes.discard(process)
        self._dying = [other for other in self._dying if not other.is_closed] + [process]
        if process in self._idle:
            self._idle.remove(process)

    def _tell_if_slow(self, seconds: float, num_responses: int) -> None:
        now = time.monotonic()
        if seconds < SLOW_S or now < self._told_at + TELL_S:
            return
        self._told_at = now
        took = "was ended" if math.isinf(seconds) else f"took {seconds:.1f} s"
        logger.warning(
            "the reward function %s is slow: it %s for the %d responses to one prompt; a call may take "
            "--reward_timeout_s %g. Up to --verifier_workers %d groups are scored at once",
            self._spec.name,
            took,
            num_responses,
            self._timeout_s,
            self._num_processes,
        )


def _result(answer: Mapping[str, Any], name: str, num_responses: int) -> FunctionResult:
    """The answer of a process, checked, because the process has handled what a model wrote."""
    if "error" in answer:
        error = str(answer["error"])
        failure = f"timeout: {name}" if error == "timeout" else f"error: {name}: {error}"[:LONGEST_FAILURE]
        return FunctionResult([None] * num_responses, failure)
    try:
        rewards = [_reward(value) for value in answer["rewards"]]
        result = FunctionResult(
            rewards=rewards,
            seconds=float(answer.get("seconds", 0.0)),
            metrics={key: float(value) for key, value in answer["metrics"].items()},
            extra={key: list(map(str, values)) for key, values in answer["extra"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        result = None
    if result is None or any(len(values) != num_responses for values in (result.rewards, *result.extra.values())):
        return FunctionResult([None] * num_responses, f"crash: {name}: its process gave no rewards")
    return result


def _reward(value: object) -> float | None:
    """Raises `ValueError` or `OverflowError` for what is no finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


class _Process:
    """The parent's handle on one process of a function."""

    def __init__(self, target: str, *, timeout_s: float, is_jailed: bool) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._is_jailed = is_jailed
        self._supervised: Supervised | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._has_ended = False
        self.is_closed = False
        """Whether the pipes are closed."""
        self.description = Description((), is_async=False)
        self.num_calls = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self._has_ended

    async def start(self) -> None:
        """Start the process and wait until it has loaded the function. Raises `RewardFunctionError`."""
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # a notebook has "" there
        self._supervised = await Supervised.start(
            [sys.executable, "-P", "-m", "open_instruct.rewards.server"],
            variables=environment(paths) if self._is_jailed else {**os.environ, **paths},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._process = self._supervised.process
        limits = {"timeout_s": self._timeout_s, "cpu_s": math.ceil(self._timeout_s) * CALLS_IN_A_JAIL}
        self._send({"target": self._target, "is_jailed": self._is_jailed, **limits})
        try:
            async with asyncio.timeout(START_S):
                answer = await self._receive()
        except TimeoutError as error:
            raise RewardFunctionError(f"{self._target}: importing it took longer than {START_S:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            raise RewardFunctionError(f"{self._target}: its process ended while it was imported") from error
        if "error" in answer:
            raise RewardFunctionError(str(answer["error"]))
        self.description = Description(tuple(answer["needed"]), is_async=answer["is_async"])
        self._reading = asyncio.create_task(self._read())

    async def ask(self, call: RewardCall, timeout_s: float) -> dict[str, Any]:
        """The answer to a call. Raises `TimeoutError`, `EOFError`, `OSError` or `ValueError`."""
        if not self.is_alive:
            raise EOFError("its process has ended")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"number": number, "call": asdict(call)})
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            del self._waiting[number]

    def kill(self) -> None:
        """Kill the process and what it has started, also when the process itself has ended."""
        if self._reading is not None:
            self._reading.cancel()
        self._fail_all(EOFError("its process was ended"))
        if self._supervised is not None:
            self._supervised.kill()

    def ended(self) -> asyncio.Task[None]:
        """Done once the killed process has ended and its pipes are closed, which must be before the event loop ends."""
        if self._ending is None or self._ending.cancelled():
            self._ending = asyncio.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                if self._reading is not None:
                    await asyncio.gather(self._reading, return_exceptions=True)
                if self._process.stdout is not None:
                    await self._process.stdout.read()
                await self._process.wait()
        await asyncio.sleep(0)
        self.is_closed = True

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(packed(message))

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        return unpacked(await receive_async(self._process.stdout.read, MOST_BYTES))

    async def _read(self) -> None:
        """Hand each answer to the call that waits for it, until the process ends."""
        try:
            while True:
                answer = await self._receive()
                future = self._waiting.get(answer.get("number", -1))
                if future is not None and not future.done():
                    future.set_result(answer)
        except (EOFError, OSError, ValueError, TypeError, RecursionError) as error:
            self._has_ended = True
            if self._supervised is not None:
                self._supervised.kill()
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
