"""Lets the page ask the model of a run: `POST /chat` with `run` and `message` as JSON answers as
`open_instruct.chat --json` does.

Nothing is loaded before somebody asks. Then a child process loads the model, answers one message, and ends. It has a deadline,
the lowest priority, the processor alone, and it is killed when the page that asked is closed or the server ends. There is one at
a time, none while a run of this page is running, whose memory it could take, and none if the page is shown to other machines.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.states import state_of

DEADLINE_S = 180.0
LONGEST_MESSAGE = 20_000
"""Characters of a question."""
POLL_S = 0.25
MEMORY = 2.5
"""Bytes of main memory for each byte of weights, which may be loaded with twice the precision."""
Request = tuple[int, str]
"""Number of the run, and the message."""


class PageChat:
    """Asks models. Use it in one event loop."""

    def __init__(self, runs: Runs, *, deadline_s: float = DEADLINE_S) -> None:
        self._runs = runs
        self._deadline_s = deadline_s
        self._is_busy = False
        self._child: asyncio.subprocess.Process | None = None

    async def answer(self, body: bytes, is_gone: Callable[[], Awaitable[bool]]) -> Any:
        """What the model says, as `open_instruct.chat --json` prints it, with the text of each token (`token_texts`). `is_gone`:
        whether nobody waits for it any more.

        Raises `Mistake` for what cannot be asked, or was not answered.
        """
        run, message = read_request(body)
        if self._is_busy:
            raise Mistake("the model is answering already. Wait for its answer, or close the page that asked.")
        self._is_busy = True
        try:
            directory = await asyncio.to_thread(self._directory_of, run)
            value = await self._ask(directory, message, is_gone)
            texts = await asyncio.to_thread(self._runs[run].decode.tokens, value["tokens"])
        finally:
            self._is_busy = False
        return value | {"token_texts": texts}

    async def _ask(self, directory: Path, message: str, is_gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        words = [sys.executable, "-m", "open_instruct.chat", str(directory), "--json", "--device", "cpu"]
        pipe = asyncio.subprocess.PIPE
        child = self._child = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, 19)
            output, error = await self._told(child, message, is_gone)
        finally:
            self.close()
            await child.wait()
        if child.returncode:
            lines = error.decode(errors="replace").strip().splitlines()
            raise Mistake(lines[-1].removeprefix("chat: ") if lines else f"it ended with code {child.returncode}.")
        return json.loads(output)

    async def _told(
        self, child: asyncio.subprocess.Process, message: str, is_gone: Callable[[], Awaitable[bool]]
    ) -> tuple[bytes, bytes]:
        """What the child has written, once it has ended."""
        waiting = asyncio.create_task(child.communicate(message.encode()))
        try:
            ends_at = asyncio.get_running_loop().time() + self._deadline_s
            while not (await asyncio.wait({waiting}, timeout=POLL_S))[0]:
                if asyncio.get_running_loop().time() > ends_at:
                    limit = f"the model has not answered within {self._deadline_s:g} s."
                    raise Mistake(f"{limit} In a terminal it has no limit: python -m open_instruct.chat DIR")
                if await is_gone():
                    raise Mistake("nobody waits for the answer any more.")
            return waiting.result()
        finally:
            waiting.cancel()

    def close(self) -> None:
        """Kill the child, if there is one."""
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def _directory_of(self, run: int) -> Path:
        """The directory of a run whose model may be loaded now."""
        chosen = self._runs[run].directory.resolve()
        for other in self._runs.refresh():
            if state_of(other.directory, other.starts()) == "running":
                raise Mistake(
                    f"{other.directory} is running, and a model that is loaded here could take its memory. Ask when it has "
                    f"ended, or on another machine: python -m open_instruct.chat {chosen}"
                )
        weights = max((_num_bytes(path) for path in [chosen / "model", *chosen.glob("step_*")]), default=0)
        available = psutil.virtual_memory().available
        if MEMORY * weights > available:
            raise Mistake(
                f"the model needs about {MEMORY * weights / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are "
                f"available. In a terminal nothing stops it: python -m open_instruct.chat {chosen}"
            )
        return chosen


def read_request(body: bytes) -> Request:
    """Run and message of a request's body. Raises `Mistake`."""
    try:
        values = json.loads(body)
        run, message = values["run"], values["message"]
    except (ValueError, KeyError, TypeError):
        raise Mistake(
            'the body has to be JSON with `run` and `message`: {"run": 0, "message": "What is 2 + 3?"}'
        ) from None
    if not isinstance(run, int) or not isinstance(message, str) or not message.strip():
        raise Mistake("`run` has to be a number, and `message` a text that is not empty.")
    if len(message) > LONGEST_MESSAGE:
        raise Mistake(f"the message has {len(message):,} characters; {LONGEST_MESSAGE:,} are the most.")
    return run, message


def _num_bytes(directory: Path) -> int:
    """Bytes of the weights in a model's directory."""
    return sum(path.stat().st_size for suffix in ("safetensors", "bin") for path in directory.glob(f"*.{suffix}"))
