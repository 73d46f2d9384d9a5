"""Messages between the controller and the process of a reward function: JSON after its length in bytes, never pickle, because
the process has run a user's code on a model's text."""

import json
import struct
from typing import Any

HEAD = struct.Struct("!Q")
MOST_BYTES = 2**26
"""Most bytes of one answer."""


def packed(message: dict[str, Any]) -> bytes:
    """A message as bytes, with its length in front. Halves of surrogate pairs become question marks."""
    content = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return HEAD.pack(len(content)) + content


def unpacked(content: bytes) -> dict[str, Any]:
    """The message. Raises `ValueError` if it is none."""
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
