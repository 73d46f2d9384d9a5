"""From the end of a sampled turn to the beginning of the next turn, by the chat template, without tokenizing the turn again.

    … <assistant> sampled tokens ‖ <end>\\n<tool>42<end>\\n<assistant>        ‖ marks where the policy stopped
                                   └──── the suffix ────────────────┘

A template renders a whole text, and the suffix is the part of it after the model's turn. To find the suffix, a conversation is
rendered whose only model turn is a mark, so the suffix never depends on how a sampled turn would be rendered. Some templates
change earlier turns once other messages follow, for example by dropping thoughts. A suffix cannot express that, so the
conversation branches: it continues from a prompt that is rendered again as a whole (`Bridge.changes_earlier_turns`).
"""

import json
from collections.abc import Sequence
from typing import Any

from open_instruct.chat_codec import END_THINK, THINK, ChatCodec

MARK = "ANSWERMARK"
QUESTION = {"role": "user", "content": "QUESTIONMARK"}
THOUGHT = "THOUGHTMARK"
CALL_ID = "callmark0"
Message = dict[str, Any]


class CannotBridge(ValueError):
    """The chat template cannot continue a conversation with these messages; the text says why."""


class Bridge:
    """The suffixes of one chat template."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._changes: dict[str, bool] = {}

    def suffix(self, messages: Sequence[Message], last_id: int | None) -> list[int]:
        """Token ids of `messages` and of the beginning of the model's next turn.

        Args:
            last_id: the last token of the model's turn if it is a control token, such as the end of a turn. Then the template's
                own end of the turn is not written a second time.

        Raises:
            CannotBridge: the template has no place for the messages.
        """
        closing, rest, ends = self._behind_turn(messages)
        spelling = "" if last_id is None else self._codec.control_token(last_id)
        if spelling and closing.lstrip().startswith(spelling):
            closing = closing.lstrip().removeprefix(spelling)
        elif spelling and spelling in ends:
            closing = ""
        return self._codec.encode_continued(closing + rest)

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

    def changes_earlier_turns(self, role: str) -> bool:
        """Whether the template changes an earlier turn with thoughts once a message of `role` follows."""
        if role not in self._changes:
            turn = {"role": "assistant", "content": f"{THINK}\n{THOUGHT}\n{END_THINK}\n\n{MARK}"}
            try:
                text = self._codec.render([QUESTION, turn, {"role": role, "content": "NEXT"}], begins_turn=True)
                self._changes[role] = THOUGHT not in text
            except Exception:  # `suffix` says what the template refuses
                self._changes[role] = False
        return self._changes[role]


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
    return any(written in text for written in (stripped, *as_json))
