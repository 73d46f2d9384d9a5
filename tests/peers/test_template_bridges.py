"""Conversations over the chat templates that TRL carries in its wheel: what is put together is what the template writes.

`.venv-peers` holds the wheel (`bash scripts/setup_peers.sh`); nothing of TRL is imported.
"""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec, show_special_tokens
from open_instruct.environments.base import tool_message, user_message
from open_instruct.workflows.conversations.bridge import QUESTION, Bridge, CannotBridge

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(
    path
    for path in ROOT.glob(".venv-peers/lib/python3*/site-packages/trl/chat_templates/*.jinja")
    if "_training" not in path.stem
)
CONTROL = re.compile(r"<\|[^|<>\s']+\|>|<｜[^｜<>\s']+｜>|<(?:start_of_turn|end_of_turn|bos|eos|s|/s)>|</s>|\[/?INST\]")
NUM_TURNS = 25
"""Random conversations of each template."""
SAID = [
    "",
    "42",
    "Straße 日本語 🙂",
    " spaces ",
    "a\n\nb",
    "{'json': \"x\"}",
    "<tool_call>",
    "\\n",
    "1.5e-3",
    "e\u0301",
]
"""What is put into turns, beside control tokens."""


@pytest.fixture(autouse=True)
def there_are_templates() -> None:
    if len(TEMPLATES) < 30:
        pytest.skip("there is no .venv-peers; `bash scripts/setup_peers.sh` makes it")


def make_codec(template: str) -> tuple[ChatCodec, list[str]]:
    """The tiny tokenizer with a template and its control tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    found = sorted(set(CONTROL.findall(template)))
    tokenizer.add_special_tokens({"additional_special_tokens": found})
    tokenizer.bos_token = next((token for token in found if "begin" in token or token in ("<bos>", "<s>")), "<|end|>")
    tokenizer.chat_template = template
    return ChatCodec(tokenizer), found


def end_of_turn(bridge: Bridge, codec: ChatCodec) -> int | None:
    """The control token with which the template ends the model's turn."""
    text = bridge.closing().strip()
    first = codec.encode(text)[:1] if text else []
    return first[0] if first and codec.control_token(first[0]) else None


def shows(codec: ChatCodec, messages: list[dict[str, Any]]) -> str | None:
    """The template around messages whose control tokens stay text, as bytes would show it."""
    try:
        rendered = codec.render([codec.hidden(message) for message in messages], begins_turn=True)
    except Exception:
        return None
    return show_special_tokens(rendered, codec._special_tokens)


WITHOUT_TOOLS = {
    "cohere",
    "cohere2",
    "diffusion_gemma",
    "gemma",
    "gemma3",
    "gemma4",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "phi3",
}
WITHOUT_TOOLS |= {"phi3_5"}
"""Templates without a place for the answers of tools behind a turn."""
FOR_PICTURES = {"idefics3", "llava_next", "smolvlm"}
"""Templates that take no messages of plain text."""


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_no_byte_drifts(path: Path) -> None:
    """Ids to text gives back every byte that was put in, and what is put behind a turn is what the template would write there."""
    codec, controls = make_codec(path.read_text())
    bridge, rng = Bridge(codec), random.Random(path.stem)
    try:
        end = end_of_turn(bridge, codec)
    except CannotBridge:
        assert path.stem in FOR_PICTURES
        return
    spelled = "" if end is None else codec.control_token(end)
    seen: Counter[str] = Counter()
    for _ in range(NUM_TURNS):
        words = SAID + controls
        turn = "SAIDMARK" + "".join(rng.choice(words) for _ in range(rng.randint(0, 4))).strip()
        content = "".join(rng.choice(words) for _ in range(rng.randint(1, 4)))
        message = rng.choice((user_message(content), tool_message("lookup", content)))
        sampled = codec.encode_continued(codec.hidden({"content": turn})["content"]) + ([] if end is None else [end])
        try:
            suffix = bridge.suffix([message], spelled)
        except CannotBridge:
            seen[f"no {message['role']}"] += 1
            continue
        assert codec.decode_all(sampled) == turn + spelled
        assert codec.decode_all(sampled + suffix) == turn + spelled + codec.decode_all(
            suffix
        )  # nothing happens at the seam
        plain = shows(codec, [QUESTION, {"role": "assistant", "content": turn}, message])
        if plain is not None and turn in plain:  # else the template wants calls, or writes turns in a way of its own
            behind = plain[plain.index(turn) + len(turn) :]
            written = spelled + codec.decode_all(suffix)
            assert written in (behind, spelled + behind)  # glm ends a turn with the beginning of the next
            seen["compared"] += 1
    assert seen["compared"] > 0
    assert seen["no user"] == 0
    assert (seen["no tool"] > 0) == (path.stem in WITHOUT_TOOLS)
