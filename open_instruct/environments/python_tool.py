"""A tool that runs Python programs of the model, in the jail of `system/sandbox.py`.

    the environment's process ── forks for each program ──► jailed child: no network, no files but Python's own, limits
              ◄── what the program printed, over a pipe ──────────┘ killed at the limit

Nothing is kept between two programs. Where the kernel cannot give the jail, the tool refuses to start; it never runs a program
without.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from open_instruct.environments.base import ENVIRONMENTS, Schema, ToolEnvironment, ToolError, schema
from open_instruct.system.cells.fork_server import hold_only
from open_instruct.system.cells.reaper import die_with_parent
from open_instruct.system.sandbox import (
    Jail,
    confine,
    missing,
    python_files,
)

MOST_OUTPUT = 2**16
"""Bytes of output. A program that writes more is ended."""
OFTEN_IMPORTED = (
    "collections datetime decimal fractions functools heapq itertools json math numpy random re statistics string"
)


@ENVIRONMENTS.register("python")
class PythonTool(ToolEnvironment):
    """Runs a program and answers with what it printed. A program that ends with an error counts as a call with an error.

    Args:
        timeout: seconds that a program may take.
        memory_mb: private memory of a program.
        api_endpoint: a server of open-instruct's protocol (`{"code", "timeout"}` to `{"output", "error"}`) that runs the programs
            in place of this machine.
    """

    is_stateless = True
    runs_programs = True

    def __init__(self, timeout: float = 3.0, memory_mb: int = 512, api_endpoint: str | None = None) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}")
        if api_endpoint is None and missing():
            raise ValueError(self.problem({}))
        self._timeout_s = float(timeout)
        self._jail = Jail(python_files(), memory_bytes=memory_mb * 2**20, cpu_s=math.ceil(timeout) + 1)
        self._api_endpoint = api_endpoint

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str:
        if config.get("api_endpoint") is not None or not missing():
            return ""
        return f"programs cannot be jailed here: {'; '.join(missing())}. Name a server that runs them as api_endpoint"

    @classmethod
    def prepare(cls) -> None:
        """Import what programs often need, which the jailed children share."""
        for name in OFTEN_IMPORTED.split():
            __import__(name)

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        parameters = {"code": {"type": "string", "description": "Python code to execute"}}
        return [schema("python", "Executes Python code and returns printed output.", parameters)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ToolError("Empty code. Please provide some code to execute.")
        if self._api_endpoint is not None:
            return await self._ask_server(code)
        output, is_late, status = await self._run(code)
        text = output[:MOST_OUTPUT].decode(errors="replace")
        if len(output) > MOST_OUTPUT:
            raise ToolError(f"{text}\n[the output is longer than {MOST_OUTPUT} bytes]")
        if is_late:
            raise ToolError(f"{text}\nTimeout after {self._timeout_s:g} seconds".lstrip("\n"))
        if status < 0 and status != -signal.SIGKILL:  # that was this process, because the program had closed its output
            raise ToolError(f"{text}\nEnded by {signal.Signals(-status).name}".lstrip("\n"))
        if status > 0:
            raise ToolError(text)
        return text

    async def _run(self, code: str) -> tuple[bytes, bool, int]:
        """What the program wrote, whether it was ended because it took too long, and its exit status (-11 for signal 11)."""
        reading, writing = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if not child:
            _become_program(parent, writing, self._jail, code)
        os.close(writing)
        os.set_blocking(reading, False)
        process = os.pidfd_open(child)
        output, is_late = bytearray(), False
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while part := await _read(reading):
                        output += part
                        if len(output) > MOST_OUTPUT:
                            break
            except TimeoutError:
                is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
            os.close(reading)
            _, status = os.waitpid(child, 0)  # killing a program that has just ended leaves its exit status as it is
        return bytes(output), is_late, os.waitstatus_to_exitcode(status)

    async def _ask_server(self, code: str) -> str:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self._timeout_s + 5.0)
        request = {"code": code, "timeout": self._timeout_s}
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(str(self._api_endpoint), json=request) as reply,
        ):
            reply.raise_for_status()
            answer = await reply.json()
        error = answer.get("error") or ""
        text = (answer.get("output") or "") + (f"\n{error}" if error else "")
        if error:
            raise ToolError(text)
        return text


async def _read(descriptor: int) -> bytes:
    """The next bytes of a pipe; none at its end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(descriptor, 2**16)
        except BlockingIOError:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(descriptor, lambda waiting=readable: waiting.done() or waiting.set_result(None))
            try:
                await readable
            finally:
                loop.remove_reader(descriptor)


def _become_program(parent: int, writing: int, jail: Jail, code: str) -> None:
    """The jailed child. Its only open files are the pipe, as output and error, and an empty input."""
    status = 1
    try:
        die_with_parent(parent)
        hold_only([os.open(os.devnull, os.O_RDONLY), writing, writing])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        confine(jail)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, buffering, closefd=False)
            for number, mode, buffering in (
                (0, "r", -1),
                (1, "w", -1),
                (2, "w", 1),
            )  # errors line by line, as Python does
        )
        sys.argv = ["program"]
        status = _execute(code)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _execute(code: str) -> int:
    """Run the program. Returns the exit status that it would have from Python."""
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(bool(end.code))
        text = f"{end.code}\n"
    except BaseException as error:
        trace = traceback.TracebackException.from_exception(error)
        trace.stack = traceback.StackSummary.from_list(
            [frame for frame in trace.stack if frame.filename == "<program>"]
        )
        text = "".join(trace.format(chain=False))
    else:
        return 0
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    return 1
