"""How models write calls of tools, for each of vLLM's parsers: where a call begins and ends, and what one looks like.

vLLM's parsers read a whole turn at once, and most of them find no call at all if one of several is malformed. With the form of a
parser a turn is divided, so that each call is read by itself, and a call that cannot be read is noticed and shown to the model.

    text <tool_call>{…}</tool_call> <tool_call>{…</tool_call> text
         └──── one call ──────────┘ └──── malformed ────────┘
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from open_instruct.workflows.conversations.call_extents import end_of_json, end_of_python_call

NAME, ARGUMENTS, KEY, VALUE, TYPE = "NAME", "ARGUMENTS", "KEY", "VALUE", "TYPE"
"""Stand in a form for the parts of a call."""
JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_JSON_BEGIN = r"\{\s*[\"']name[\"']\s*:"
_JSON_BEGIN_KNOWN = rf"{_JSON_BEGIN}\s*[\"'](?:NAMES)[\"']"
_PYTHON_BEGIN = r"(?<![\w.])(?:NAMES)\("


@dataclass(frozen=True)
class CallForm:
    """The form of a call. `NAME`, `ARGUMENTS`, `KEY` and `VALUE` stand for the parts of a call, `NAMES` for all tools' names."""

    call: str
    """A call."""
    begin: str
    """Regular expression of the beginning of a call."""
    end: str = ""
    """The text that ends a call; empty if a call ends with its arguments."""
    before: str = ""
    """The text that must precede the first call."""
    after: tuple[str, ...] = ()
    """The texts that follow the last call, the innermost first."""
    between: str = "\n"
    """The text between two calls."""
    syntax: Literal["json", "python", "tags"] = "json"
    """How arguments are written: as a JSON object, as keyword arguments of Python, or each with tags around it."""
    argument: str = ""
    """One argument, if arguments are written with tags."""
    begins_turn: bool = False
    """Whether calls only count at the beginning of a turn."""

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model should write it."""
        if self.syntax == "json":
            text = json.dumps(arguments)
        elif self.syntax == "python":
            text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        else:
            text = "".join(self._tagged(key, value) for key, value in arguments.items())
        return self.call.replace(NAME, name).replace(ARGUMENTS, text)

    def _tagged(self, key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "number"
        text = value if isinstance(value, str) else json.dumps(value)
        return self.argument.replace(TYPE, kind).replace(KEY, key).replace(VALUE, text)

    def turn(self, *calls: str) -> str:
        """A turn that makes these calls."""
        return self.before + self.between.join(calls) + "".join(self.after)

    def parts(self, text: str, names: Collection[str]) -> Iterator[str]:
        """The parts of a turn that are meant as a call, in order. Each part goes as far as the beginning of the next."""
        if self.begins_turn and not text.lstrip().startswith(self.before):
            return
        begins = self._begins(
            text, "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
        )
        for begin, end in zip(begins, [*begins, len(text)][1:], strict=True):
            yield self._without_after(text[begin:end])

    def _begins(self, text: str, names: str) -> list[int]:
        """Where calls begin. A mark in the arguments of a call begins none, nor does a mark that the model only mentions."""
        marks = list(re.finditer(self.begin.replace("NAMES", names), text))
        spans = [match.span() for match in self._argument().finditer(text)] if self.syntax == "tags" else []
        begins, inside_until = [], 0
        for mark, next_mark in zip(marks, [*marks, None][1:], strict=True):
            within_tags = any(begin < mark.start() < end for begin, end in spans)
            if mark.end() <= inside_until or within_tags or not self._is_meant(mark, text, names):
                continue
            begins.append(mark.start())
            if self.syntax == "python":
                inside_until = end_of_python_call(text, mark.start())
            elif self.syntax == "json":
                brace = text.find("{", mark.start(), next_mark.start() if next_mark else len(text))
                inside_until = end_of_json(text, brace) if brace >= 0 else 0
        return begins

    def _is_meant(self, mark: re.Match[str], text: str, names: str) -> bool:
        """Whether a call follows a mark: a brace, a tag, or the name of a tool. Calls without a mark of their own need the text
        that precedes the first call, or the name of a tool."""
        sign = self.before.rstrip("[")
        if self.syntax == "python":
            return sign in text
        if mark[0].startswith("{"):
            return sign in text or bool(re.match(rf"{_JSON_BEGIN}\s*[\"'](?:{names})[\"']", text[mark.start() :]))
        rest = text[mark.end() :]
        body, _, closed = rest.partition(self.end) if self.end else ("", "", "")
        follows = rf"[\"']\w+[\"']\s*>|\W*(?:{names})(?!\w)|\s*[^\s<>={{\[]*\s*(?:[={{\[]|<(?!/))"
        pattern = r"\{\s*[\"'}]" if self.syntax == "json" else r"</?\w+="
        return bool(re.match(follows, rest) or re.search(pattern, rest) or (closed and re.search(r"\w\(", body)))

    def _argument(self) -> re.Pattern[str]:
        """One argument that is written with tags. A value holds no beginning of another argument, so that an argument that is
        not closed does not reach into the next call. Where the same text begins and ends a value, it holds no end of a call
        instead: the `call:<escape>` in `text:<escape>what is call:<escape>` ends the value and begins none."""
        before, _, after = self.argument.partition(VALUE)
        opening, closing = (
            r"\s*".join(re.escape(piece) for piece in part.split("\n"))
            .replace(KEY, r"[^<>\"\s]+?")
            .replace(TYPE, r"\w+")
            for part in (before, after)
        )
        outside = re.escape(self.end) if before.endswith(after) else opening
        return re.compile(rf"{opening}(?:(?!{outside}).)*?{closing}", re.DOTALL)

    def _without_after(self, part: str) -> str:
        for closing in reversed(self.after):
            head, separator, _ = part.rpartition(closing)
            part = head if separator else part
        return part.rstrip().rstrip(",;").rstrip()

    def problem(self, part: str) -> str:
        """Why a part of a turn is no whole call, although the parser may read it as one; empty if nothing is wrong."""
        if self.syntax == "json":
            return self._json_problem(part)
        if self.syntax == "python" and self.between == "\n" and not _is_python(part.strip().partition("\n")[0]):
            return "it is no call in Python on one line"
        return f"it does not end with {self.end}" if self.end and self.end not in part else ""

    def _json_problem(self, part: str) -> str:
        """Why the first JSON object in a part cannot be read. Line breaks in strings are allowed, because some parsers allow
        them."""
        begin = part.find("{")
        if begin < 0:
            return "it holds no JSON object"
        try:
            json.JSONDecoder(strict=False).raw_decode(part[begin:])
        except json.JSONDecodeError as error:
            return f"its JSON is wrong: {error.msg} at character {error.pos}"
        except RecursionError:
            return "its JSON is nested too deep"
        return ""

    def lost_arguments(self, part: str) -> str:
        """Why a call that the parser reads without arguments is malformed: it has them under another key than the form's."""
        key = re.search(r'"(\w+)": ARGUMENTS', self.call)
        begin = part.find("{")
        if key is None or begin < 0:
            return ""
        value, _ = json.JSONDecoder(strict=False).raw_decode(part[begin:])
        return f"it has no {key[1]!r}" if len(value) > 1 and key[1] not in value else ""


