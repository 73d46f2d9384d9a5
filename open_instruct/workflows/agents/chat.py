"""From messages to token ids and back, for `/v1/chat/completions`. As long as a conversation only grows, what the model has said
is never tokenized again."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.data_types import Completion
from open_instruct.environments.base import ToolCall
from open_instruct.workflows.agents.branches import Branch, Talk
from open_instruct.workflows.agents.protocol import ChatRequest, Refused, Wishes, cleaned
from open_instruct.workflows.conversations.bridge import MAY_BE_LEFT_OUT, Bridge, CannotBridge, is_shown
from open_instruct.workflows.conversations.tool_parsers import ToolParser, VllmParsers, tool_parser

Message = dict[str, Any]


class Chat:
    """The messages of one rollout.

    Args:
        parser_type: how the model writes calls (`--agent_tool_parser_type`).
        of_vllm: makes vLLM's parsers.
    """

    def __init__(self, codec: ChatCodec, bridge: Bridge, parser_type: str, vllm_parsers: VllmParsers) -> None:
        self._codec = codec
        self._bridge = bridge
        self._parser_type = parser_type
        self._vllm_parsers = vllm_parsers
        self._parsers: dict[str, ToolParser] = {}
        self._said: dict[str, str] = {}
        """Maps the key of a message, in any of its wordings, to the model's turn with control tokens."""
        self._wordings: dict[str, set[str]] = {}
        """Maps the key of a message, as the program received it, to the keys of all its wordings."""

    def prompt(self, request: ChatRequest, branches: Sequence[Branch]) -> tuple[Branch | None, list[int]]:
        """The sample that a request continues, and its token ids. The sample is None if all messages are rendered again.

        Raises:
            Refused: the chat template refuses the messages, or leaves some out.
        """
        if (branch := self._going_on(request, branches)) is not None:
            assert branch.talk is not None
            additions = request.messages[len(branch.talk.messages) :]
            suffix = self._suffix(branch.talk, additions, request)
            if suffix is not None:
                return branch, [*branch.ledger.token_ids.tolist(), *suffix]
        return None, self._rendered(request)

    def stop(self, request: ChatRequest) -> Sequence[str]:
        """Texts after which the model waits for the answer to a tool call."""
        return self._parser(request.tools).stop if self._parses(request) else ()

    def answered(self, request: ChatRequest, completion: Completion, number: int) -> tuple[Message, Talk]:
        """What the model said, as a message for the program, and the conversation including this message."""
        token_ids = completion.token_ids.tolist()
        turn = self._bridge.read_turn(token_ids)
        raw = turn.raw
        if turn.ending:
            token_ids.pop()
        wordings = self._wordings_of(token_ids, request.wishes)
        message: Message = {"role": "assistant", "content": next(iter(wordings))}
        calls = self._parser(request.tools).calls(raw) if self._parses(request) else []
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{position}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": _written_arguments(call)},
                }
                for position, call in enumerate(calls)
            ]
        self._remember(message, wordings)
        return message, Talk([*request.messages, message], request.tools, turn.ending)

    def spellings(self, completion: Completion) -> list[str]:
        return [self._codec.decode_all([token_id]) for token_id in completion.token_ids.tolist()]

    def _wordings_of(self, token_ids: list[int], wishes: Wishes) -> dict[str, str]:
        """The texts under which a program may send the model's turn back, each mapped to the same text with control tokens.

        The program receives the first text. It lacks the stop string or stop token unless the program asked for it. The other
        texts include it, or everything that the last token holds.
        """
        stopped = bool(token_ids) and token_ids[-1] in wishes.stop_token_ids
        cuts = [(token_ids[:-1] if stopped else token_ids, False), (token_ids, True)]
        wordings = {}
        for ids, keeps in sorted(cuts, key=lambda cut: cut[1] != wishes.keeps_stop):
            text, raw = self._cut(ids, wishes.stop, keeps=keeps)
            wordings[text] = raw
        return wordings | {self._codec.decode(token_ids): self._codec.decode_all(token_ids)}

    def _cut(self, token_ids: list[int], stop: Sequence[str], *, keeps: bool) -> tuple[str, str]:
        """The tokens up to the stop string, as text without and with control tokens. The stop string may spell control tokens."""
        text = self._codec.decode_all(token_ids)
        raw = cut_at(text, stop, keeps=keeps)
        if raw == text:
            return self._codec.decode(token_ids), raw
        num_whole = bisect_right(
            range(len(token_ids)), len(raw), key=lambda n: len(self._codec.decode_all(token_ids[: n + 1]))
        )
        beginning = raw[len(self._codec.decode_all(token_ids[:num_whole])) :]
        is_control = bool(self._codec.control_token(token_ids[num_whole]))
        return self._codec.decode(token_ids[:num_whole]) + ("" if is_control else beginning), raw

    def _remember(self, message: Message, wordings: Mapping[str, str]) -> None:
        keys = self._wordings.setdefault(_key(message), set())
        self._said[_key(message)] = wordings[message["content"]]
        for text, raw in wordings.items():
            key = _key({**message, "content": text})
            self._said.setdefault(key, raw)  # keep the entry of another turn that said exactly this
            keys.add(key)

    def _going_on(self, request: ChatRequest, branches: Sequence[Branch]) -> Branch | None:
        """The longest sample whose messages are a prefix of the request's. Of equally long ones, one with the same wordings,
        and one that no other request is continuing."""
        wordings = [_key(message) for message in request.messages]
        prefix: Branch | None = None
        best_rank = (0, False, False)
        for branch in branches:
            if branch.talk is None or branch.talk.tools != request.tools:
                continue
            keys = [_key(message) for message in branch.talk.messages]
            rank = (len(keys), keys == wordings[: len(keys)], not branch.is_busy)
            if best_rank < rank and len(keys) < len(wordings) and all(map(self._is_same, keys, wordings)):
                prefix, best_rank = branch, rank
        return prefix

    def _is_same(self, key: str, wording: str) -> bool:
        return key == wording or wording in self._wordings.get(key, ())

    def _suffix(self, talk: Talk, additions: Sequence[Message], request: ChatRequest) -> list[int] | None:
        """Token ids between what the model said and its next turn; None if the template cannot produce them."""
        roles = {message["role"] for message in additions}
        if "assistant" in roles:
            return None
        messages = self._named(request.messages)[-len(additions) :]
        if roles == {"tool"} and not talk.ending and self._parses(request):
            parser = self._parser(request.tools)
            if parser.in_own_turn:
                text = parser.answer_text(messages)
                return self._codec.encode_continued(self._codec.hidden({"content": text})["content"])
        if self._bridge.drops_thoughts(self._shown(talk.messages), messages, request.tools):
            return None
        try:
            return self._bridge.suffix(messages, talk.ending)
        except CannotBridge:
            return None

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template gets them. Only the model's own messages may contain control tokens."""
        views = []
        for original, message in zip(messages, self._named(messages), strict=True):
            raw = self._said.get(_key(original)) if original["role"] == "assistant" else None
            if raw is None:
                views.append(self._codec.hidden(message))
            else:
                content = self._bridge.opening() + self._bridge.without_end(raw)
                views.append({"role": "assistant", "content": content})
        return views

    def _rendered(self, request: ChatRequest) -> list[int]:
        """The token ids of all messages, rendered again."""
        messages = self._shown(request.messages)
        try:
            text = self._codec.render(messages, begins_turn=True, tools=request.tools)
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(f"the chat template refuses the messages: {error}") from error
        for message in messages:
            if message["role"] not in MAY_BE_LEFT_OUT and not is_shown(message["content"], text):
                raise Refused(f"the chat template leaves out what the role {message['role']!r:.40} says")
        return self._codec.encode_hidden(text)

    def _named(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form that templates expect: tool messages with the tool's name, arguments of calls as objects."""
        names: dict[str, str] = {}
        named = []
        for message in messages:
            calls = message.get("tool_calls") or []
            names |= {call["id"]: call["function"]["name"] for call in calls}
            if message["role"] == "tool":
                name = message.get("name") or names.get(message.get("tool_call_id", ""), "tool")
                named.append({"role": "tool", "name": name, "content": message["content"]})
            elif calls:
                named.append({**message, "tool_calls": [_with_object(call) for call in calls]})
            else:
                named.append(message)
        return named

    def _parses(self, request: ChatRequest) -> bool:
        return bool(request.tools) and request.may_call

    def _parser(self, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
        key = json.dumps(tools, sort_keys=True)
        if key not in self._parsers:
            try:
                self._parsers[key] = tool_parser(self._parser_type, [dict(tool) for tool in tools], self._vllm_parsers)
            except ValueError as error:  # vLLM checks them too
                raise Refused(f"tools: {error}") from error
        return self._parsers[key]


def cut_at(text: str, stop: Sequence[str], *, keeps: bool) -> str:
    """The text up to the stop string that ends first, as vLLM cuts it. `keeps` says whether the stop string itself stays.
    Characters after the stop string, which the last token may contain, are left out."""
    places = [(begin + len(string), begin) for string in stop if (begin := text.find(string)) >= 0]
    if not places:
        return text
    end, begin = min(places, key=lambda place: place[0])
    return text[: end if keeps else begin]


def _key(message: Message) -> str:
    """A key that is equal for messages that mean the same. Clients may change the spaces in the arguments of calls."""
    calls = [[call["id"], call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    further = {name: message.get(name) for name in ("name", "tool_call_id") if message["role"] != "assistant"}
    return json.dumps([message["role"], message["content"], calls, further], sort_keys=True)


def _written_arguments(call: ToolCall) -> str:
    """The arguments as text. If the call cannot be read: the call as the model wrote it, which the program can answer with an
    error."""
    return call.text if call.problem else json.dumps(call.arguments, ensure_ascii=False)


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    try:
        return cleaned(json.loads(arguments)) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError, Refused):
        return arguments


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": _arguments(call)}}
