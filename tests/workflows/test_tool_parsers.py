"""Calls of tools in open-instruct's own forms."""

from typing import Any

import pytest

from open_instruct.environments.base import schema
from open_instruct.workflows.conversations.tool_parsers import DrTuluParser, LegacyParser


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "12", "12"),
        ("integer", " 12\n", 12),
        ("integer", "12.5", "12.5"),
        ("integer", "true", "true"),
        ("integer", "twelve", "twelve"),
        ("number", "-0.5", -0.5),
        ("number", "3", 3),
        ("boolean", "True", True),
        ("boolean", "1", "1"),
        ("array", "[1, 2]", [1, 2]),
        ("array", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
        ("object", '{"a": 1}', {"a": 1}),
        ("object", "[1]", "[1]"),
        (["integer", "string"], "12", "12"),
    ],
)
def test_text_in_tags_becomes_what_the_first_parameter_is(kind: Any, text: str, value: Any) -> None:
    described = schema("dial", "Dials", {"number": {"type": kind}})
    [call] = LegacyParser([described]).calls(f"<dial>{text}</dial>")
    assert (call.arguments, type(call.arguments["number"])) == ({"number": value}, type(value))
    [call] = DrTuluParser([described]).calls(f'<call_tool name="dial">{text}</call_tool>')
    assert call.arguments == {"number": value}


def test_a_parameter_that_may_be_null_is_read_as_what_it_is_otherwise() -> None:
    either = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    [call] = LegacyParser([schema("dial", "Dials", {"number": either})]).calls("<dial>7</dial>")
    assert call.arguments == {"number": 7}


def test_a_tool_without_parameters_or_a_schema_of_them_gets_text_or_nothing() -> None:
    bare = {
        "type": "function",
        "function": {"name": "look", "description": "Looks", "parameters": {"properties": None}},
    }
    [call] = LegacyParser([bare]).calls("<look>up</look>")
    assert call.arguments == {}
    [call] = DrTuluParser([]).calls('<call_tool name="unknown">12</call_tool>')
    assert call.arguments == {"text": "12"}