def _is_python(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _tagged(begin: str, end: str) -> CallForm:
    return CallForm(f"{begin}\n{JSON_CALL}\n{end}", re.escape(begin), end)


def _listed(before: str, *after: str, begin: str = _JSON_BEGIN, call: str = JSON_CALL, **options: Any) -> CallForm:
    return CallForm(call, begin, before=before, after=after, between=", ", **options)


def _functions(begin: str, end: str, *, line: str = "\n") -> CallForm:
    """Qwen3-Coder's form."""
    return CallForm(
        f"{begin}\n<function=NAME>\nARGUMENTS</function>\n{end}",
        re.escape(begin),
        "</function>",
        syntax="tags",
        argument=f"<parameter=KEY>{line}VALUE{line}</parameter>\n",
    )


_KEY_AND_VALUE = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"


def _keys(
    begin: str, end: str, *, separator: str = "", argument: str = _KEY_AND_VALUE, before: str = "", after: str = ""
) -> CallForm:
    """GLM's form."""
    return CallForm(
        f"{begin}NAME{separator}ARGUMENTS{end}",
        rf"{re.escape(begin)}",
        end,
        before=before,
        after=(after,) if after else (),
        syntax="tags",
        argument=argument,
    )


def _invokes(tag: str, before: str, after: str, *, kind: str = "") -> CallForm:
    """The form of `<invoke name="…">` with parameters inside. `tag` stands before each name of a tag."""
    return CallForm(
        f'<{tag}invoke name="NAME">\nARGUMENTS</{tag}invoke>',
        rf"<{re.escape(tag)}invoke\b",
        f"</{tag}invoke>",
        before=f"{before}\n",
        after=(f"\n{after}",),
        syntax="tags",
        argument=f'<{tag}parameter name="KEY"{kind}>VALUE</{tag}parameter>\n',
    )


def _calls_in_python(before: str, *after: str, **options: Any) -> CallForm:
    return CallForm(
        "NAME(ARGUMENTS)", _PYTHON_BEGIN, before=before, after=after, between=", ", syntax="python", **options
    )


def _deepseek(call: str) -> CallForm:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    before, after = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return CallForm(f"{begin}{call}{end}", begin, end, before=before, after=(after,), between="")


_TOOL_CALL = _tagged("<tool_call>", "</tool_call>")
_QWEN = _functions("<tool_call>", "</tool_call>")
_COMPACT = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
_GLM = _keys("<tool_call>", "</tool_call>")
_PLAMO = "<|plamo:{}:plamo|>"
_MINIMAX = "]<]minimax[>["
_LLAMA = _listed("", begin=_JSON_BEGIN_KNOWN)
_HUNYUAN = _listed("<tool_calls>[", "]", "</tool_calls>")

FORMS: dict[str, CallForm] = {
    "apertus": _listed(
        "<|tools_prefix|>[",
        "]",
        "<|tools_suffix|>",
        call='{"NAME": ARGUMENTS}',
        begin=r"\{\s*[\"'](?:NAMES)[\"']\s*:",
    ),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"),
    "deepseek_v31": _deepseek("NAME<｜tool▁sep｜>ARGUMENTS"),
    "deepseek_v32": _invokes(
        "｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", kind=' string="true"'
    ),
    "deepseek_v4": _invokes("｜DSML｜", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", kind=' string="true"'),
    "deepseek_v41": _invokes("｜DSML｜ ", "<｜DSML｜ calls>", "</｜DSML｜ calls>", kind=' string="true"'),
    "dots": _invokes("", "<dots_function_call>", "</dots_function_call>"),
    "ernie45": _TOOL_CALL,
    "functiongemma": CallForm(
        "<start_function_call>call:NAME{ARGUMENTS}<end_function_call>",
        "<start_function_call>",
        "<end_function_call>",
        between="",
        syntax="tags",
        argument="KEY:<escape>VALUE<escape>",
    ),
    "gemma4": CallForm(
        "<|tool_call>call:NAME{ARGUMENTS}<tool_call|>",
        re.escape("<|tool_call>"),
        "<tool_call|>",
        between="",
        syntax="tags",
        argument='KEY:<|"|>VALUE<|"|>',
    ),
    "gigachat3": CallForm(f"<|function_call|>{JSON_CALL}", r"function call<\|role_sep\|>\n|<\|function_call\|>"),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": _listed("<|tool_call|>[", "]"),
    "granite-20b-fc": CallForm(f"<function_call> {JSON_CALL}", "<function_call>"),
    "granite4": _TOOL_CALL,
    "hermes": _TOOL_CALL,
    "hunyuan_a13b": _HUNYUAN,
    "hy_v3": _keys("<tool_call>", "</tool_call>", separator="<tool_sep>", before="<tool_calls>", after="</tool_calls>"),
    "hy_v4": _keys("<tool_call>", "</tool_call>", before="<tool_calls>", after="</tool_calls>", argument=_COMPACT),
    "inkling": CallForm(
        '<|content_invoke_tool_json|>{"name": "NAME", "args": ARGUMENTS}<|end_message|>',
        re.escape("<|content_invoke_tool_json|>"),
        "<|end_message|>",
        between="<|message_model|>",
        before="<|message_model|>",
    ),
    "internlm": CallForm(
        '<|action_start|><|plugin|>{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>',
        re.escape("<|action_start|><|plugin|>"),
        "<|action_end|>",
    ),
    "jamba": _HUNYUAN,
    "k2_horizon": _keys(
        "<ifm|tool_call>",
        "</ifm|tool_call>",
        before="<ifm|tool_calls>",
        after="</ifm|tool_calls>",
        argument=_COMPACT.replace("<", "<ifm|").replace("<ifm|/", "</ifm|"),
    ),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        re.escape("<|tool_call_begin|>"),
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after=("<|tool_calls_section_end|>",),
        between="",
    ),
    "kimi_k3": CallForm(
        '<|open|>call tool="NAME" index="0"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        r"<\|open\|>\s*call\b",
        "<|close|>call<|sep|>",
        before="<|open|>tools<|sep|>",
        after=("<|close|>tools<|sep|>",),
        syntax="tags",
        argument='<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
    ),
    "lfm2": _calls_in_python("<|tool_call_start|>[", "]", "<|tool_call_end|>"),
    "ling3": _GLM,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _calls_in_python("[", "]", begins_turn=True),
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": _functions("<tool_call>", "</tool_call>", line=""),
    "minicpm5": CallForm(
        '<function name="NAME">ARGUMENTS</function>',
        r"<function\s*name=",
        "</function>",
        syntax="tags",
        argument='<param name="KEY">VALUE</param>',
    ),
    "minimax_m2": _invokes("", "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax_m3": CallForm(
        f'{_MINIMAX}<invoke name="NAME">\nARGUMENTS{_MINIMAX}</invoke>',
        re.escape(f"{_MINIMAX}<invoke"),
        f"{_MINIMAX}</invoke>",
        before=f"{_MINIMAX}<tool_call>\n",
        after=(f"\n{_MINIMAX}</tool_call>",),
        syntax="tags",
        argument=f"{_MINIMAX}<KEY>VALUE{_MINIMAX}</KEY>\n",
    ),
    "mistral": CallForm("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", r"\[TOOL_CALLS\]", between=""),
    "muse_glimmer": CallForm(
        '<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>',
        r"<atem:invoke\b",
        "</atem:invoke>",
        before="<atem:function_calls>\n",
        after=("\n</atem:function_calls>",),
        syntax="tags",
        argument='<atem:parameter name="KEY">VALUE</atem:parameter>\n',
    ),
    "olmo3": CallForm(
        "NAME(ARGUMENTS)", _PYTHON_BEGIN, before="<function_calls>", after=("</function_calls>",), syntax="python"
    ),
    "phi4_mini_json": _listed("functools[", "]"),
    "plamo3": CallForm(
        _PLAMO.format("begin_tool_request")
        + _PLAMO.format("begin_tool_name")
        + NAME
        + _PLAMO.format("end_tool_name")
        + _PLAMO.format("begin_tool_arguments")
        + "<|plamo:constrain|>json<|plamo:msg|>"
        + ARGUMENTS
        + _PLAMO.format("end_tool_arguments")
        + _PLAMO.format("end_tool_request"),
        re.escape(_PLAMO.format("begin_tool_request")),
        _PLAMO.format("end_tool_request"),
        before=_PLAMO.format("begin_tool_requests"),
        after=(_PLAMO.format("end_tool_requests"),),
        between="",
    ),
    "poolside_v1": _keys("<tool_call>", "</tool_call>", separator="\n"),
    "pythonic": _calls_in_python("[", "]", begins_turn=True),
    "qwen3_coder": _QWEN,
    "qwen3_json": _TOOL_CALL,
    "qwen3_xml": _QWEN,
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>", line=""),
    "step3": CallForm(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">ARGUMENTS</steptml:invoke><｜tool_call_end｜>',
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        before="<｜tool_calls_begin｜>",
        after=("<｜tool_calls_end｜>",),
        syntax="tags",
        argument='<steptml:parameter name="KEY">VALUE</steptml:parameter>',
    ),
    "step3p5": _QWEN,
    "xlam": _listed("[", "]", begin=_JSON_BEGIN_KNOWN),
}
"""The forms by the name of vLLM's parser."""
