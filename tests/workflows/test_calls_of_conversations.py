"""Malformed calls in a conversation: the right ones are answered, and the model sees what is wrong with the others."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import played_policy
import pytest
from played_policy import Say, Stage, closing
from rc_fakes import codec

from open_instruct.environments.base import schema
from open_instruct.workflows.conversations.tool_parsers import DrTuluParser, LegacyParser

MakeTalk = Callable[..., Stage]


def all_or_nothing(_: str, __: Sequence[Mapping[str, Any]]) -> Callable[[str], list[tuple[str, str]]]:
    """A parser that, as vLLM's `hermes`, finds no call if one of several is malformed."""

    def calls(text: str) -> list[tuple[str, str]]:
        try:
            found = [json.loads(body) for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
            return [(call["name"], json.dumps(call["arguments"])) for call in found]
        except (ValueError, KeyError):
            return []

    return calls


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTalk]:
    monkeypatch.setattr(played_policy, "vllm_parser", all_or_nothing)
    with closing(Stage) as make:
        yield make


def turns(*said: str) -> Say:
    spoken: list[str] = []

    def say(*_: Any) -> str:
        spoken.append(said[min(len(spoken), len(said) - 1)])
        return spoken[-1]

    return say


GOOD = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'
BAD = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 2"}</tool_call>'
AS_TEXT = '<tool_call>{"name": "calculator", "arguments": "{\\"expression\\": \\"3 + 4\\"}"}</tool_call>'


def answers(stage: Stage, **settings: Any) -> list[str]:
    """What was inserted as a tool's answer, in order."""
    result = stage.roll_out(max_tokens=1500, **settings)
    assert not result.error
    [sample] = result.samples
    text = codec().decode_all(sample.response_ids.tolist())
    return [part.partition("<|assistant|>")[0] for part in text.split("<|tool|>")[1:]]


def test_a_good_call_is_answered_beside_a_malformed_one(talk: MakeTalk) -> None:
    stage = talk(turns(f"{BAD}\n{GOOD}<end>", "well<end>"), tool_parser_type="vllm_hermes", tools=["calculator"])
    wrong, right = answers(stage)
    assert wrong.startswith("Error: this call cannot be read (its JSON is wrong: ")
    assert right == "2"
    [account] = stage.results[0].notes
    assert account["calls"]["malformed"] == [1.0, 1.0, 0.0]
    assert account["calls"]["calculator"][:2] == [1.0, 0.0]
    assert (account["num_turns"], account["num_steps"], account["ended_by"]) == (2, 2, "answer")


def test_a_malformed_call_alone_is_no_answer(talk: MakeTalk) -> None:
    stage = talk(
        turns(f"{BAD}<end>", f"{GOOD}<end>", "well<end>"), tool_parser_type="vllm_hermes", tools=["calculator"]
    )
    wrong, right = answers(stage)
    assert (wrong.startswith("Error: this call cannot be read"), right) == (True, "2")


def test_arguments_that_are_the_json_text_of_an_object_are_that_object(talk: MakeTalk) -> None:
    stage = talk(turns(f"{AS_TEXT}<end>", "well<end>"), tool_parser_type="vllm_hermes", tools=["calculator"])
    assert answers(stage) == ["7"]


def test_a_conversation_with_a_malformed_call_has_no_good_output(talk: MakeTalk) -> None:
    options = {"tool_parser_type": "vllm_hermes", "tools": ["calculator"], "only_reward_good_outputs": True}
    result = talk(turns(f"{BAD}\n{GOOD}<end>", "well<end>"), **options).roll_out(max_tokens=1500)
    assert [sample.is_judged for sample in result.samples] == [False]


def test_a_tag_that_is_not_closed_is_told_in_the_models_own_turn(talk: MakeTalk) -> None:
    said = ["<calculator>1 + 1<end>", "<calculator>1 + 1</calculator>", "two<end>"]
    result = talk(turns(*said), tools=["calculator"]).roll_out()
    text = codec().decode_all(result.samples[0].response_ids.tolist())
    told = "Error: this call cannot be read. A call looks like this: <calculator>…</calculator>"
    assert text.count(f"<output>\n{told}\n</output>") == 1
    assert "<output>\n2\n</output>" in text


SEARCH = [schema("search", "Searches", {"query": {"type": "string"}})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<search>a</search> and <search>b", [{"query": "a"}, {}]),
        ("<search>a</search> and b", [{"query": "a"}]),
        ("<think>a <search> would do</think> no", []),
        ("<think>a <search>b</search> too", [{"query": "b"}]),
        ("<searching>b", []),
        ("I will not call <search> now.", []),
        ("The tag `<search>` begins a call, (<search>) too.", []),
        ("I know that without <search>.", []),
        ("I do not call <search> now.\n<search> cats", [{}]),
        ("I look it up: <search>", [{}]),
        ('I look it up: <search>"cats"', [{}]),
        ("<think>a <search>b</search> too</think> no", [{"query": "b"}]),
    ],
)
def test_unclosed_tags_are_calls_that_cannot_be_read(text: str, arguments: list[dict[str, Any]]) -> None:
    calls = LegacyParser(SEARCH).calls(text)
    assert [call.arguments for call in calls] == arguments
    assert [bool(call.problem) for call in calls] == [not given for given in arguments]


@pytest.mark.parametrize(
    "text", ["<call_tool name='search'>a</call_tool>", '<call_tool name="search">a', "<call_tool>"]
)
def test_other_spellings_of_dr_tulus_tag_are_told(text: str) -> None:
    assert DrTuluParser(SEARCH).calls("The answer is 4 (no <call_tool> needed).") == []
    [right, wrong] = DrTuluParser(SEARCH).calls(f'<call_tool name="search">a</call_tool> {text}')
    assert right.arguments == {"query": "a"}
    assert wrong.problem == 'this call cannot be read. A call looks like this: <call_tool name="search">…</call_tool>'
