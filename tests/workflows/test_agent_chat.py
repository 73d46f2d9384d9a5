# ruff: noqa: F811 - `stage` is a fixture
"""Agent programs that send messages: one sample as long as the conversation only grows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from played_agents import (  # noqa: F401 - `stage` is a fixture
    MakeStage,
    assert_samples_are_what_the_engine_said,
    notes,
    sampled,
    stage,
    text_of,
)
from played_policy import vllm_parser
from rc_fakes import codec
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_templates import chat_template
from open_instruct.data_types import Completion, SamplingConfig
from open_instruct.workflows.agents.chat import Chat
from open_instruct.workflows.agents.protocol import Refused, chat_request, generate_request
from open_instruct.workflows.conversations.bridge import Bridge

TALK = """
messages = list(ROW["messages"])
for turn in range(3):
    choice = said(chat(messages, max_tokens=40, return_token_ids=True, logprobs=True))
    note(choice=choice)
    messages.append(choice["message"])
    messages.append({"role": "user", "content": "And <|end|> now?"})
"""


def test_a_conversation_by_messages_is_never_tokenized_again(stage: MakeStage, tmp_path: Path) -> None:
    """The played model says words in spellings that a tokenizer would not give back."""
    one = stage(TALK, lambda text, _: f"  turn {text.count('now')}  <|user|>x<end>")
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    assert_samples_are_what_the_engine_said(result, one)
    prompts, completions = one.policy.prompts, one.policy.completions
    for before, after, completion in zip(prompts, prompts[1:], completions, strict=False):
        grown = np.concatenate([before, completion.token_ids])
        assert after[: len(grown)].tolist() == grown.tolist()
    for note, completion in zip(notes(tmp_path), completions, strict=True):
        assert note["choice"]["token_ids"] == completion.token_ids.tolist()
        logprobs = [entry["logprob"] for entry in note["choice"]["logprobs"]["content"]]
        assert logprobs == completion.logprobs.tolist()
    assert text_of(sample).count("<|user|>And <|end|> now?<|assistant|>") == 2
    assert sample.loss_mask is not None
    special = codec().tokenizer.convert_tokens_to_ids("<|end|>")
    assert special not in sample.response_ids[~sample.loss_mask].tolist()  # the user's stays text


def test_a_conversation_that_is_changed_becomes_a_further_sample(stage: MakeStage) -> None:
    program = """
    messages = list(ROW["messages"])
    first = said(chat(messages, max_tokens=40))["message"]
    changed = {**first, "content": first["content"].upper()}
    said(chat([*messages, changed, {"role": "user", "content": "go on"}], max_tokens=40))
    said(chat([*messages, first, {"role": "user", "content": "go on"}], max_tokens=40))
    """
    one = stage(program)
    result = one.roll_out(messages=[{"role": "user", "content": "Say <|user|>!"}])
    assert not result.error
    assert_samples_are_what_the_engine_said(result, one)
    changed, whole = result.samples
    special = codec().tokenizer.convert_tokens_to_ids("<|user|>")
    assert [sample.prompt_ids.tolist().count(special) for sample in result.samples] == [2, 1]  # what is said stays text
    assert "HELLO THERE" in codec().decode_all(changed.prompt_ids.tolist())
    assert text_of(whole) == "hello there<|end|><|user|>go on<|assistant|>hello there<|end|>"


TOOLS = """
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}
messages = list(ROW["messages"])
while True:
    choice = said(chat(messages, tools=[TOOL], max_tokens=60))
    note(choice=choice)
    message = choice["message"]
    messages.append({"role": "assistant", "content": message["content"], "refusal": None, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1)}}
        for call in message.get("tool_calls", [])]})
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        answer = str(sum(int(value) for value in arguments.values()))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
print(json.dumps({"reward": 1.0}))
"""


def test_tool_calls_are_parsed_and_answers_follow_in_the_same_sample(stage: MakeStage, tmp_path: Path) -> None:
    def say(text: str, _: int) -> str:
        return "It is 46.<end>" if "<|tool|>" in text else '<|user|>\nCALL add {"a": 12, "b": 34}<end>'

    one = stage(TOOLS, say, tool_parser_type="vllm_played")
    result = one.roll_out()
    assert not result.error
    [sample] = result.samples
    assert_samples_are_what_the_engine_said(result, one)
    # the control token that the model said is not in the message, which would therefore not give the same tokens again
    assert text_of(sample) == '<|user|>\nCALL add {"a": 12, "b": 34}<|end|><|tool|>46<|assistant|>It is 46.<|end|>'
    first, last = (note["choice"] for note in notes(tmp_path))
    assert (first["finish_reason"], last["finish_reason"]) == ("tool_calls", "stop")
    assert json.loads(first["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 12, "b": 34}
    assert sample.environment_reward == 1.0


def test_answers_to_calls_in_tags_stand_in_the_models_own_turn(stage: MakeStage) -> None:
    one = stage(TOOLS, lambda text, _: "46<end>" if "<output>" in text else "<add>46</add>")
    result = one.roll_out()
    assert not result.error
    assert text_of(result.samples[0]) == "<add>46</add><output>\n46\n</output>\n46<|end|>"
    assert one.policy.samplings[0].stop == ("</add>",)


DROPS_THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_the_template_drops_thoughts_there_is_a_sample_for_each_turn(stage: MakeStage) -> None:
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = DROPS_THOUGHTS
    one = stage(TALK, lambda *_: "<think>hm</think>yes<end>", chat=ChatCodec(tokenizer))
    result = one.roll_out()
    assert not result.error
    assert [sample.goes_on for sample in result.samples] == [True, True, False]
    assert "hm" not in codec().decode_all(result.samples[1].prompt_ids.tolist())
    assert_samples_are_what_the_engine_said(result, one)


@pytest.mark.parametrize(
    ("role", "before"), [("tool", [{"role": "assistant", "content": "<add>46</add>"}]), ("developer", []), ("user", [])]
)
def test_messages_that_the_template_would_leave_out_are_refused(role: str, before: list[dict[str, Any]]) -> None:
    """Tulu's template passes over roles that it does not know, and the model would never see what they say."""
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = chat_template("tulu")
    chat = Chat(ChatCodec(tokenizer), Bridge(ChatCodec(tokenizer)), "legacy", vllm_parser)
    asked = [{"role": "user", "content": "12 + 34?"}, *before, {"role": role, "content": "It is 46."}]
    request = chat_request({"messages": asked}, SamplingConfig(), model="m")
    if role == "user":
        _, token_ids = chat.prompt(request, [])
        assert "It is 46." in codec().decode_all(token_ids)
    else:
        with pytest.raises(Refused, match=f"the chat template leaves out what the role '{role}' says"):
            chat.prompt(request, [])


