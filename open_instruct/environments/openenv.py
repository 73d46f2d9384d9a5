"""Environments on OpenEnv servers, through their WebSocket: no package of theirs is needed here.

The protocol is that of OpenEnv 0.10: `{"type": "reset" | "step" | "state" | "close", "data": …}` is answered by
`{"type": "observation", "data": {"observation", "reward", "done"}}` or `{"type": "error", "data": {"message"}}`.
"""

import json
from collections.abc import Mapping
from typing import Any

from open_instruct.environments.base import (
    ENVIRONMENTS,
    Environment,
    Observation,
    Opening,
    ToolError,
    Turn,
    user_message,
)
from open_instruct.environments.wire import MOST_BYTES, as_text

TEXT_FIELDS = ("message", "text", "prompt", "content", "result", "output", "echoed_message", "observation")
"""Where servers say their text; of an observation without any of these, all of it is shown as JSON."""


@ENVIRONMENTS.register("openenv")
class OpenEnv(Environment):
    """One session on an OpenEnv server, which gets the model's text.

    Args:
        url: of the server, such as `http://host:8000` or `ws://host:8000/ws`.
        action: field of the server's action that takes the text.
    """

    takes_text = True

    def __init__(self, url: str, action: str = "message", timeout: float = 60.0) -> None:
        self._url = socket_url(url)
        self._action, self._timeout_s = action, timeout
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        import aiohttp

        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(
            self._url, max_msg_size=MOST_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=2.0)
        )
        own = {key: value for key, value in task.items() if key not in ("messages", "ground_truth")}
        observation, _, _ = await self._ask("reset", {"seed": seed % 2**31, **own})
        text = text_of(observation)
        return Opening([user_message(text)] if text else [])

    async def step(self, turn: Turn) -> Observation:
        observation, reward, done = await self._ask("step", {self._action: turn.text})
        return Observation([user_message(text_of(observation))], reward, done)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, float | None, bool]:
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        said = json.loads(await self._socket.receive_str(timeout=self._timeout_s))
        content = said.get("data") or {}
        if said.get("type") == "error":
            if content.get("code") == "VALIDATION_ERROR":
                raise ToolError(f"Error: {content.get('message', 'the action is not valid')}")
            raise RuntimeError(f"the server says: {content.get('message', said)}")
        return content.get("observation"), content.get("reward"), bool(content.get("done"))

    async def close(self) -> None:
        if self._socket is not None:
            if not self._socket.closed:
                await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._session is not None:
            await self._session.close()


def socket_url(url: str) -> str:
    """The address of a server's WebSocket."""
    for web, sockets in (("https://", "wss://"), ("http://", "ws://")):
        if url.startswith(web):
            url = sockets + url.removeprefix(web)
    return url if url.rstrip("/").endswith("/ws") else f"{url.rstrip('/')}/ws"


def text_of(observation: Any) -> str:
    """The text of an observation, whatever the server's type for it is."""
    if isinstance(observation, dict):
        for field in TEXT_FIELDS:
            if isinstance(observation.get(field), str):
                return as_text(observation[field])
        observation = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    return as_text(observation) if observation else ""
