# ruff: noqa: F811 - `stage` is a fixture
"""What programs ask of the endpoint: wrong values, stop strings, and rewards that are none."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_agents import MakeStage, notes, stage  # noqa: F401 - `stage` is a fixture
from played_policy import vllm_parser
from rc_fakes import codec
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion, SamplingConfig
from open_instruct.workflows.agents.chat import Chat, cut_at
from open_instruct.workflows.agents.protocol import Refused, chat_request, generate_request
from open_instruct.workflows.agents.rollout import cut_behind, verdict_of
from open_instruct.workflows.base import CallParser
from open_instruct.workflows.conversations.bridge import Bridge
from open_instruct.workflows.conversations.tool_parsers import VllmToolParser, first_parameter
from open_instruct.workflows.runner import MOST_ERRORS_IN_A_ROW

SAMPLING = SamplingConfig(temperature=1.0, max_tokens=10)
USER = {"role": "user", "content": "x"}


# --- stop strings -----------------------------------------------------------------------------------------------------

REACT = """
messages = list(ROW["messages"])
fields = {"stop": ["Observation:", "Never"], "max_tokens": 60, **FIELDS}
for turn in range(3):
    choice = said(chat(messages, return_token_ids=True, **fields))
    note(choice=choice)
    messages.append({"role": "assistant", "content": choice["message"]["content"] + BEHIND})
    messages.append({"role": "user", "content": "Observation: 46"})
