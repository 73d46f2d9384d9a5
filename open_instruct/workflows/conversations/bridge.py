"""From the end of a sampled turn to the beginning of the next, by the chat template and without tokenizing again what was said.

    … <assistant> sampled tokens ‖ <end>\\n<tool>42<end>\\n<assistant>        ‖ marks where the policy stopped
                                   └──── the suffix ────────────────┘

A template gives a whole text, and the suffix is the part of it behind the model's turn. It is found by rendering a conversation
whose only turn of the model is a mark. So the suffix never depends on how a sampled turn would be written again. Where a template
does something else to earlier turns once others follow (it drops thoughts), a suffix cannot say that: the conversation branches,
and goes on from a prompt that is rendered anew (`Bridge.changes_earlier_turns`).
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
            last_id: the last token of the model's turn, if it is a control token such as the end of a turn: the template's own
                end of the turn is then not written a second time.

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
        """The text that ends the model's turn, the text from there to its next turn, and control tokens that end a turn in place
        of the first. Special tokens in `messages` are hidden."""
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
        """Some templates want to see the calls that are answered, and some end a turn with calls in a way of its own."""
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
        if begins and not alone.lstrip().startswith(begins[0]):  # the last turn of all ends in another way
            return begins[0]
        return alone[:end]

    def _tail(self, messages: Sequence[Message], *, begins_turn: bool = True) -> str:
        """What the template writes behind the mark."""
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
    """A turn that has called the tools that now answer, which some templates want to see."""
    names = [str(message.get("name", "tool")) for message in messages if message["role"] == "tool"] or ["tool"]
    calls = [
        {"id": f"{CALL_ID}", "type": "function", "function": {"name": name, "arguments": {}}}
        for name in dict.fromkeys(names)
    ]
    return {"role": "assistant", "content": MARK, "tool_calls": calls}


def _behind(before: str, text: str) -> str:
    """What of `text` follows `before`."""
    for begin in (before, before.rstrip()):
        if text.startswith(begin):
            return text[len(begin) :].lstrip("\n") if begin != before else text[len(begin) :]
    raise CannotBridge("it writes calls of tools in another way once they are answered")


def is_shown(content: str, text: str) -> bool:
    """Whether the text has the content, but for space around it and for the way in which JSON writes it."""
    stripped = content.strip()
    as_json = (json.dumps(stripped, ensure_ascii=ascii_alone)[1:-1] for ascii_alone in (False, True))
    return any(written in text for written in (stripped, *as_json))
