"""The text between two turns is lost when a conversation grows token by token."""

from collections.abc import Callable

import pytest
from exhibit import Exhibit
from rc_fakes import codec
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.workflows.conversations.bridge import Bridge

EXHIBIT = Exhibit(
    reports=("verl-project/verl #6921",),
    subject="tokens and turns",
    happened="The policy ends its turn with the end token, and the newline that the chat template writes behind it was "
    "never sampled nor added: at each border of a turn the tokens differed from what the model was trained on.",
    here="The text behind a turn is taken from the template itself, which renders a whole conversation with a mark in "
    "place of the turn (`workflows/conversations/bridge.py`).",
)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "12 + 34 ="}
NEXT = {"role": "user", "content": "And 1 more?"}
TURN = "46"
Grow = Callable[[ChatCodec, list[int]], list[int]]
"""The tokens of the first prompt and of the turn -> the next prompt."""


def with_template() -> ChatCodec:
    tokenizer = AutoTokenizer.from_pretrained(codec().tokenizer.name_or_path)
    tokenizer.chat_template = TEMPLATE
    return ChatCodec(tokenizer)


def check(grow: Grow) -> None:
    chat = with_template()
    end = chat.tokenizer.eos_token
    so_far = chat.encode(f"<user>{QUESTION['content']}{end}\n<assistant>") + chat.encode(TURN + end)
    expected = f"<user>12 + 34 ={end}\n<assistant>46{end}\n<user>And 1 more?{end}\n<assistant>"
    grown = grow(chat, so_far)
    assert grown[: len(so_far)] == so_far
    assert chat.decode_all(grown) == expected


def theirs(chat: ChatCodec, so_far: list[int]) -> list[int]:
    return so_far + chat.encode(chat.render([NEXT], begins_turn=True))


def ours(chat: ChatCodec, so_far: list[int]) -> list[int]:
    bridge = Bridge(chat)
    return so_far + bridge.suffix([NEXT], bridge.read_turn(so_far).ending)


def test_turn_that_is_rendered_alone_is_caught() -> None:
    with pytest.raises(AssertionError):
        check(theirs)


def test_text_between_turns_is_the_templates_here() -> None:
    check(ours)