"""


def react(behind: str = "", **fields: Any) -> str:
    return f"FIELDS, BEHIND = {fields!r}, {behind!r}\n{REACT}"


def says_one_token_too_much(text: str, _: int) -> str:
    return f"Action: add {text.count('Action')}\nObservation: "


@pytest.mark.parametrize(
    ("program", "end"),
    [
        (react(), ""),
        (react("Observation:"), ""),
        (react("Observation: "), ""),
        (react(include_stop_str_in_output=True), "Observation:"),
        (react(include_stop_str_in_output=False), ""),
        (react(include_stop_str_in_output=None), ""),
    ],
)
def test_a_stop_string_is_in_the_tokens_and_not_in_the_message(
    stage: MakeStage, tmp_path: Path, program: str, end: str
) -> None:
    """Whichever text the program sends back, the conversation goes on in the same sample."""
    one = stage(program, says_one_token_too_much)
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    choices = [note["choice"] for note in notes(tmp_path)]
    assert [choice["message"]["content"] for choice in choices] == [f"Action: add {n}\n{end}" for n in range(3)]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    completions = [completion.token_ids.tolist() for completion in one.policy.completions]
    assert [choice["token_ids"] for choice in choices] == completions
    assert sample.loss_mask is not None
    assert sample.response_ids[sample.loss_mask].tolist() == [token_id for said in completions for token_id in said]


def test_a_message_rendered_anew_is_as_the_program_has_it(stage: MakeStage) -> None:
    program = """
    first = said(chat(ROW["messages"], stop=["STOP"], max_tokens=60))["message"]
    said(chat([{"role": "user", "content": "other"}, first, {"role": "user", "content": "go on"}], max_tokens=60))
    """
    one = stage(program, lambda text, _: "yes<end>" if "other" in text else "<|user|>no STOP")
    result = one.roll_out()
    assert not result.error
    prompt = codec().decode_all(one.policy.prompts[1].tolist())
    assert "<|user|>no <|end|>" in prompt
    assert "STOP" not in prompt


def test_a_stop_token_is_not_in_the_message_either(stage: MakeStage, tmp_path: Path) -> None:
    end = codec().encode_continued("!")[-1]
    program = f"""
    for fields in ({{}}, {{"include_stop_str_in_output": True}}):
        note(content=said(chat(ROW["messages"], stop_token_ids=[{end}], max_tokens=60, **fields))["message"]["content"])
    """
    assert not stage(program, lambda *_: "well!").roll_out().error
    assert [note["content"] for note in notes(tmp_path)] == ["well", "well!"]


def test_a_text_is_cut_where_the_engine_stopped() -> None:
    assert cut_at("one two three", ("three", "two"), keeps=False) == "one "
    assert cut_at("one two three", ("three", "two"), keeps=True) == "one two"
    assert cut_at("one two", ("ne two", "two"), keeps=False) == "o"  # both end there; the first that was asked for
    assert cut_at("one two", ("wo", "n", "one two three"), keeps=False) == "o"
    assert cut_at("one", ("x",), keeps=False) == "one"


def test_the_sample_whose_turn_was_called_so_goes_on(stage: MakeStage) -> None:
    """Two samples whose turns differ in the stop string alone: each goes on by the text that the program got."""
    program = """
    cut = said(chat(ROW["messages"], stop=["STOP"], max_tokens=60))["message"]
    whole = said(chat(ROW["messages"], max_tokens=60))["message"]
    assert (cut["content"], whole["content"]) == ("no ", "no STOP"), (cut, whole)
    for message in (whole, cut):
        said(chat([*ROW["messages"], message, {"role": "user", "content": "next"}], max_tokens=60))
    """
    one = stage(
        program, lambda text, _: "fine<end>" if "next" in text else "no STOP<end>" if one.policy.prompts else "no STOP"
    )
    result = one.roll_out()
    assert not result.error
    assert len(result.samples) == 2
    ended_alone, stopped = (prompt.tolist() for prompt in one.policy.prompts[2:])
    first, second = (completion.token_ids.tolist() for completion in one.policy.completions[:2])
    begins = one.policy.prompts[0].tolist()
    assert ended_alone[: len(begins) + len(second)] == begins + second
    assert stopped[: len(begins) + len(first)] == begins + first


# --- wrong values -----------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": None}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "x", "name": "me"},
        {"role": "assistant", "content": "y", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "stop": ["x"],
    "stop_token_ids": [3],
    "seed": 1,
    "n": 1,
    "logprobs": True,
    "return_token_ids": True,
    "include_stop_str_in_output": False,
    "response_format": {"type": "text"},
    "stream": False,
}
GENERATE = {
    "model": "m",
    "token_ids": [1, 2],
    "sampling_params": {
        "max_tokens": 5,
        "temperature": 1.0,
        "stop": "x",
        "stop_token_ids": [1],
        "seed": 1,
        "logprobs": 1,
    },
    "return_token_ids": True,
}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


WRONG = [
    *(None, True, False, 0, -1, 1, 1.5, 10**400, float("nan"), float("inf"), "", "x", "\ud800", '{"a": "\\ud800"}'),
    *([], [1], [None], [[]], [{}], ["\ud800"], {}, {"a": 1}, {"a": None}, {"\ud800": "\ud800"}, {"type": "text"}),
    *(nested(60), nested(300), nested(900), {"a": nested(300)}, json.dumps(nested(60)), json.dumps(nested(300))),
    *(
        "9" * 5000,
        ["required"],
        {"required": 1, "properties": 1},
        [TOOL, None],
        [10**30],
        [-1],
        json.dumps(nested(900)),
    ),
]


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (key,)
        yield from ((key, *path) for path in places(inner))


def changed(body: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    result = copy.deepcopy(body)
    at = result
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = wrong
    return result


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{{ tool.function.parameters }}{% endfor %}{% endif %}"
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = ChatCodec(tokenizer)
    return [Chat(chat, Bridge(chat), kind, vllm_parser) for kind in ("legacy", "dr_tulu", "vllm_played")]


def test_whatever_stands_in_a_request_for_messages_it_is_refused_or_read(chats: list[Chat]) -> None:
    said = Completion(np.array(codec().encode("<add>1</add>"), np.int32), np.zeros(1, np.float32), "stop", [(0, 1)])

    def answer(body: Any) -> None:
        request = chat_request(body, SAMPLING, model="m")
        for chat in chats:
            chat.stop(request)
            chat.prompt(request, [])
            _, talk = chat.answered(request, said, 0)
            chat.prompt(chat_request({**CHAT, "messages": [*talk.messages, USER]}, SAMPLING, model="m"), [])

    statuses = outcomes(answer, CHAT)
    assert set(statuses) == {200, 400, 404}
    assert min(statuses[200], statuses[400]) > 300


def outcomes(answer: Callable[[Any], None], body: dict[str, Any]) -> Counter[int]:
    """How often there was which status, with each wrong value in each place of the body."""
    statuses: Counter[int] = Counter()
    for path in places(body):
        for wrong in WRONG:
            try:
                answer(json.loads(json.dumps(changed(body, path, wrong))))
                statuses[200] += 1
            except Refused as error:
                json.dumps(str(error))
                statuses[error.status] += 1
    return statuses


def test_whatever_stands_in_a_request_for_tokens_it_is_refused_or_read() -> None:
    said = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", [(0, 1)])

    def answer(body: Any) -> None:
        request = generate_request(body, SAMPLING, model="m", vocab_size=5)
        cut_behind(said, request.wishes.stop_token_ids)

    assert set(outcomes(answer, GENERATE)) == {200, 400, 404}


@pytest.mark.parametrize("body", WRONG)
def test_a_body_that_is_no_request_is_refused(body: Any) -> None:
    with pytest.raises(Refused):
        chat_request(body, SAMPLING, model="m")
    with pytest.raises(Refused):
        generate_request(body, SAMPLING, model="m", vocab_size=5)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}]}, "calls of functions"),
        ({"messages": [{"role": "tool", "tool_call_id": ["c"], "content": "1"}]}, "tool_call_id must be a text"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "parameters of f"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": "a"}}}]}, "required"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]}, "properties"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools must be a list of"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"temperature": 10**400}, "this run samples with temperature 1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"metadata": nested(900)}, "nested"),
    ],
)
def test_a_wrong_value_is_refused_in_words(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=told):
        chat_request({"messages": [USER], **fields}, SAMPLING, model="m")


def test_null_is_as_good_as_absent() -> None:
    """As models of pydantic write what is not set."""
    parameters = {"type": "object", "properties": None, "required": None}
    function = {"name": "f", "description": None, "parameters": parameters, "strict": None}
    absent = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    nothing = dict.fromkeys(CHAT, None)
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": None, "name": None, "audio": None}]
    given = {**nothing, "model": "m", "messages": messages, "tools": [{"type": "function", "function": function}]}
    request = chat_request(given, SAMPLING, model="m")
    assert request.tools == [absent]
    assert request.messages == [USER, {"role": "assistant", "content": ""}]
    assert first_parameter(absent) == first_parameter({"type": "function", "function": function}) == "text"


def test_tools_that_a_parser_refuses_are_refused() -> None:
    def refuses(name: str, _: Any) -> CallParser:
        raise ValueError("1 validation error")

    chat = Chat(codec(), Bridge(codec()), "vllm_played", refuses)
    request = chat_request({"messages": [USER], "tools": [TOOL]}, SAMPLING, model="m")
    with pytest.raises(Refused, match="tools: 1 validation error"):
        chat.stop(request)


def test_arguments_nested_too_deep_are_a_text() -> None:
    """What a model writes goes through parts that walk through it level by level."""
    written = "[" * 500 + "]" * 500
    [call] = VllmToolParser([TOOL], lambda _: [("add", written)]).calls("")
    assert call.arguments == {"a": written}


def test_wrong_requests_cost_no_rollout(stage: MakeStage, tmp_path: Path) -> None:
    program = """
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": None}}}
    note(status=chat(ROW["messages"], tools=[tool], max_tokens=20)[0])
    note(status=chat([{"role": "assistant", "tool_calls": 1}], max_tokens=20)[0])
    """
    one = stage(program)
    for _ in range(MOST_ERRORS_IN_A_ROW + 1):
        assert not one.roll_out().error
    assert [note["status"] for note in notes(tmp_path)] == [200, 400] * (MOST_ERRORS_IN_A_ROW + 1)


# --- rewards ----------------------------------------------------------------------------------------------------------

HUGE = "1" + "0" * 400


def test_a_number_that_no_float_holds_is_no_reward() -> None:
    for reward in (HUGE, f"-{HUGE}", "1e999", "NaN", "true", '"1"', "[1]", "{}", "null"):
        verdict = verdict_of(f'{{"reward": {reward}, "metrics": {{"a": {reward}, "b": 1}}}}')
        assert verdict is not None
        assert (verdict.reward, verdict.metrics) == (None, {"b": 1.0})
    assert verdict_of(f'{{"reward": {"9" * 5000}}}') is None  # Python reads no such number


def test_a_nonsense_reward_is_a_failure_of_the_program(stage: MakeStage) -> None:
    program = f"said(generate(ROW['prompt_token_ids'], max_tokens=20))\nprint('{{\"reward\": {HUGE}}}')"
    assert "--agent_prints_reward" in stage(program, prints_reward=True).roll_out().error
    [sample] = stage(program).roll_out().samples
    assert sample.environment_reward is None
