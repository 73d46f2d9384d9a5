"""Each of vLLM's parsers with calls that are written wrongly, beside a call that is right."""

import json
import re
from collections.abc import Sequence
from functools import cache

import pytest
from conftest import TINY_MODEL
from malformed_calls import Malformed, malformed_calls

from open_instruct.chat_codec import ChatCodec
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.engines.vllm_tool_parsers import VllmParsers
from open_instruct.environments.base import ToolCall, schema
from open_instruct.workflows.conversations.call_forms import FORMS, CallForm
from open_instruct.workflows.conversations.tool_parsers import VllmToolParser

SCHEMAS = [
    schema(name, "Is there.", {key: {"type": kind}})
    for name, key, kind in (("guess", "number", "integer"), ("check", "number", "integer"), ("note", "text", "string"))
]
RIGHT = ToolCall("check", {"number": 7})
READ_NO_TEXTS = {"cohere_command3", "cohere_command4", "hf", "openai"}
"""Parsers that stand for code of vLLM's server; a run that names one is refused."""
TOKENS = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_call>",
    "</tool_call>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
]
"""Control tokens without which some parsers refuse a tokenizer."""
WIDESPREAD = ("hermes", "qwen3_xml", "llama3_json", "mistral", "pythonic", "deepseek_v3", "xlam")


@cache
def make_parsers() -> VllmParsers:
    tokenizer = read_tokenizer(str(TINY_MODEL), None)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    return VllmParsers(lambda: ChatCodec(tokenizer))


@cache
def make_parser(name: str) -> VllmToolParser:
    return VllmToolParser(SCHEMAS, make_parsers()(name, SCHEMAS), FORMS[name])


def named(names: Sequence[str]) -> list[object]:
    """All names. Those outside the core suite carry the mark for it."""
    return [pytest.param(name, marks=() if name in WIDESPREAD else pytest.mark.extended) for name in names]


def test_every_parser_of_vllm_has_a_form_or_is_refused() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert set(ToolParserManager.list_registered()) == set(FORMS) | READ_NO_TEXTS


@pytest.mark.parametrize("name", named(list(FORMS)))
def test_a_right_call_is_read_alone_and_beside_another(name: str) -> None:
    form, parser = FORMS[name], make_parser(name)
    right = form.example("check", {"number": 7})
    other = form.example("guess", {"number": 50})
    assert parser.calls(form.turn(right)) == [RIGHT]
    assert parser.calls(form.turn(right, other)) == [RIGHT, ToolCall("guess", {"number": 50})]
    assert parser.calls("The number is 7, I am sure.") == []


@pytest.mark.parametrize("name", named(list(FORMS)))
def test_no_call_vanishes_beside_a_malformed_one(name: str) -> None:
    """The right call is carried out, and the malformed one as it was meant or not at all, which the model is told."""
    form = FORMS[name]
    right = form.example("check", {"number": 7})
    wrongly = list(malformed_calls(form))
    assert len(wrongly) >= 8
    for malformed in wrongly:
        if malformed.is_last:
            turns = [form.before + form.between.join([right, malformed.text])]
        else:
            turns = [form.turn(right, malformed.text), form.turn(malformed.text, right)]
        for turn in turns:
            assert mistake_of(make_parser(name).calls(turn), malformed) == "", (malformed.kind, turn)


def mistake_of(calls: list[ToolCall], malformed: Malformed) -> str:
    if calls.count(RIGHT) != 1:
        return f"the right call is not read: {calls}"
    others = [call for call in calls if call != RIGHT]
    if len(others) != 1:
        return f"there should be one other call: {others}"
    [other] = others
    if other.problem:
        is_told = "this call cannot be read" in other.problem and "A call looks like this: " in other.problem
        return "" if is_told and other.text else f"the model learns too little: {other}"
    return "" if (other.name, other.arguments) in malformed.readings else f"it is carried out in another way: {other}"


def first_mark(form: CallForm) -> str:
    """The beginning of a call, as a text may mention it."""
    head = form.call.partition("NAME")[0].partition("{")[0].strip()
    return head or ("guess(50)" if form.syntax == "python" else "")


