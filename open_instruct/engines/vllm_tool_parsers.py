"""vLLM's parsers of tool calls, for workflows (`--tool_parser_type vllm_hermes`)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import load_tokenizer
from open_instruct.option_text import shown
from open_instruct.workflows.base import WORKFLOWS, CallParser, RolloutFailed
from open_instruct.workflows.conversations.tool_parsers import VLLM

logger = logging.getLogger(__name__)


class VllmParsers:
    """Makes parsers by name. Parsers share nothing, because vLLM's parsers keep state from texts that they have parsed."""

    def __init__(self, read_codec: Callable[[], ChatCodec]) -> None:
        self._read_codec = read_codec

    def __call__(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> CallParser:
        """The parser `name` for these tools.

        Raises:
            RolloutFailed: there is no such parser (the message lists the parsers that exist), or it cannot be used here.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        for module in ("vllm.tool_parsers", "vllm.parser"):  # they log a traceback for each call that they cannot read
            logging.getLogger(module).setLevel(logging.CRITICAL)
        try:
            parser_class = ToolParserManager.get_tool_parser(name)
        except KeyError:
            names = ", ".join(f"vllm_{entry}" for entry in ToolParserManager.list_registered())
            raise RolloutFailed(f"vLLM has no parser {name}; there are {names}") from None
        request = ChatCompletionRequest(
            model="", messages=[], tools=list(schemas) or None
        )  # parsers look only at the tools
        tokenizer = self._read_codec().tokenizer
        try:
            parser = parser_class(tokenizer, request.tools)
        except Exception as error:  # most parsers refuse a tokenizer without their control tokens
            raise RolloutFailed(f"vLLM's parser {name} does not go with this tokenizer: {error}") from error
        if not _reads_texts(parser, request):
            raise RolloutFailed(
                f"vLLM's parser {name} finds no calls in a text, because it stands for code of vLLM's server. Choose another"
            )

        def calls(text: str) -> list[tuple[str, str]]:
            try:
                extraction = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
            except Exception as error:  # a model's text may surprise a parser; such a text holds no call
                logger.debug("vllm_%s: %s: %s", name, type(error).__name__, error)
                return []
            return [(call.function.name, call.function.arguments) for call in extraction.tool_calls]

        return calls


def _reads_texts(parser: Any, request: Any) -> bool:
    """Whether the parser finds calls in a text. Some parsers stand for code of vLLM's server and never find any (`openai`,
    `hf`)."""
    try:
        parser.extract_tool_calls("", request)
    except NotImplementedError:
        return False
    except Exception:  # the parser reads texts, but fails on this one
        return True
    return True


def tool_parsers_are_there(args: GRPOConfig) -> list[str]:
    """What is wrong with a tool parser of vLLM that the workflow uses. vLLM is imported only if such a parser was chosen."""
    names = {option.name for option in fields(WORKFLOWS[args.rollout_workflow].options)}
    chosen = {name: getattr(args, name) for name in ("tool_parser_type", "agent_tool_parser_type") if name in names}
    kinds = {name: kind.removeprefix(VLLM) for name, kind in chosen.items() if kind.startswith(VLLM)}
    tokenizer = load_tokenizer(args)[0] if kinds else None
    if tokenizer is None:  # mistakes of the tokenizer are reported with the data
        return []
    parsers = VllmParsers(lambda: ChatCodec(tokenizer))
    problems = []
    for name, parser in kinds.items():
        try:
            parsers(parser, ())
        except RolloutFailed as error:
            problems.append(f"{shown(args, name)}: {str(error).rstrip('.!')}.")
    return problems
