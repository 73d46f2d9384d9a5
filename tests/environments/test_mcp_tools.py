"""Answers of MCP servers, with their own types and without a server. `test_adapters.py` has real servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import MCPError
from mcp.types import (
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from open_instruct.environments.base import Observation, ToolCall, Turn, mistake_in_config
from open_instruct.environments.mcp_tools import MCPTools


class Session:
    """Answers every call with the same, and names its tools in pages of one."""

    def __init__(self, answer: CallToolResult | Exception | None = None) -> None:
        self._answer = answer

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.sleep(60)
        assert self._answer is not None
        return self._answer

    async def list_tools(self, *, params: PaginatedRequestParams | None = None) -> ListToolsResult:
        number = int(params.cursor or 0) if params else 0
        tool = Tool(name=f"tool_{number}", input_schema={"type": "object"})
        return ListToolsResult(tools=[tool], next_cursor=str(number + 1) if number < 2 else None)


def asked(answer: CallToolResult | Exception | None, timeout: float = 30.0) -> Observation:
    tool = MCPTools("http://127.0.0.1:1/mcp", timeout=timeout)
    tool._session = Session(answer)
    return asyncio.run(tool.step(Turn("", (ToolCall("look", {}),))))


def test_resources_and_links_in_an_answer_are_shown() -> None:
    file = TextResourceContents(uri="repo://a/README.md", text="# A\nb")
    parts = [
        TextContent(text="downloaded"),
        EmbeddedResource(resource=file),
        ResourceLink(name="b", uri="repo://b"),
        ImageContent(data="", mime_type="image/png"),
    ]
    said = asked(CallToolResult(content=parts))
    assert said.messages[0]["content"] == "downloaded\n# A\nb\n[resource_link repo://b]\n[image]"
    assert said.num_errors == 0


def test_an_answer_of_values_alone_is_shown_as_json() -> None:
    said = asked(CallToolResult(content=[], structured_content={"price": 3}))
    assert said.messages[0]["content"] == '{"price": 3}'
    assert asked(CallToolResult(content=[])).messages[0]["content"] == ""


def test_arguments_that_the_server_refuses_are_the_models_fault_and_other_errors_are_not() -> None:
    said = asked(MCPError(-32602, "Invalid arguments for tool look: word is required"))
    assert said.messages[0]["content"] == "Error: Invalid arguments for tool look: word is required"
    assert said.num_errors == 1
    with pytest.raises(MCPError, match="Session terminated"):
        asked(MCPError(32600, "Session terminated"))
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s \(timeout in --tool_configs\)"):
        asked(None, timeout=0.01)


def test_tools_on_all_pages_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def connected(self: MCPTools) -> AsyncIterator[Session]:
        yield Session()

    monkeypatch.setattr(MCPTools, "connected", connected)
    schemas = MCPTools.schemas({"server_url": "http://pages"})
    assert [one["function"]["name"] for one in schemas] == ["tool_0", "tool_1", "tool_2"]
    [last] = MCPTools.schemas({"server_url": "http://pages", "tool_name": "tool_2"})
    assert last["function"]["parameters"] == {"type": "object"}


def test_unknown_arguments_are_a_mistake_and_those_of_open_instruct_are_not() -> None:
    assert "unexpected keyword argument 'timout'" in mistake_in_config(MCPTools, {"timout": 3})
    assert mistake_in_config(MCPTools, {"max_retries": 3, "retry_backoff": 0.5, "tool_info": {}}) == ""