@pytest.mark.parametrize("name", named(list(FORMS)))
def test_the_beginning_of_a_call_in_arguments_begins_none(name: str) -> None:
    """The call is carried out as vLLM's parser reads it; if that cannot read it, the model is told once."""
    form, parser = FORMS[name], make_parser(name)
    inner = '{"name": "check"}'
    texts = [
        f"what does {first_mark(form)} mean",
        f"{first_mark(form)} {inner} {first_mark(form)} again",
        f"what is {first_mark(form)}",
        first_mark(form),
        inner,
        "check(7)",
    ]
    for arguments in (*({"text": text} for text in texts), {"user": {"name": "guess"}}, {"users": [{"name": "guess"}]}):
        call = form.example("note", arguments)
        read = make_parsers()(name, SCHEMAS)(form.turn(call))
        others = parser.calls(form.turn(call))
        if read and all(is_json(written) for _, written in read):
            assert others == [ToolCall(named, json.loads(written)) for named, written in read], call
        else:
            [other] = others
            assert "this call cannot be read" in other.problem, call
        right = form.example("check", {"number": 7})
        for calls in (parser.calls(form.turn(right, call)), parser.calls(form.turn(call, right))):
            assert len(calls) == 1 + len(others), (call, calls)
            assert calls.count(RIGHT) == 1, (call, calls)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ["granite", "phi4_mini_json", "hermes", "pythonic"])
def test_parsers_that_read_a_mark_in_arguments_are_believed(name: str) -> None:
    form, parser = FORMS[name], make_parser(name)
    for arguments in ({"text": f"what does {first_mark(form)} mean"}, {"user": {"name": "guess"}}):
        assert parser.calls(form.turn(form.example("note", arguments))) == [ToolCall("note", arguments)]


@pytest.mark.parametrize("name", named(list(FORMS)))
def test_an_answer_that_mentions_a_mark_is_an_answer(name: str) -> None:
    form = FORMS[name]
    written = re.search(form.begin.replace("NAMES", "guess"), form.example("guess", {}))
    mark = "guess()" if form.syntax == "python" else "" if not written or "{" in written[0] else written[0]
    for turn in (
        f"The answer is 4 (no {mark} needed).",
        f"I will not write {mark} now.",
        f"I know `{mark}`, and it is 4.",
        f"It is 4. {mark}",
    ):
        assert make_parser(name).calls(turn) == [], turn


def test_what_was_wrong_is_said() -> None:
    calls = make_parser("hermes").calls('<tool_call>\n{"name": "guess", "arguments": {"number": 50}\n</tool_call>')
    [call] = calls
    assert (call.name, call.arguments) == ("guess", {})
    assert call.problem == (
        "this call cannot be read (its JSON is wrong: Expecting ',' delimiter at character 46). A call looks like this: "
        '<tool_call>\n{"name": "guess", "arguments": {"number": "\\u2026"}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("turn", "names"),
    [
        ("<think>I could write <tool_call> here</think>\nNo.", []),
        ("I could write <tool_call> here</think>\nNo.", []),
        ("<think>say <tool_call></think>CALL", ["guess"]),
        ("CALL<think>done</think>", ["guess"]),
        ("<think>I call CALL", ["guess"]),
    ],
)
def test_a_mark_in_thoughts_is_no_call_and_hides_none(turn: str, names: list[str]) -> None:
    call = FORMS["hermes"].example("guess", {"number": 50})
    calls = make_parser("hermes").calls(turn.replace("CALL", call))
    assert [call.name for call in calls] == names
    assert not any(call.problem for call in calls)


def test_an_object_with_a_name_is_no_call_where_calls_have_no_mark() -> None:
    assert make_parser("llama3_json").calls('{"name": "Ada", "age": 36}') == []
    [call] = make_parser("llama3_json").calls("{'name': 'guess', 'parameters': {'number': 50}}")
    assert call.problem
    assert json.loads(FORMS["llama3_json"].example("guess", {"number": 50}))["name"] == "guess"
