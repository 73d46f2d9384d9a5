"""Messages between processes: content after its length in bytes.

A cell has handled what a model wrote, so its messages are not trusted: they are JSON and never pickle, and have a limit. A reader
takes no byte beyond its message, so that the messages behind it stay in the socket until somebody asks for them.
"""

import json
import os
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

HEAD = struct.Struct("!Q")
ENDED = "its process ended"
MOST_AT_ONCE = 2**18
"""Most bytes that are read at once."""


class BadMessage(ValueError):
    """What was received is no message, or is too long."""


def framed(content: bytes) -> bytes:
    """The content with its length in front."""
    return HEAD.pack(len(content)) + content


def packed(message: Mapping[str, Any]) -> bytes:
    """A JSON object with its length in front. Halves of surrogate pairs become question marks, because a model may write them and
    no server accepts them. Raises `TypeError`, `ValueError` or `RecursionError` for what is no JSON."""
    return framed(json.dumps(message, ensure_ascii=False).encode(errors="replace"))


def unpacked(content: bytes) -> dict[str, Any]:
    """The JSON object without its length. Raises `BadMessage`."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("not an object")
    return message


class Frames:
    """Takes the parts that a peer has sent, and gives back its messages without their lengths."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._data = bytearray()
        """What has come of the next message, or of its length."""
        self._size = HEAD.size
        self._has_head = False

    @property
    def missing(self) -> int:
        """How many bytes to ask for, so that none of the next message is taken."""
        return min(self._size - len(self._data), MOST_AT_ONCE)

    def add(self, part: bytes) -> Iterator[bytes]:
        """The messages that are complete with this part. Raises `EOFError` for no bytes, because the peer has ended or closed its
        end, perhaps within a message, and `BadMessage` for a message that is too long."""
        if not part:
            raise EOFError(ENDED)
        data, start = part, 0
        if self._data:
            self._data += part
            data, self._data = self._data, bytearray()
        try:
            while (end := start + self._size) <= len(data):
                if self._has_head:
                    content, start = bytes(data[start:end]), end
                    self._size, self._has_head = HEAD.size, False
                    yield content
                else:
                    self._size, start = _size(data, self._most_bytes, start), end
                    self._has_head = True
        finally:
            if start < len(data):
                self._data = data if isinstance(data, bytearray) else bytearray(data)
                del self._data[:start]


def receive(descriptor: int, most_bytes: int | None = None) -> bytes:
    """The content of the next message. A jail allows its only system call, `read`. Raises as `Frames.add`."""
    return _read(descriptor, _size(_read(descriptor, HEAD.size), most_bytes))


def _read(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, min(size, MOST_AT_ONCE)) if size else b""
    if len(data) == size:  # almost always
        return data
    parts = bytearray(data)
    while data:
        data = os.read(descriptor, min(size - len(parts), MOST_AT_ONCE))
        parts += data
        if len(parts) == size:
            return bytes(parts)
    raise EOFError(ENDED)


def _size(head: bytes | bytearray, most_bytes: int | None, start: int = 0) -> int:
    """The size of the message whose length begins at `start`."""
    (size,) = HEAD.unpack_from(head, start)
    if most_bytes is not None and size > most_bytes:
        raise BadMessage(f"a message of {size} bytes")
    return size


async def receive_async(read: Callable[[int], Awaitable[bytes]], most_bytes: int | None = None) -> bytes:
    """As `receive`. `read` gives as many bytes as it is asked for, or fewer; none at the end."""
    frames = Frames(most_bytes)
    while True:
        for content in frames.add(await read(frames.missing)):
            return content


def send(descriptor: int, message: bytes) -> None:
    """Send a message that has its length in front. A jail allows its only system call, `write`."""
    rest = memoryview(message)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
