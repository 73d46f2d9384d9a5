"""Runs programs against tests, in jailed processes, a few at a time: the controller's side of `code_children.py`."""

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.system.sandbox import Jail
from open_instruct.verifiers.base import NotScored
from open_instruct.verifiers.code_children import GRACE_S, MOST_BYTES
from open_instruct.verifiers.keeper import KeeperStart
from open_instruct.verifiers.scoring_processes import Keeper, Scorer, ScoringJob, UnavailableError
from open_instruct.verifiers.verifiers import score_response

NOTHING = ScoringJob("", None, [], [], None)
MAX_CALLS = 100_000
"""Of one test to its program."""


@dataclass(frozen=True)
class TestResult:
    """What came of one test."""

    passed: bool
    seconds: float


class ProgramEnded(Exception):
    """A process has ended, or was ended for its time or its output."""


class CodeRuns:
    """Belongs to one event loop. `close` ends all processes.

    Args:
        at_once: programs that run at the same time; by default as many as there are cores.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._places = asyncio.Semaphore(at_once or len(os.sched_getaffinity(0)))
        self._forking = ThreadPoolExecutor(1, thread_name_prefix="code")
        self._keeper: Keeper | None = None

    async def run_tests(self, program: str, tests: Sequence[str], limit_s: float) -> list[TestResult]:
        """Run Python tests, such as `assert f(2) == 4`, against a program. Each test is given the functions and classes that the
        program defines, and `limit_s` seconds; after one that ended its process, the others go on with a new one.

        Raises:
            NotScored: no process can be started here.
        """
        results: list[TestResult] = []
        async with self._places:
            while len(results) < len(tests):
                async with self._child() as of_program, self._child() as of_test:
                    await self._until_one_ends(of_program, of_test, program, tests, limit_s, results)
        return results

    async def run_stdio(self, program: str, inputs: Sequence[str], limit_s: float) -> list[tuple[str | None, float]]:
        """What the program writes for each input, in a process of its own each; None if it failed. And the seconds it took."""
        outputs: list[tuple[str | None, float]] = []
        async with self._places:
            for text in inputs:
                async with self._child() as child:
                    started = time.monotonic()
                    try:
                        async with asyncio.timeout(limit_s + GRACE_S):
                            answer = await child.ask({"do": "stdio", "code": program, "input": text})
                    except (ProgramEnded, TimeoutError):
                        answer = {"error": "ended"}
                    seconds = time.monotonic() - started
                    output = (
                        answer.get("output") if answer.get("error") is None and seconds <= limit_s + GRACE_S else None
                    )
                    outputs.append((output if isinstance(output, str) else None, seconds))
        return outputs

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()  # the kernel then kills its children
        self._forking.shutdown(wait=False, cancel_futures=True)

    async def _until_one_ends(
        self,
        of_program: "_Channel",
        of_test: "_Channel",
        program: str,
        tests: Sequence[str],
        limit_s: float,
        results: list[TestResult],
    ) -> None:
        """Run tests until all have been run, or one has ended a process; that one has failed."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                loaded = await of_program.ask({"do": "program", "code": program})
            names = loaded.get("names")
            if (
                loaded.get("error") is not None
                or not isinstance(names, list)
                or not all(isinstance(n, str) for n in names)
            ):
                results += [TestResult(False, time.monotonic() - started)] * (len(tests) - len(results))
                return
            for test in tests[len(results) :]:
                started = time.monotonic()
                async with asyncio.timeout(limit_s + GRACE_S):
                    passed = await _run_test(of_program, of_test, test, names)
                results.append(TestResult(passed, time.monotonic() - started))
        except (ProgramEnded, TimeoutError):
            results.append(TestResult(False, time.monotonic() - started))

    @asynccontextmanager
    async def _child(self) -> AsyncIterator["_Channel"]:
        loop = asyncio.get_running_loop()
        try:
            child = await loop.run_in_executor(self._forking, self._fork)
        except (UnavailableError, RuntimeError) as error:
            raise NotScored(f"no process for a program: {error}") from error
        try:
            yield _Channel(child.socket)
        finally:
            child.kill()

    def _fork(self) -> Scorer:
        """In a thread, because it waits for the keeper."""
        for attempt in range(2):
            if self._keeper is None:
                jail = Jail(cpu_s=600)
                start = KeeperStart(score_response, (), (), VerifierConfig(), jail, runs_programs=True)
                self._keeper = Keeper(start, {})
            try:
                return self._keeper.fork(NOTHING)
            except UnavailableError:
                self._keeper.kill()
                self._keeper = None
                if attempt:
                    raise
        raise AssertionError("the last attempt returns or raises")


async def _run_test(of_program: "_Channel", of_test: "_Channel", test: str, names: list[str]) -> bool:
    """Pass the test's calls on to the program, and its answers back, until the test is over."""
    message = await of_test.ask({"do": "test", "code": test, "names": names})
    for _ in range(MAX_CALLS):
        call = message.get("call")
        if not isinstance(call, dict):
            return message.get("done") is True and message.get("error") is None
        message = await of_test.ask(await of_program.ask(call))
    raise ProgramEnded


class _Channel:
    """Messages to and from one process."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._socket = channel

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises `ProgramEnded` if the process ends, or answers with nonsense."""
        loop = asyncio.get_running_loop()
        content = json.dumps(message).encode()
        try:
            await loop.sock_sendall(self._socket, struct.pack("!Q", len(content)) + content)
            (size,) = struct.unpack("!Q", await self._read(8))
            if size > MOST_BYTES:
                raise ProgramEnded
            answer = json.loads(await self._read(size))
        except (OSError, ValueError, RecursionError) as error:
            raise ProgramEnded from error
        if not isinstance(answer, dict):
            raise ProgramEnded
        return answer

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(data), 2**16))
            if not part:
                raise ProgramEnded
            data += part
        return bytes(data)
