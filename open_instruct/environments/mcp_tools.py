"""Tools of Model Context Protocol (MCP) servers, reached over HTTP or started as a program on this machine."""

import asyncio
import contextlib
import functools
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from open_instruct.environments.base import ENVIRONMENTS, Schema, ToolEnvironment, ToolError
from open_instruct.environments.wire import as_text, first_error

DISCOVERY_S = 60.0
"""Longest time that a server may take to list its tools when a run begins."""
RUN_MARK = "OPEN_INSTRUCT_RUN"
"""Environment variable that marks all processes of a run (`cluster/process_watch.py`), so that processes that outlive the run are
found. mcp 2.3 passes only a few harmless variables to its servers, so this variable must be added."""
INVALID_PARAMS = -32602
"""JSON-RPC's error code with which many servers refuse the arguments of a call. Other servers answer with an error as text."""


@ENVIRONMENTS.register("generic_mcp")
class MCPTools(ToolEnvironment):
    """All tools of one server, or only one of them. The connection is kept for further calls.

    Args:
        server_url: address of a server over HTTP.
        transport: `http`, `sse` or `stdio`.
        command, args, env: program of a server with the transport `stdio`.
        tool_name: the only tool that is offered; by default all are.
        timeout: seconds that a call may take.
        max_retries, retry_backoff, tool_info: open-instruct's options, without effect here. A call that fails is the server's
            fault, so the conversation begins again.
    """

    is_stateless = True

    def __init__(
        self,
        server_url: str = "",
        transport: str = "http",
        command: str = "",
        args: list[str] | None = None,
        env: dict[str, str] | None = None,
        tool_name: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 0,
        retry_backoff: float = 0.0,
        tool_info: Mapping[str, Any] | None = None,
    ) -> None:
        if transport not in ("http", "sse", "stdio"):
            raise ValueError(f"transport must be http, sse or stdio, got {transport!r}")
        if transport == "stdio" and not command:
            raise ValueError("the transport stdio needs a command")
        if transport != "stdio" and not server_url:
            raise ValueError(f"the transport {transport} needs a server_url")
        del max_retries, retry_backoff, tool_info
        self._transport, self._server_url = transport, server_url
        self._program = (command, list(args or []), dict(env or {}))
        self._timeout_s = timeout
        self._open: contextlib.AsyncExitStack | None = None
        self._session: Any = None

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        """The tools that the server lists. Raises `OSError` or `ValueError` if the server does not answer."""
        only = config.get("tool_name")
        server = {key: value for key, value in config.items() if key != "tool_name"}
        tools: list[Schema] = json.loads(_discover(json.dumps(server, sort_keys=True)))
        selection = [tool for tool in tools if only in (None, tool["function"]["name"])]
        if not selection:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise ValueError(f"the server has no tool {only!r}; it has: {names}")
        return selection

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Any]:
        """A session with the server."""
        from mcp import ClientSession

        async with self._streams() as (reading, writing, *_), ClientSession(reading, writing) as session:
            await session.initialize()
            yield session

    def _streams(self) -> Any:
        if self._transport == "stdio":
            from mcp.client.stdio import StdioServerParameters, stdio_client

            command, args, env = self._program
            marks = {RUN_MARK: os.environ[RUN_MARK]} if RUN_MARK in os.environ else {}
            return stdio_client(StdioServerParameters(command=command, args=args, env={**marks, **env}))
        if self._transport == "sse":
            from mcp.client.sse import sse_client

            return sse_client(self._server_url)
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(self._server_url)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        if self._session is None:
            self._open = contextlib.AsyncExitStack()
            self._session = await self._open.enter_async_context(self.connected())
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._session.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code != INVALID_PARAMS:
                raise
            raise ToolError(f"Error: {error}") from error
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s (timeout in --tool_configs)") from None
        text = "\n".join(map(_text_of, result.content)) if result.content else as_text(result.structured_content or "")
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        if self._open is not None:
            await self._open.aclose()


def _text_of(part: Any) -> str:
    """A part of an answer as text: the content of a resource, the target of a link, or a note that there is a picture or a
    sound."""
    for holder in (part, getattr(part, "resource", None)):
        if isinstance(text := getattr(holder, "text", None), str):
            return as_text(text)
    uri = getattr(part, "uri", None)
    return f"[{part.type}]" if uri is None else as_text(f"[{part.type} {uri}]")


@functools.cache
def _discover(config: str) -> str:
    """The tools of a server, as JSON. Each process asks a server only once."""

    async def ask() -> list[Schema]:
        from mcp.types import PaginatedRequestParams

        tools, params = [], None
        async with asyncio.timeout(DISCOVERY_S), MCPTools(**json.loads(config)).connected() as session:
            while params is None or params.cursor:  # a server may name its tools in several pages
                listed = await session.list_tools(params=params)
                tools += listed.tools
                params = PaginatedRequestParams(cursor=listed.next_cursor)
        return [_schema_of(tool) for tool in tools]

    try:
        return json.dumps(asyncio.run(ask()))
    except BaseException as error:
        cause = first_error(error)
        if isinstance(cause, KeyboardInterrupt):
            raise
        raise OSError(f"the MCP server does not answer: {type(cause).__name__}: {cause}") from error


def _schema_of(tool: Any) -> Schema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}
