"""The process of one environment, which is a cell (`system/cells/`).

It makes the environment and serves these requests over its socket:

    {"do": "make", "spec": …} {"do": "reset", "task": …, "seed": …} {"do": "step", "turn": …} {"do": "finish"} {"do": "close"}
    {"do": "load", "state": …} in place of a reset

`processes.py` is the engine's side.
"""

import asyncio
import json
import os
import random
import socket
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
from open_instruct.system.cells.fork_server import CHANNEL, LONGEST_ERROR, CellKind
from open_instruct.system.cells.framing import packed, receive_async, unpacked
from open_instruct.user_modules import import_user_module


class EnvironmentProcesses(CellKind):
    """Processes of environments. An order is the target and the arguments of an environment.

    Args:
        modules: files and modules to import first.
        targets: environments that are loaded at the start.
    """

    name = "environments"

    def __init__(self, modules: Sequence[str], targets: Sequence[str]) -> None:
        self._modules, self._targets = list(modules), list(targets)
        self._prepared: set[str] = set()

    def load(self) -> dict[str, str]:
        for module in self._modules:
            import_user_module(module)
        for target in self._targets:
            self._prepare(target)
        return {}

    def prepare(self, order: tuple[str, Mapping[str, Any]]) -> bool:
        """Load what all environments of this kind, and with these arguments, share. Done once, so that processes that are forked
        later inherit it."""
        target, config = order
        key = json.dumps(order)
        if key in self._prepared:
            return False
        self._prepare(target)
        with suppress(Exception):  # as below
            environment_class(target).prepare_for(config)
        self._prepared.add(key)
        return True

    def _prepare(self, target: str) -> None:
        if target not in self._prepared:
            self._prepared.add(target)
            with suppress(Exception):  # the environment's own process meets the same error, and reports it
                environment_class(target).prepare()

    def serve(self) -> None:
        random.seed(0)
        asyncio.run(_Service(socket.socket(fileno=CHANNEL)).run())


class _Service:
    """Serves the engine's requests to one environment."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._environment: Environment | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
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
