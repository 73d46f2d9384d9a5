"""Finds tool calls in what a model has said (`--tool_parser_type`).

`legacy` and `dr_tulu` are open-instruct's own forms: a call is a tag, and the answer is written into the model's own turn.
`vllm_<name>` is any parser of vLLM: the answer is a message of its own, in the form of the chat template.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from open_instruct.environments.base import Message, Schema, ToolCall, schema_name
from open_instruct.workflows.base import CallParser

VLLM = "vllm_"
OWN_TURN = ("legacy", "dr_tulu")
"""The forms whose answers are written into the model's own turn."""
DEEPEST = 64
"""Most nested levels of lists and objects in a call's arguments, because later code walks them and Python's stack is limited."""
NO_PARAMETER = "text"
"""Name of the argument if the tool names no parameter, or is not known."""
VllmParsers = Callable[[str, Sequence[Schema]], CallParser]
"""Makes one of vLLM's parsers from the parser's name and the tools."""


class ToolParser(ABC):
    """Finds calls in a turn."""

    in_own_turn: ClassVar[bool] = False
    """Whether answers are written into the model's own turn, which then goes on."""
    stop: Sequence[str] = ()
    """Strings after which the model stops and waits for an answer."""

    @abstractmethod
    def calls(self, text: str) -> list[ToolCall]:
        """The calls in a turn, in order. `text` includes special tokens, except the one that ended the turn."""

    def answer_text(self, messages: Sequence[Message]) -> str:
        """The text of the answers, which is written into the model's own turn."""
        raise NotImplementedError


class LegacyParser(ToolParser):
    """`<search>query</search>`: the text between a tool's tags is the first parameter that the tool needs, converted to the type
    in the tool's schema, such as a number. A tool without parameters gets no argument."""

    in_own_turn = True
    output = "output"

    def __init__(self, schemas: Sequence[Schema]) -> None:
        self._parameters = {schema_name(described): first_parameter(described, "") for described in schemas}
        self._kinds = {schema_name(described): _kind_of_first(described) for described in schemas}
        names = "|".join(re.escape(name) for name in self._parameters)
        self._tag = re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL) if names else None
        self.stop = [f"</{name}>" for name in self._parameters]

    def calls(self, text: str) -> list[ToolCall]:
        found = self._tag.finditer(text) if self._tag else ()
        return [self._call_of(match[1], match[2]) for match in found]

    def _call_of(self, name: str, text: str) -> ToolCall:
        parameter = self._parameters.get(name, NO_PARAMETER)
        return ToolCall(name, {parameter: _as_kind(text, self._kinds.get(name))} if parameter else {})

    def answer_text(self, messages: Sequence[Message]) -> str:
        return "\n".join(f"<{self.output}>\n{message['content']}\n</{self.output}>\n" for message in messages)


class DrTuluParser(LegacyParser):
    """`<call_tool name="search">query</call_tool>`, as the models of DR Tulu write it."""

    output = "tool_output"
    _call = re.compile(r"<call_tool\s+name=\"([^\"]+)\"[^>]*>(.*?)</call_tool>", re.DOTALL)

    def __init__(self, schemas: Sequence[Schema]) -> None:
        super().__init__(schemas)
        self.stop = ["</call_tool>"]

    def calls(self, text: str) -> list[ToolCall]:
        return [self._call_of(match[1], match[2]) for match in self._call.finditer(text)]


class VllmToolParser(ToolParser):
    """One of vLLM's parsers. Arguments that are not a JSON object, or are nested too deep, become the value of the tool's first
    parameter, so that the tool itself can complain about them."""

    def __init__(self, schemas: Sequence[Schema], parse: CallParser) -> None:
        self._parse = parse
        self._parameters = {schema_name(described): first_parameter(described) for described in schemas}

    def calls(self, text: str) -> list[ToolCall]:
        found = []
        for name, written in self._parse(text):
            try:
                arguments: Any = json.loads(written or "{}")
            except (ValueError, RecursionError):
                arguments = written
            if _is_deep(arguments, DEEPEST):
                arguments = written
            if not isinstance(arguments, dict):
                arguments = {self._parameters.get(name, NO_PARAMETER): arguments}
            found.append(ToolCall(name, arguments))
        return found


def first_parameter(described: Schema, default: str = NO_PARAMETER) -> str:
    """The first parameter that a tool needs, or `default` if it has none."""
    parameters = described["function"].get("parameters") or {}
    required, properties = (
        parameters.get(name) or () for name in ("required", "properties")
    )  # pydantic writes null for an absent list
    return str(next(iter([*required, *properties]), default))


_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""JSON schema's names for types that are not written as text."""


def _kind_of_first(described: Schema) -> str | None:
    """JSON schema type of the first parameter that a tool needs; None if the parameter may have several types."""
    properties = (described["function"].get("parameters") or {}).get("properties") or {}
    schema = properties.get(first_parameter(described)) or {}
    kinds = {str(choice.get("type")) for choice in schema.get("anyOf") or [schema]} - {"null"}
    return kinds.pop() if len(kinds) == 1 else None


def _as_kind(text: str, kind: str | None) -> Any:
    """The text of a call in the type that the tool expects: the integer 12 for the text `12`. A text that cannot be converted
    stays text, so that the tool itself can complain about it."""
    if kind not in _KINDS:
        return text
    try:
        value = json.loads(text.lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
    fits = isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")
    return value if fits and not _is_deep(value, DEEPEST) else text


def _is_deep(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deep(inner, levels - 1) for inner in inside)


def tool_parser(kind: str, schemas: Sequence[Schema], of_vllm: VllmParsers) -> ToolParser:
    """The parser for `--tool_parser_type kind`."""
    if kind == "legacy":
        return LegacyParser(schemas)
    if kind == "dr_tulu":
        return DrTuluParser(schemas)
    return VllmToolParser(schemas, of_vllm(kind.removeprefix(VLLM), schemas))
