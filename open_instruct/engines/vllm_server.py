"""Starts vLLM's OpenAI-compatible server as a process, waits for it, and ends it.

    with VllmServer(options, log_path) as server:
        server.wait_until_ready(timeout_s)

`vllm serve` fails with the CPU build (vLLM 0.32: it looks up the version of a distribution called `vllm`). So the server's module
is run instead; it starts the same server.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import IO

from open_instruct.device import Device, allocator_env
from open_instruct.engines.engine_files import EngineFiles
from open_instruct.engines.server_keys import VLLM_KEY_VARIABLE

END_TIMEOUT_S = 15.0
"""How long a server may take to end by itself."""
POLL_S = 0.2
LOG_LINES_SHOWN = 30


class ServerFailed(RuntimeError):
    """A server ended, or was not ready in time; the message shows the end of its log."""


@dataclass(frozen=True)
class ServerOptions:
    """The options with which a server is started."""

    model: str
    port: int
    device: Device
    host: str = "127.0.0.1"
    max_num_seqs: int = 64
    gpu: int = 0
    """Number of the GPU to use, on a machine with GPUs."""
    api_key: str = field(default_factory=lambda: os.environ.get(VLLM_KEY_VARIABLE) or secrets.token_hex(16))
    """The server refuses requests without this key. The key is never passed on a command line, where every user of the machine
    could read it."""
    extra: tuple[str, ...] = ()
    """Further arguments of the command line."""

    @property
    def command(self) -> list[str]:
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", self.model, "--host", self.host, "--port", str(self.port)]
        # Training needs the log-probs of the distribution that is really sampled from.
        words += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(self.max_num_seqs)]
        return [*words, *self.device.server_words, *self.extra]

    @property
    def environment(self) -> dict[str, str]:
        return (
            os.environ
            | allocator_env(self.device)
            | self.device.server_env(gpu=self.gpu)
            | {VLLM_KEY_VARIABLE: self.api_key}
        )


class VllmServer:
    """One server in a process group of its own. The server ends with the `with` block, whatever happens in the block."""

    def __init__(self, options: ServerOptions, log_path: str | Path) -> None:
        self.options = options
        self.log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._files: EngineFiles | None = None

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.options.port}/v1"

    def start(self) -> None:
        """Start the process; the server is ready a while later. Its log is appended to the log file."""
        assert self._process is None, f"{self.url} runs already"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.log_path, "ab")  # noqa: SIM115 - closed by `stop`
        self._files = EngineFiles()
        self._process = subprocess.Popen(
            self.options.command,
            env=self.options.environment | self._files.env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            ServerFailed: the server ended, or `timeout_s` seconds were not enough.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            is_ready = self._knows_its_key()
            assert self._process is not None, "it has not been started"
            if self._process.poll() is not None:  # checked last, because another process's server may have answered
                raise ServerFailed(
                    f"the server at {self.url} ended with code {self._process.returncode}.{self._end_of_log()}"
                )
            if is_ready:
                return
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server at {self.url} was not ready after {timeout_s:g} s.{self._end_of_log()}")
            time.sleep(POLL_S)

    def _knows_its_key(self) -> bool:
        """Whether the server at this address takes our key and refuses another key. Another process's server may take any."""
        return self._answers(self.options.api_key) and not self._answers(self.options.api_key + "0")

    def _answers(self, key: str) -> bool:
        request = urllib.request.Request(f"{self.url}/models", headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=2):
                return True
        except (OSError, HTTPException):  # also HTTPError; and the process that answers may speak another protocol
            return False

    def _end_of_log(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f" The end of {self.log_path}:", *(f"  | {line}" for line in lines)])

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the server to end, and kill it if it does not end. May be called twice."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            _signal_group(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
            _signal_group(process.pid, signal.SIGKILL)  # also processes that the server may have left behind
            process.wait(END_TIMEOUT_S)
        if self._files is not None:
            self._files.remove()
            self._files = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> "VllmServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
