"""From the end of a sampled turn to the beginning of the next turn, by the chat template, without tokenizing the turn again.

    … <assistant> sampled tokens ‖ <end>\\n<tool>42<end>\\n<assistant>        ‖ marks where the policy stopped
                                   └──── the suffix ────────────────┘

A template renders a whole text, and the suffix is the part of it after the model's turn. To find the suffix, a conversation is
rendered whose only model turn is a mark, so the suffix never depends on how a sampled turn would be rendered. Some templates
change earlier turns once other messages follow, for example by dropping thoughts. A suffix cannot express that, so the
conversation branches: it continues from a prompt that is rendered again as a whole (`Bridge.drops_thoughts`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from open_instruct.chat_codec import END_THINK, THINK, ChatCodec

MARK = "ANSWERMARK"
QUESTION = {"role": "user", "content": "QUESTIONMARK"}
CALL_ID = "callmark0"
MAY_BE_LEFT_OUT = ("system", "assistant")
"""Roles whose messages templates shorten or omit on purpose, for example by dropping earlier thoughts."""
Message = dict[str, Any]


class CannotBridge(ValueError):
    """The chat template cannot continue a conversation with these messages; the text says why."""


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the model as text."""

    raw: str
    """The turn with its control tokens, except the control token that ended it."""
    ending: str
    """The control tokens with which the turn ended; empty if it ended without any."""
    content: str
    """The turn as the content of a message, from which the template renders what the engine saw and sampled: with the text that
    the template wrote before it (`<think>`), and without the end that the template writes itself."""


