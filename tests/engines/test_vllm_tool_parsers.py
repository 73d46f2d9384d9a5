"""vLLM's own parsers of tool calls, as a rollout uses them."""

import asyncio
import json
from concurrent.futures import Future

import numpy as np
import pytest
from conftest import TINY_MODEL

from open_instruct.chat_codec import ChatCodec
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import PromptRequest, SamplingConfig
from open_instruct.engines.vllm_tool_parsers import VllmParsers
from open_instruct.environments.calculator import schema
from open_instruct.workflows.base import RolloutFailed
from open_instruct.workflows.effects import watched
from open_instruct.workflows.runner import EngineContext, EngineFacts, ToolBox

SCHEMAS = [schema("guess", "Guesses a number.", {"number": {"type": "integer", "description": "the number"}})]
CALLS = {
    "hermes": '<tool_call>\n{"name": "guess", "arguments": {"number": 50}}\n</tool_call>',
    "pythonic": "[guess(number=50)]",
    "olmo3": "<function_calls>guess(number=50)</function_calls>",
    "xlam": '[{"name": "guess", "arguments": {"number": 50}}]',
    "granite": '<|tool_call|>[{"name": "guess", "arguments": {"number": 50}}]',
}


@pytest.fixture(scope="module")
def context() -> EngineContext:
    codec = ChatCodec(read_tokenizer(str(TINY_MODEL), None))
    facts = EngineFacts(0, 100, lambda: codec, VllmParsers(lambda: codec))
    request = PromptRequest(np.zeros(1, np.int32), SamplingConfig(max_tokens=9), 0, "train-0", 0)
    return EngineContext(request, facts, lambda *_: Future(), ToolBox({}))


def calls(context: EngineContext, name: str, text: str) -> list[tuple[str, str]]:
    """The calls that a watched rollout finds, in which nothing may draw random numbers."""

    async def rollout() -> list[tuple[str, str]]:
        return context.vllm_parser(name, SCHEMAS)(text)

    async def run() -> list[tuple[str, str]]:
        return await watched(rollout())

    return asyncio.run(run())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_found_in_a_rollout(context: EngineContext, name: str) -> None:
    """Each parser draws an id for the call, and some take an error there for a text without a call."""
    [(tool, arguments)] = calls(context, name, CALLS[name])
    assert (tool, json.loads(arguments)) == ("guess", {"number": 50})
    assert calls(context, name, "Fifty, I guess.") == []


def test_what_is_half_a_call_is_none(context: EngineContext) -> None:
    assert calls(context, "hermes", CALLS["hermes"].replace('"name"', "name")) == []


def test_an_unknown_parser_is_told_with_those_that_there_are(context: EngineContext) -> None:
    with pytest.raises(RolloutFailed, match=r"vLLM has no parser \w+; there are .*vllm_hermes"):
        calls(context, "none", "")


@pytest.mark.parametrize("name", ["openai", "hf", "cohere_command3"])
def test_a_parser_that_reads_no_texts_is_refused(context: EngineContext, name: str) -> None:
    """With it, no conversation would ever have a call."""
    with pytest.raises(RolloutFailed, match=f"vLLM's parser {name} finds no calls in a text"):
        calls(context, name, "")
