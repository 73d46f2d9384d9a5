"""vLLM's parsers of tool calls, for workflows (`--tool_parser_type vllm_hermes`)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.workflows.base import CallParser, RolloutFailed

logger = logging.getLogger(__name__)


class VllmParsers:
    """Makes parsers by name. They share nothing, because vLLM's parsers keep what they have parsed."""

    def __init__(self, read_codec: Callable[[], ChatCodec]) -> None:
        self._read_codec = read_codec

    def __call__(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> CallParser:
        """The parser `name` for these tools.

        Raises:
            RolloutFailed: there is none; the text names those that there are.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            parser_class = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = ", ".join(f"vllm_{one}" for one in ToolParserManager.list_registered())
            raise RolloutFailed(f"vLLM has no parser {name}; there are {known}") from None
        request = ChatCompletionRequest(
            model="", messages=[], tools=list(schemas) or None
        )  # parsers look at tools alone
        tokenizer = self._read_codec().tokenizer
        try:
            parser_class(tokenizer, request.tools)
        except Exception as error:  # most parsers refuse a tokenizer without their control tokens
            raise RolloutFailed(f"vLLM's parser {name} does not go with this tokenizer: {error}") from error

        def calls(text: str) -> list[tuple[str, str]]:
            try:
                found = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
            except Exception as error:  # what a model wrote may surprise a parser: then there is no call in it
                logger.debug("vllm_%s: %s: %s", name, type(error).__name__, error)
                return []
            return [(call.function.name, call.function.arguments) for call in found.tool_calls]

        return calls
