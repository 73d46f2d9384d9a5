"""What an MCP server says of an error never reaches the model, or a picture ends the conversation."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from exhibit import Exhibit
from mcp.types import CallToolResult, ImageContent, TextContent

from open_instruct.environments.base import ToolCall, Turn
from open_instruct.environments.mcp_tools import MCPTools

EXHIBIT = Exhibit(
    reports=("openai/openai-agents-python #4224", "PrimeIntellect-ai/verifiers #2454"),
    subject="tokens and turns",
    happened="An answer with values and an error text was shown as its values alone, like a success. Elsewhere an answer "
    "with a picture was a list where the program expected text, and the rollout was lost.",
    here="The text of an answer comes first, values are shown where there is no text, an error is counted as the "
    "model's, and a picture becomes the note `[image]` (`environments/mcp_tools.py`).",
)
Shown = tuple[str, int]
"""What the model sees, and the number of errors."""
REFUSED = CallToolResult(content=[TextContent(text="no such table")], structured_content={"rows": 0}, is_error=True)
VALUES = CallToolResult(content=[], structured_content={"rows": 3})
PICTURE = CallToolResult(content=[TextContent(text="a chart"), ImageContent(data="", mime_type="image/png")])


def check(shown: Callable[[CallToolResult], Shown]) -> None:
    assert shown(REFUSED) == ("no such table", 1)
    assert shown(VALUES) == ('{"rows": 3}', 0)
    assert shown(PICTURE) == ("a chart\n[image]", 0)


def theirs(answer: CallToolResult) -> Shown:
    return str(answer.structured_content or answer.content), 0


def ours(answer: CallToolResult) -> Shown:
    async def call_tool(name: str, arguments: dict[str, Any]) -> CallToolResult:
        return answer

    tool = MCPTools("http://127.0.0.1:1/mcp")
    tool._session = SimpleNamespace(call_tool=call_tool)
    observation = asyncio.run(tool.step(Turn("", (ToolCall("look", {}),))))
    return observation.messages[0]["content"], observation.num_errors


def test_values_in_place_of_the_error_are_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_errors_and_pictures_are_shown_as_text_here() -> None:
    check(ours)