class Bridge:
    """The suffixes of one chat template."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._closing: str | None = None
        self._opening: str | None = None

    def suffix(self, messages: Sequence[Message], ending: str) -> list[int]:
        """Token ids of `messages` and of the beginning of the model's next turn.

        Args:
            ending: the control tokens with which the model's turn ended (`SampledTurn.ending`). What the template would write
                there is not written a second time.

        Raises:
            CannotBridge: the template has no place for the messages.
        """
        closing, rest, ends = self._behind_turn(messages)
        missing_end = self._behind_ending(closing, ending)
        if missing_end is None:
            missing_end = "" if any(map(ending.endswith, ends)) else closing
        return self._codec.encode_continued(missing_end + rest)

    def read_turn(self, token_ids: Sequence[int]) -> SampledTurn:
        """The tokens of a turn as text."""
        ending = self._codec.ending(token_ids)
        raw = self._codec.decode_all(list(token_ids[:-1] if ending else token_ids))
        return SampledTurn(raw, ending, self.opening() + self.without_end(raw))

    def without_end(self, turn: str) -> str:
        """The text of a turn without the end that the template writes itself when it renders the turn."""
        try:
            end_of_template = _longest_beginning(self._beginnings(self.closing()), turn)
        except CannotBridge:  # `suffix` says what the template refuses
            return turn
        return turn.removesuffix(end_of_template)

    def _behind_ending(self, closing: str, ending: str) -> str | None:
        """The part of `closing` that a turn with this ending still lacks; None if the ending is no part of the template's end."""
        closing = closing.lstrip()
        if beginning := _longest_beginning(self._beginnings(closing), ending):
            return closing.removeprefix(beginning)
        last_token = next((token for token in self._codec.control_tokens if ending.endswith(token)), "")
        own_end = self.closing().lstrip()
        # the turn lacks a token before this one
        if last_token and last_token in own_end and closing.startswith(own_end):
            return closing[closing.index(last_token) + len(last_token) :]
        return None

    def _beginnings(self, text: str) -> list[str]:
        """The beginnings of a text that consist of control tokens, the shortest first."""
        text, beginnings, end = text.lstrip(), [], 0
        while token := next((token for token in self._codec.control_tokens if text.startswith(token, end)), ""):
            end += len(token)
            beginnings.append(text[:end])
        return beginnings

    def _behind_turn(self, messages: Sequence[Message]) -> tuple[str, str, set[str]]:
        """The text that ends the model's turn, the text from there to the model's next turn, and control tokens that may end a
        turn instead of the first text. Special tokens in `messages` are hidden."""
        hidden = [self._codec.hidden(message) for message in messages]
        problem = "it leaves out what they say"
        for parts in (self._behind_plain_turn, self._behind_calls):
            try:
                closing, rest, ends = parts(hidden)
            except CannotBridge as error:
                problem = str(error)
                continue
            if all(is_shown(message["content"], closing + rest) for message in hidden):
                return closing, rest, ends
        roles = " and ".join(sorted({str(message["role"]) for message in messages}))
        raise CannotBridge(f"the chat template cannot take messages of {roles} behind the model's turn: {problem}")

    def _behind_plain_turn(self, messages: Sequence[Message]) -> tuple[str, str, set[str]]:
        return self._tail([QUESTION, _plain_turn(), *messages]), "", set()

    def _behind_calls(self, messages: Sequence[Message]) -> tuple[str, str, set[str]]:
        """The parts if the model's turn made the calls that `messages` answer. Some templates need these calls, and some end a
        turn with calls differently."""
        turn = _calling_turn(messages)
        calls = self._tail([QUESTION, turn], begins_turn=False)
        rest = _behind(calls, self._tail([QUESTION, turn, *messages]))
        ends = {token for token in self._codec.control_tokens if calls.rstrip().endswith(token)}
        return self.closing(), rest, ends

    def closing(self) -> str:
        """The template's text between a plain turn of the model and the next message."""
        if self._closing is None:
            self._closing = self._text_behind_plain_turn()
        return self._closing

    def _text_behind_plain_turn(self) -> str:
        alone = self._tail([QUESTION, _plain_turn()], begins_turn=False)
        followed = self._tail([QUESTION, _plain_turn(), QUESTION])
        end = 0
        while end < min(len(alone), len(followed)) and alone[end] == followed[end]:
            end += 1
        begins = [token for token in self._codec.control_tokens if followed.lstrip().startswith(token)]
        if begins and not alone.lstrip().startswith(begins[0]):  # the very last turn ends in another way
            return begins[0]
        return alone[:end]

    def _tail(self, messages: Sequence[Message], *, begins_turn: bool = True) -> str:
        """The text that the template writes after the mark."""
        try:
            text = self._codec.render(messages, begins_turn=begins_turn)
        except Exception as error:  # a template is a program and may raise anything
            raise CannotBridge(f"it refuses them: {error}") from error
        _, mark, tail = text.partition(MARK)
        if not mark:
            raise CannotBridge("it does not show the model's own turn")
        return tail

    # --- thoughts -----------------------------------------------------------------------------------------------------

    def opening(self) -> str:
        """The text with which the template begins the model's thoughts, such as `<think>` with a new line; or nothing."""
        if self._opening is None:
            try:
                prompt = self._codec.render([QUESTION], begins_turn=True)
            except Exception:  # `suffix` says what the template refuses
                prompt = ""
            self._opening = prompt[prompt.rindex(THINK) :] if prompt.rstrip().endswith(THINK) else ""
        return self._opening

    def drops_thoughts(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> bool:
        """Whether the template leaves out thoughts of `before` once `messages` follow, though the model has seen them so far.

        Args:
            before: a conversation whose last message is the model's. The model has seen all thoughts that the template shows in
                the prompt of this last turn, and the thoughts of the turn itself.
            messages: what follows.
        """
        marked = [self._with_mark(message, f"THOUGHTMARK{number}X") for number, message in enumerate(before)]
        if marked == list(before):
            return False
        marks = [f"THOUGHTMARK{number}X" for number, message in enumerate(before) if marked[number] is not message]
        hidden = [self._codec.hidden(message) for message in messages]
        try:
            prompt = self._codec.render(marked[:-1], begins_turn=True, tools=tools)
            text = self._codec.render([*marked, *hidden], begins_turn=True, tools=tools)
        except Exception:  # `suffix` says what the template refuses
            return False
        seen_marks = [mark for mark in marks if mark in prompt or mark == f"THOUGHTMARK{len(before) - 1}X"]
        return any(mark not in text for mark in seen_marks)

    def _with_mark(self, message: Message, mark: str) -> Message:
        """A turn of the model with the mark in place of its thoughts. Any other message stays as it is."""
        if message["role"] != "assistant":
            return message
        begin, opened, thoughts = message["content"].partition(THINK)
        if not opened:
            begin, thoughts = "", message["content"]
        thoughts, closed, answer = thoughts.rpartition(END_THINK)
        if not opened and not closed:
            return message
        return {**message, "content": f"{begin}{opened}\n{mark}\n{closed}{answer}"}


def _longest_beginning(beginnings: Sequence[str], text: str) -> str:
    return next((beginning for beginning in reversed(beginnings) if text.endswith(beginning)), "")


def _plain_turn() -> Message:
    return {"role": "assistant", "content": MARK}


def _calling_turn(messages: Sequence[Message]) -> Message:
    """A model turn with calls of the tools that answer in `messages`, because some templates need it."""
    names = [str(message.get("name", "tool")) for message in messages if message["role"] == "tool"] or ["tool"]
    calls = [
        {"id": f"{CALL_ID}", "type": "function", "function": {"name": name, "arguments": {}}}
        for name in dict.fromkeys(names)
    ]
    return {"role": "assistant", "content": MARK, "tool_calls": calls}


def _behind(before: str, text: str) -> str:
    """The part of `text` that follows `before`."""
    for begin in (before, before.rstrip()):
        if text.startswith(begin):
            return text[len(begin) :].lstrip("\n") if begin != before else text[len(begin) :]
    raise CannotBridge("it writes calls of tools in another way once they are answered")


def is_shown(content: str, text: str) -> bool:
    """Whether the text contains the content, apart from surrounding space. The content may also be written as JSON writes it."""
    stripped = content.strip()
    as_json = (json.dumps(stripped, ensure_ascii=ascii_alone)[1:-1] for ascii_alone in (False, True))
    return any(form in text for form in (stripped, *as_json))
