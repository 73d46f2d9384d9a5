"""A malformed tool call ends the rollout, or vanishes."""

import json
import re
from collections.abc import Callable

import pytest
from exhibit import Exhibit

from open_instruct.environments.base import ToolCall, schema
from open_instruct.workflows.conversations.call_forms import FORMS
from open_instruct.workflows.conversations.tool_parsers import VllmToolParser

EXHIBIT = Exhibit(
    reports=("PrimeIntellect-ai/verifiers #1763", "NVIDIA-NeMo/Gym #605", "NousResearch/hermes-agent #5315"),
    subject="tokens and turns",
    happened="A call whose JSON is broken raised an error that lost the whole rollout, a quarter of them in one run; "
    "elsewhere such calls were dropped in silence, together with the right ones beside them.",
    here="Each call of a turn is read by itself; one that cannot be read is answered with what is wrong and how a call"
    " looks, and the others are carried out (`workflows/conversations/tool_parsers.py`).",
)
GOOD = '<tool_call>{"name": "add", "arguments": {"text": "1 + 1"}}</tool_call>'
BROKEN = '<tool_call>{"name": "add", "arguments": {"text": "2 + 2"}</tool_call>'
AS_TEXT = '<tool_call>{"name": "add", "arguments": "{\\"text\\": \\"3 + 4\\"}"}</tool_call>'
Call = dict[str, str] | None
"""The arguments of a call; None for a call that is answered with an error."""


def calls_of_turn(text: str) -> list[tuple[str, str]]:
    """As some of vLLM's parsers: all calls of a turn, or none if one is malformed."""
    try:
        calls = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    except ValueError:
        return []
    return [(call["name"], json.dumps(call["arguments"])) for call in calls]


def check(read: Callable[[str], list[Call]]) -> None:
    assert read(GOOD) == [{"text": "1 + 1"}]
    assert read(AS_TEXT) == [{"text": "3 + 4"}]
    assert read(BROKEN) == [None]
    assert read(f"{BROKEN}\n{GOOD}") == [None, {"text": "1 + 1"}]
    assert read("No call at all.") == []


def theirs_that_raises(text: str) -> list[Call]:
    bodies = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    return [json.loads(body)["arguments"] for body in bodies]


def theirs_that_drops(text: str) -> list[Call]:
    return [json.loads(arguments) for _, arguments in calls_of_turn(text)]


def ours(text: str) -> list[Call]:
    schemas = [schema("add", "Adds.", {"text": {"type": "string"}})]
    calls: list[ToolCall] = VllmToolParser(schemas, calls_of_turn, FORMS["hermes"]).calls(text)
    assert all("A call looks like this" in call.problem for call in calls if call.problem)
    return [None if call.problem else dict(call.arguments) for call in calls]


@pytest.mark.parametrize("theirs", [theirs_that_raises, theirs_that_drops])
def test_lost_calls_are_caught(theirs: Callable[[str], list[Call]]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(theirs)


def test_each_call_is_answered_here() -> None:
    check(ours)