def test_what_cannot_be_done_is_refused_in_words() -> None:
    sampling = SamplingConfig(temperature=1.0, max_tokens=10)

    def chat_error(**fields: Any) -> str:
        with pytest.raises(Refused) as caught:
            chat_request({"messages": [{"role": "user", "content": "x"}], **fields}, sampling, model="m")
        return str(caught.value)

    def generate_error(**fields: Any) -> str:
        body = {"token_ids": [1], **fields}
        with pytest.raises(Refused) as caught:
            generate_request(body, sampling, model="m", vocab_size=5)
        return str(caught.value)

    assert "stream True: this endpoint can do only False" in chat_error(stream=True)
    assert "this run samples with temperature 1. Leave it out" in chat_error(temperature=0.7)
    assert "n 4: this endpoint can do only 1" in chat_error(n=4)
    assert "reasoning: this endpoint has no such field" in chat_error(reasoning={"effort": "low"})
    assert "neither a text nor a list of parts of text" in chat_error(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    )
    assert "there is no model 'gpt'; the model is m" in chat_error(model="gpt")
    assert "sampling_params.top_k 5" in generate_error(sampling_params={"top_k": 5})
    assert "numbered from 0 to 4" in generate_error(token_ids=[5])
    assert "whole numbers" in generate_error(token_ids=[1.5])
    assert "only the log-prob of the sampled token" in generate_error(sampling_params={"logprobs": 5})
    read = chat_request(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]}
            ],
            "temperature": 1,
            "stream": False,
            "stop": "x",
            "user": "me",
        },
        sampling,
        model="m",
    )
    assert read.messages == [{"role": "user", "content": "ab\ufffd"}]
    assert read.wishes.stop == ("x",)


KEEPS_THOUGHTS_TO_THE_LAST_QUESTION = (  # as Qwen3 has it
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{{ m['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_thoughts_of_an_earlier_turn_are_dropped_though_the_last_turn_has_none(stage: MakeStage) -> None:
    """The first turn thinks and is followed by a tool, the second one does not think and is followed by the user."""
    program = """
    messages = list(ROW["messages"])
    for role, content in (("tool", "2"), ("user", "And now?"), ("user", "And then?")):
        messages.append(said(chat(messages, max_tokens=40))["message"])
        messages.append({"role": role, "content": content})
    said(chat(messages, max_tokens=40))
    """
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = KEEPS_THOUGHTS_TO_THE_LAST_QUESTION
    chat = ChatCodec(tokenizer)
    one = stage(
        program, lambda text, _: "it is 2<end>" if "<|tool|>" in text else "<think>hm</think>add<end>", chat=chat
    )
    result = one.roll_out()
    assert not result.error
    asked = [chat.decode_all(prompt.tolist()) for prompt in one.policy.prompts]
    assert asked[1] == "<|user|>12 + 34 =<|assistant|><think>hm</think>add<|end|><|tool|>2<|assistant|>"
    later = "<|user|>12 + 34 =<|assistant|>add<|end|><|tool|>2<|assistant|>it is 2<|end|><|user|>And now?<|assistant|>"
    assert asked[2] == later
    assert asked[3] == later + "it is 2<|end|><|user|>And then?<|assistant|>"
    assert [sample.goes_on for sample in result.samples] == [True, False]
    assert_samples_are_what_the_engine_said(result, one)


def test_a_call_that_cannot_be_read_is_there_as_it_was_written() -> None:
    """A parser that finds no call at all if one of several is malformed, as vLLM's `hermes`."""

    def parser(_: str, __: object) -> Any:
        def calls(text: str) -> list[tuple[str, str]]:
            try:
                bodies = [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
            except ValueError:
                return []
            return [(body["name"], json.dumps(body["arguments"])) for body in bodies]

        return calls

    chat = Chat(codec(), Bridge(codec()), "vllm_hermes", parser)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    bad = '<tool_call>{"name": "add", "arguments": {"a": 2}</tool_call>'
    ids = np.array(codec().encode(f"{bad}\n{good}"), np.int32)
    completion = Completion(ids, np.zeros(len(ids), np.float32), "stop", [(0, len(ids))])
    message, _ = chat.answered(chat_request(body, SamplingConfig(), model="m"), completion, 7)
    written, read = (call["function"] for call in message["tool_calls"])
    assert (written["name"], written["arguments"]) == ("add", bad)
    assert (read["name"], json.loads(read["arguments"])) == ("add", {"a": 1})
    assert message["content"] == f"{bad}\n{good}"
