"""Finds tool calls in what a model has said (`--tool_parser_type`).

`legacy` and `dr_tulu` are open-instruct's own forms: a call is a tag, and the answer is written into the model's own turn.
`vllm_<name>` is any parser of vLLM: the answer is a message of its own, in the form of the chat template.

A call that was meant and cannot be read is a call, too: `ToolCall.problem` is what the model is told in place of an answer.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from open_instruct.chat_codec import END_THINK, THINK
from open_instruct.environments.base import Message, Schema, ToolCall, schema_name
from open_instruct.workflows.base import CallParser
from open_instruct.workflows.conversations.call_forms import FORMS, CallForm

VLLM = "vllm_"
OWN_TURN = ("legacy", "dr_tulu")
"""The forms whose answers are written into the model's own turn."""
DEEPEST = 64
"""Most nested levels of lists and objects in a call's arguments, because later code walks them and Python's stack is limited."""
NO_TOOL = "tool"
"""Name of a call that names no tool."""
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
        names = "|".join(re.escape(name) for name in self._parameters) or "(?!)"
        self._tag = re.compile(rf"<({names})>(.*?)</\1>", re.DOTALL)
        self._begin = re.compile(rf"<({names})>")
        self.stop = [f"</{name}>" for name in self._parameters]

    def calls(self, text: str) -> list[ToolCall]:
        matches = list(self._tag.finditer(text))
        calls = [self._call_of(match[1], match[2]) for match in matches]
        rest = text[matches[-1].end() if matches else 0 :].rpartition(END_THINK)[2]
        for beginning in self._begin.finditer(rest):
            if self._is_meant(beginning, rest):
                return [*calls, self._unread(rest[beginning.start() :], beginning[1] if beginning.lastindex else "")]
        return calls

    def _is_meant(self, beginning: re.Match[str], text: str) -> bool:
        """Whether a tag that does not end begins a call: it is closed in another way, begins or ends a line, or has a word
        right behind it. `I do not call <search> now.` only mentions the tag."""
        rest = text[beginning.end() :]
        begins_line = not text[: beginning.start()].rpartition("\n")[2].strip()
        is_closed = any(end in rest for end in self.stop)
        return begins_line or is_closed or not rest.partition("\n")[0].strip() or bool(_CALL_BEHIND_TAG.match(rest))

    def _call_of(self, name: str, text: str) -> ToolCall:
        parameter = self._parameters.get(name, NO_PARAMETER)
        return ToolCall(name, {parameter: _as_kind(text, self._kinds.get(name))} if parameter else {})

    def _unread(self, text: str, name: str) -> ToolCall:
        """A call that was begun and does not end, or whose tag is written in another way."""
        return ToolCall(
            name, problem=f"this call cannot be read. A call looks like this: {self._example(name)}", text=text
        )

    def _example(self, name: str) -> str:
        return f"<{name}>…</{name}>"

    def answer_text(self, messages: Sequence[Message]) -> str:
        return "\n".join(f"<{self.output}>\n{message['content']}\n</{self.output}>\n" for message in messages)


class DrTuluParser(LegacyParser):
    """`<call_tool name="search">query</call_tool>`, as the models of DR Tulu write it."""

    output = "tool_output"

    def __init__(self, schemas: Sequence[Schema]) -> None:
        super().__init__(schemas)
        self._tag = re.compile(r"<call_tool\s+name=\"([^\"]+)\"[^>]*>(.*?)</call_tool>", re.DOTALL)
        self._begin = re.compile(r"<call_tool\b(?:\s*>)?")
        self.stop = ["</call_tool>"]

    def _example(self, name: str) -> str:
        name = name or next(iter(self._parameters), "tool")
        return f'<call_tool name="{name}">…</call_tool>'


