"""Messages after their length, in whatever parts they come."""

import asyncio
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.system.cells.framing import (
    HEAD,
    BadMessage,
    Frames,
    framed,
    packed,
    receive,
    receive_async,
    send,
    unpacked,
)


@given(contents=st.lists(st.binary(max_size=40), max_size=5), cuts=st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_the_same_in_whatever_parts_they_come(contents: list[bytes], cuts: list[int]) -> None:
    stream, frames, messages, number = b"".join(map(framed, contents)), Frames(40), [], 0
    while stream:
        size = cuts[number % len(cuts)]
        messages += frames.add(stream[:size])
        stream, number = stream[size:], number + 1
    assert messages == contents


def test_reader_takes_no_byte_of_the_next_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(b"first") + framed(b"second"))
        assert receive(ours.fileno()) == b"first"
        assert ours.recv(100) == framed(b"second")


@pytest.mark.parametrize("stream", [b"", b"\0\0\0", HEAD.pack(5), HEAD.pack(5) + b"four"])
def test_peer_that_ends_within_a_message_is_noticed(stream: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(stream)
        with pytest.raises(EOFError, match="its process ended"):
            receive(ours.fileno())


def test_message_over_the_limit_is_refused_before_it_is_read_and_those_before_it_are_not_lost() -> None:
    frames = Frames(5).add(framed(b"right") + HEAD.pack(2**63))
    assert next(frames) == b"right"
    with pytest.raises(BadMessage, match="a message of 9223372036854775808 bytes"):
        next(frames)


def test_large_messages_arrive_whole() -> None:
    reading, writing = os.pipe()
    content = os.urandom(3_000_000)
    sender = threading.Thread(target=send, args=(writing, framed(content)))
    sender.start()
    assert receive(reading) == content
    sender.join()

    async def from_stream() -> bytes:
        stream = asyncio.StreamReader()
        stream.feed_data(framed(b"a") + framed(content))
        await receive_async(stream.read)
        return await receive_async(stream.read)

    assert asyncio.run(from_stream()) == content
    os.close(reading)
    os.close(writing)


def test_json_travels_and_halves_of_surrogate_pairs_become_question_marks() -> None:
    frames = Frames()
    (content,) = frames.add(packed({"text": "é \ud800"}))
    assert unpacked(content) == {"text": "é ?"}


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_json_object_is_no_message(content: bytes) -> None:
    with pytest.raises(BadMessage):
        unpacked(content)
