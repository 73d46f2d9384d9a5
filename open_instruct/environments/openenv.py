"""Environments on OpenEnv servers, through their WebSocket. No package of OpenEnv is needed.

The protocol is that of OpenEnv 0.10: `{"type": "reset" | "step" | "state" | "close", "data": …}` is answered by
`{"type": "observation", "data": {"observation", "reward", "done"}}` or `{"type": "error", "data": {"message", "code"}}`.

A server has room for a limited number of sessions, by default for one. While it is full, `reset` asks again until the pool's
deadline.

Servers ping their clients regularly (uvicorn every 20 s), and hang up if they get no answer. aiohttp answers a ping only while
somebody receives, and a model may speak for minutes. A task of its own therefore receives all the time, and puts what it receives
into a queue.
"""

import asyncio
import contextlib
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
"""Fields in which servers put their text; the first nonempty field counts. An observation without any of these fields is shown
as JSON. `messages` take precedence, because in games of TextArena `prompt` says nothing after the first turn."""
FULL, NOT_VALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Error codes of a server."""
ASK_AGAIN_S = 0.25


class ServerIsFull(RuntimeError):
    """The server has no room for a further session."""


@ENVIRONMENTS.register("openenv")
class OpenEnv(Environment):
    """One session on an OpenEnv server, which gets the model's text.

    Args:
        url: address of the server, such as `http://host:8000` or `ws://host:8000/ws`.
        action: field of the server's action that takes the text.
        timeout: seconds that the server may take to answer.
    """

    takes_text = True

    def __init__(self, url: str, action: str = "message", timeout: float = 60.0) -> None:
        self._url = socket_url(url)
        self._action, self._timeout_s = action, timeout
        self._shown = ""
        self._session: Any = None
        self._socket: Any = None
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._receiving: asyncio.Task[None] | None = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Opening:
        settings = {key: value for key, value in task.items() if key not in ("messages", "ground_truth")}
        while True:
            await self._connect()
            try:
                observation, _, _ = await self._ask("reset", {"seed": seed % 2**31, **settings})
                break
            except ServerIsFull:
                await self.close()
                await asyncio.sleep(ASK_AGAIN_S)
        self._shown = ""
        text = self._news(observation)
        return Opening([user_message(text)] if text else [])

    async def _connect(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(
            self._url, max_msg_size=MOST_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=2.0)
        )
        self._received = asyncio.Queue()
        self._receiving = asyncio.create_task(_receive_all(self._socket, self._received))

    async def step(self, turn: Turn) -> Observation:
        observation, reward, done = await self._ask("step", {self._action: turn.text})
        return Observation([user_message(self._news(observation))], reward, done)

    def _news(self, observation: Any) -> str:
        """The new text of an observation. Games of TextArena repeat everything that was said before, which is left out."""
        text, before = text_of(observation), self._shown
        self._shown = text
        is_longer = before and len(text) > len(before) and text.startswith(before)
        return text[len(before) :].strip("\n") if is_longer and _text_of_messages(observation) else text

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, float | None, bool]:
        import aiohttp

        with contextlib.suppress(ConnectionError):  # a full server hangs up, but its message can still be read
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        try:
            async with asyncio.timeout(self._timeout_s):
                received = await self._received.get()
        except TimeoutError:
            raise TimeoutError(
                f"no answer to {kind} within {self._timeout_s:g} s (timeout in --tool_configs)"
            ) from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"the server ended the session: {received.extra or received.type.name}")
        answer = json.loads(received.data)
        content = answer.get("data") or {}
        if answer.get("type") == "error":
            message = content.get("message", answer)
            if content.get("code") == FULL:
                raise ServerIsFull(message)
            if content.get("code") == NOT_VALID:
                raise ToolError(f"Error: {message}{_fields_of(content.get('errors'))}")
            raise RuntimeError(f"the server says: {message}")
        return content.get("observation"), content.get("reward"), bool(content.get("done"))

    async def close(self) -> None:
        if self._socket is not None:
            if not self._socket.closed:
                with contextlib.suppress(ConnectionError):  # the server may have hung up
                    await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._receiving is not None:
            await self._receiving  # the task ends because the socket is closed
        if self._session is not None:
            await self._session.close()


async def _receive_all(connection: Any, received: "asyncio.Queue[Any]") -> None:
    """Receive messages until the session ends. The last message says why it ended."""
    import aiohttp

    is_open = True
    while is_open:
        try:
            message = await connection.receive()
        except ConnectionError as error:  # the server was gone before it had its answer
            message = aiohttp.WSMessage(aiohttp.WSMsgType.ERROR, error, str(error))
        is_open = message.type is aiohttp.WSMsgType.TEXT
        received.put_nowait(message)


def socket_url(url: str) -> str:
    """The address of a server's WebSocket."""
    for web, sockets in (("https://", "wss://"), ("http://", "ws://")):
        if url.startswith(web):
            url = sockets + url.removeprefix(web)
    return url if url.rstrip("/").endswith("/ws") else f"{url.rstrip('/')}/ws"


def _fields_of(errors: Any) -> str:
    """What is wrong with each field of an action, in the server's words."""
    if not isinstance(errors, list):
        return ""
    details = [error for error in errors if isinstance(error, dict) and "msg" in error]
    return "".join(f"; {'.'.join(map(str, error.get('loc', ())))}: {error['msg']}" for error in details)


def text_of(observation: Any) -> str:
    """The text of an observation, whatever type the server uses for observations."""
    if isinstance(observation, dict):
        for text in (_text_of_messages(observation), *(observation.get(field) for field in TEXT_FIELDS)):
            if isinstance(text, str) and text:
                return as_text(text)
        observation = {
            key: value
            for key, value in observation.items()
            if key not in ("done", "reward", "metadata") and not (key in TEXT_FIELDS and value == "")
        }
    return as_text(observation) if observation else ""


def _text_of_messages(observation: Any) -> str:
    """What the messages of an observation say, such as `{"messages": [{"sender_id": -1, "content": "Guess a word."}]}`."""
    messages = observation.get("messages") if isinstance(observation, dict) else None
    if not isinstance(messages, list):
        return ""
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
    return "\n".join(content for content in contents if isinstance(content, str))