class VllmToolParser(ToolParser):
    """One of vLLM's parsers. It gets each call of a turn by itself, because many of them find no call at all if one is malformed.

    Arguments that are the JSON text of an object are that object. Other arguments that are no object, or are nested too deep,
    become the value of the tool's first parameter, so that the tool itself can complain about them.

    Args:
        form: how calls are written; None if that is not known. Then malformed calls are not noticed.
    """

    def __init__(self, schemas: Sequence[Schema], parse: CallParser, form: CallForm | None = None) -> None:
        self._parse = parse
        self._form = form
        self._parameters = {schema_name(described): first_parameter(described) for described in schemas}

    def calls(self, text: str) -> list[ToolCall]:
        spoken = without_thoughts(text)
        pairs = self._parse(spoken)
        form = self._form
        parts = list(form.parts(spoken, self._parameters)) if form else []
        if form is None or not parts:
            calls = [self._call_of(name, payload) for name, payload in pairs]
            has_mark = form is not None and not form.call.startswith("{")
            return [call for call in calls if call.name in self._parameters or call.arguments or not has_mark]
        problems = [form.problem(part) for part in parts]
        if len(pairs) > len(parts) and not any(problems) and not any(_json_problem(payload) for _, payload in pairs):
            return [self._call_of(name, payload) for name, payload in pairs]
        calls = []
        for part, problem in zip(parts, problems, strict=True):
            inside = [] if problem else self._parse(form.turn(part))
            flaw = next((reason for _, payload in inside if (reason := _json_problem(payload))), "")
            if flaw or not inside:
                calls.append(self._unread(part, flaw or problem, inside[0][0] if inside else ""))
            else:
                calls += [self._checked(name, payload, part) for name, payload in inside]
        return calls

    def _checked(self, name: str, payload: str, part: str) -> ToolCall:
        """A call that the parser has found, unless its arguments were lost."""
        assert self._form is not None
        if not json.loads(payload or "{}") and (problem := self._form.lost_arguments(part)):
            return self._unread(part, problem, name)
        return self._call_of(name, payload)

    def _call_of(self, name: str, payload: str) -> ToolCall:
        arguments = _read_json(payload or "{}")
        if isinstance(arguments, str) and isinstance(inner := _read_json(arguments), dict):
            arguments = inner
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            arguments = {self._parameters.get(name, NO_PARAMETER): arguments}
        return ToolCall(name, arguments)

    def _unread(self, part: str, problem: str, name: str = "") -> ToolCall:
        """A call that cannot be read. Its name is that of the tool that it mentions first."""
        assert self._form is not None
        places = {
            candidate: place.start() for candidate in self._parameters if (place := _word(candidate).search(part))
        }
        name = name or min(places, key=lambda candidate: places[candidate], default=NO_TOOL)
        tool = name if name in self._parameters else next(iter(self._parameters), "tool")
        example = self._form.turn(self._form.example(tool, {self._parameters.get(tool, NO_PARAMETER): "…"}))
        why = f" ({problem})" if problem else ""
        return ToolCall(name, problem=f"this call cannot be read{why}. A call looks like this: {example}", text=part)


def without_thoughts(text: str) -> str:
    """What a turn says besides its thoughts. A call is no call while the model thinks about it. Thoughts without an end stay."""
    return _THOUGHTS.sub("", text)


_CALL_BEHIND_TAG = re.compile(r"[-+$\"(\[{]*\w|\s+name\s*=")
"""Follows a tag that begins a call: a word, or the attribute of DR Tulu's tag."""
_THOUGHTS = re.compile(rf"\A(?:(?!{THINK}).)*?{END_THINK}|{THINK}.*?{END_THINK}", re.DOTALL)


def _json_problem(payload: str) -> str:
    """Why arguments that a parser has found cannot be read; empty if they can."""
    try:
        json.loads(payload or "{}")
    except (ValueError, RecursionError) as error:
        return f"its arguments are no JSON: {error}"
    return ""


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")


def _read_json(text: str) -> Any:
    """The JSON value of a text; the text itself if it is no JSON, or nested too deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if _is_deep(value, DEEPEST) else value


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


def tool_parser(kind: str, schemas: Sequence[Schema], vllm_parsers: VllmParsers) -> ToolParser:
    """The parser for `--tool_parser_type kind`."""
    if kind == "legacy":
        return LegacyParser(schemas)
    if kind == "dr_tulu":
        return DrTuluParser(schemas)
    name = kind.removeprefix(VLLM)
    return VllmToolParser(schemas, vllm_parsers(name, schemas), FORMS.get(name))
