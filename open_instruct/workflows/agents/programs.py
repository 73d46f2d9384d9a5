"""The engine's side of one user program: starts it, reads its output, and ends it with all that it has started."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from open_instruct.environments.wire import as_text
from open_instruct.system.cells.supervised import Supervised

logger = logging.getLogger(__name__)

KEPT_OUTPUT = 2**16
"""Bytes that are kept of the end of a program's output. The last line must fit into them."""
KEPT_ERRORS = 2**11
END_S = 15.0
"""Longest wait for a killed program to end."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    code: int
    is_late: bool
    """Whether the program was killed at its deadline."""
    last_line: str
    """The last nonempty line of the program's output."""
    errors: str
    """The end of the program's standard error."""


class Program:
    """A program in a session of its own, under a supervisor."""

    def __init__(self, supervised: Supervised, text: str, timeout_s: float) -> None:
        self._supervised = supervised
        self._process = supervised.process
        self._input = asyncio.create_task(self._write(text.encode()))
        self._deadline = time.monotonic() + timeout_s
        self._is_late = False
        self._output, self._errors = bytearray(), bytearray()

    @classmethod
    async def start(
        cls, words: Sequence[str], *, variables: Mapping[str, str], directory: str, text: str, timeout_s: float
    ) -> "Program":
        """Start a program with `text` on its standard input.

        Raises:
            OSError: no process can be started, or the directory does not exist.
        """
        pipe = asyncio.subprocess.PIPE
        supervised = await Supervised.start(
            words, variables=variables, directory=directory, stdin=pipe, stdout=pipe, stderr=pipe
        )
        return cls(supervised, text, timeout_s)

    async def wait(self) -> ProgramEnd:
        """Wait until the program ends. The program is killed at its deadline."""
        reading = [
            asyncio.create_task(_keep_end(self._process.stdout, self._output, KEPT_OUTPUT)),
            asyncio.create_task(_keep_end(self._process.stderr, self._errors, KEPT_ERRORS)),
        ]
        try:
            code = await self._wait_for_code()
            await asyncio.wait(reading, timeout=END_S)
        finally:
            self.kill()
            for task in [*reading, self._input]:
                task.cancel()
        lines = [line for line in bytes(self._output).split(b"\n") if line.strip()]
        last_line = as_text(lines[-1] if lines else b"")
        return ProgramEnd(code, self._is_late, last_line, as_text(bytes(self._errors)).strip())

    async def _wait_for_code(self) -> int:
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                return await self._process.wait()
        except TimeoutError:
            self._is_late = True
            self.kill()
        try:
            async with asyncio.timeout(END_S):
                return await self._process.wait()
        except TimeoutError:
            logger.warning("process %d does not end although it was killed", self._process.pid)
            return -1

    def hurry(self, seconds: float) -> None:
        """Kill the program in this many seconds, unless it has ended by then."""
        asyncio.get_running_loop().call_later(seconds, self.kill)

    def kill(self) -> None:
        """Have the supervisor kill the program and all that it has started. May be called twice, and from any thread."""
        self._supervised.kill()

    async def gone(self) -> None:
        """Wait, for a limited time, until a killed program has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()

    async def _write(self, content: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(ConnectionError):  # a program need not read its standard input
            stdin.write(content)
            await stdin.drain()
            stdin.close()


async def _keep_end(stream: asyncio.StreamReader | None, tail: bytearray, size: int) -> None:
    """Read the stream to its end, and keep only the last `size` bytes."""
    assert stream is not None
    while part := await stream.read(2**16):
        tail += part
        del tail[:-size]
