"""The fork server of environments, and the process of one environment.

The fork server loads the code of environments once. It never sees what a model wrote. For every environment it forks a process,
which makes the environment and serves these requests over its socket:

    {"do": "make", "spec": …} {"do": "reset", "task": …, "seed": …} {"do": "step", "turn": …} {"do": "finish"} {"do": "close"}
    {"do": "load", "state": …} in place of a reset

To order a process, the engine sends the fork server a socket, and with it the length and the text of
`{"target": …, "config": …}`.

`processes.py` is the engine's side of both.
"""

import asyncio
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from open_instruct.environments.adapters import environment_class
from open_instruct.environments.base import Environment, EnvironmentSpec, ToolError
from open_instruct.environments.wire import (
    ENVIRONMENT,
    MODEL,
    as_text,
    ending_to_json,
    first_error,
    observation_to_json,
    opening_to_json,
    turn_from_json,
)
from open_instruct.system.cells.framing import HEAD, packed, receive_async, unpacked
from open_instruct.system.cells.reaper import Reaper, become_subreaper, die_with_parent, end_children
from open_instruct.system.sandbox import be_killed_first
from open_instruct.user_modules import import_user_module

LONGEST_ERROR = 500
READY, FAILED = b"r", b"f"


def keep(descriptor: int, modules: Sequence[str], targets: Sequence[str]) -> None:
    """Run the fork server. It forks an environment's process for every socket that it receives, until its own socket closes."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the engine decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listening, reaper = socket.socket(fileno=descriptor), Reaper()
    try:
        if _load(listening, modules, targets):
            reaper.have_loaded()
            with suppress(OSError):
                listening.sendall(READY)
                _fork_for_ever(listening, reaper, set(targets))
    finally:
        end_children()


def _load(listening: socket.socket, modules: Sequence[str], targets: Sequence[str]) -> bool:
    """Load all code. Returns whether that succeeded; if not, the reason is sent to the engine."""
    try:
        for module in modules:
            import_user_module(module)
        for target in targets:
            _prepare(target)
    except Exception as error:
        with suppress(OSError):
            listening.sendall(FAILED + f"{type(error).__name__}: {error}".encode()[:LONGEST_ERROR])
        return False
    return True


def _fork_for_ever(listening: socket.socket, reaper: Reaper, loaded: set[str]) -> None:
    """Fork processes until the engine closes its end of the socket, or ends."""
    fork_server, prepared = os.getpid(), set[bytes]()
    waking, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    while True:
        _tell_of_children(telling)
        reaper.clear_up()
        ready, _, _ = select.select([listening, waking], [], [])
        if waking in ready:
            os.read(waking, 2**12)
        if listening not in ready:
            continue
        head, descriptors, *_ = socket.recv_fds(listening, HEAD.size, 1)
        if not descriptors:
            return
        request = listening.recv(HEAD.unpack(head)[0], socket.MSG_WAITALL)
        if request not in prepared:
            prepared.add(request)
            target, config = (json.loads(request)[key] for key in ("target", "config"))
            if target not in loaded:
                loaded.add(target)
                _prepare(target)
            _prepare(target, config)
            reaper.have_loaded()
        if child := os.fork():
            reaper.forked(child)
            os.close(descriptors[0])
        else:
            _live(fork_server, descriptors[0])


def _tell_of_children(descriptor: int) -> None:
    """Have a byte written to the descriptor whenever a child ends. Called before every wait, because code that was loaded since
    the last wait may have installed signal handlers of its own."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


def _prepare(target: str, config: Mapping[str, Any] | None = None) -> None:
    """Load what all environments of this kind, or with these arguments, share. Done once, so that processes that are forked later
    inherit it."""
    with suppress(Exception):  # the environment's own process meets the same error, and reports it
        if config is None:
            environment_class(target).prepare()
        else:
            environment_class(target).prepare_for(config)
    gc.collect()
    gc.freeze()  # a garbage collection would copy the pages that the processes share


def _live(fork_server: int, descriptor: int) -> None:
    """Run the process of one environment. The fork server kills descendants that outlive this process."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        die_with_parent(fork_server)
        become_subreaper()
        with suppress(OSError):
            be_killed_first()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _arrange_descriptors(descriptor)
        random.seed(0)
        asyncio.run(_Service(socket.socket(fileno=3)).run())
    finally:
        os._exit(0)


def _arrange_descriptors(descriptor: int) -> None:
    """Keep only the socket, as descriptor 3. Standard input is empty, and what an environment prints is discarded."""
    silent = os.open(os.devnull, os.O_RDWR)
    connection = os.dup(descriptor) if descriptor < 4 else descriptor
    for number in range(3):
        os.dup2(silent, number)
    os.dup2(connection, 3, inheritable=False)
    os.closerange(4, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**16))


class _Service:
    """Serves the engine's requests to one environment."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._environment: Environment | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, packed({"pid": os.getpid()}))
        with suppress(EOFError):
            while True:
                message = unpacked(await receive_async(lambda size: loop.sock_recv(self._connection, size)))
                answer = await self._answer(message)
                try:
                    content = packed(answer)
                except (TypeError, ValueError, RecursionError) as error:
                    content = packed(
                        {"error": f"an answer that is no JSON: {error}"[:LONGEST_ERROR], "fault": ENVIRONMENT}
                    )
                await loop.sock_sendall(self._connection, content)

    async def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": await self._do(message), **self._state_after(message["do"])}
        except ToolError as error:
            return {"error": as_text(str(error)), "fault": MODEL}
        except BaseException as error:  # an environment may raise anything, including the `SystemExit` of `sys.exit`
            cause = first_error(error)
            where = traceback.extract_tb(cause.__traceback__)[-1:]
            place = f" ({os.path.basename(where[0].filename)}:{where[0].lineno})" if where else ""
            return {"error": as_text(f"{type(cause).__name__}: {cause}{place}"[:LONGEST_ERROR]), "fault": ENVIRONMENT}

    def _state_after(self, action: str) -> dict[str, Any]:
        state = self._environment.dump() if self._environment is not None and action in ("reset", "step") else None
        return {} if state is None else {"state": state}

    async def _do(self, message: Mapping[str, Any]) -> Any:
        action = message["do"]
        if action == "make":
            spec = EnvironmentSpec(**message["spec"])
            self._environment = environment_class(spec.target)(**spec.config)
            return {"is_stateless": self._environment.is_stateless}
        environment = self._environment
        assert environment is not None, "made first"
        if action == "reset":
            return opening_to_json(await environment.reset(message["task"], message["seed"]))
        if action == "step":
            return observation_to_json(await environment.step(turn_from_json(message["turn"])))
        if action == "load":
            return environment.load(message["state"])
        if action == "finish":
            return ending_to_json(await environment.finish())
        assert action == "close", action
        await environment.close()
        return None


if __name__ == "__main__":
    _, descriptor, num_modules, *names = sys.argv
    keep(int(descriptor), names[: int(num_modules)], names[int(num_modules) :])
