"""The codec of all sockets: frames in pieces, in heaps, too large, and of somebody who means harm."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from holdfast.writer.frames import Channel, FrameDecoder, Message, encode
from holdfast.writer.ranks.link import MAX_MESSAGE, Link

HEADERS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "$"), st.integers() | st.text(max_size=9))
FRAMES = st.lists(st.tuples(HEADERS, st.lists(st.binary(max_size=40), max_size=3)), max_size=6)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def plain(messages: list[Message]) -> list[tuple[dict[str, object], list[bytes]]]:
    return [(one.header, list(one.attachments)) for one in messages]


@given(frames=FRAMES, seed=st.integers(0, 1 << 30))
def test_any_cut_gives_the_same_messages(frames: list[tuple[dict[str, object], list[bytes]]], seed: int) -> None:
    """Whatever pieces a stream arrives in, the messages are those that were sent, in order, and nothing is left."""
    stream = b"".join(encode(header, attached) for header, attached in frames)
    decoder, chance, found = FrameDecoder("a test"), random.Random(seed), []
    while stream:
        size = chance.randint(1, chance.choice((1, 3, 20, 400)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert plain(found) == frames
    assert decoder.wanted == 4  # the length of the next frame


def test_wanted_never_reaches_beyond_a_frame() -> None:
    """Who reads `wanted` bytes at a time gets one message from each frame and reads no byte of the next."""
    first, second = encode({"n": 1}, [b"abc", b"", bytes(100_000)]), encode({"n": 2})
    decoder, stream, found = FrameDecoder("a test"), first + second, []
    while not found:
        piece, stream = stream[: decoder.wanted], stream[decoder.wanted :]
        found = decoder.feed(piece)
    assert stream == second
    assert plain(found) == [({"n": 1}, [b"abc", b"", bytes(100_000)])]


def test_descriptors_belong_to_the_frame_they_came_with() -> None:
    """They wait for the rest of their frame; those of a frame that never ends are given back to be closed."""
    decoder = FrameDecoder("a test")
    data = encode({"n": 1}, [b"x" * 10])
    assert decoder.feed(data[:4], [7, 8]) == []
    assert [one.fds for one in decoder.feed(data[4:] + encode({"n": 2}))] == [(7, 8), ()]
    decoder.feed(data[:9], [9])
    assert decoder.drop() == (9,)
    assert decoder.drop() == ()
    assert plain(decoder.feed(encode({"n": 3}))) == [({"n": 3}, [])]


HOSTILE = {
    "a header longer than allowed": struct.pack(">I", 1001),
    "the longest length there is": b"\xff\xff\xff\xff",
    "no JSON": frame(b"{"),
    "nothing": frame(b""),
    "no text": frame(b"\xff\xfe{}"),
    "a list": frame(b"[1]"),
    "a number": frame(b"1"),
    "deeply nested": frame(b"[" * 900),
    "sizes that are no list": frame(b'{"$":5}'),
    "sizes that are words": frame(b'{"$":["1"]}'),
    "sizes that are true": frame(b'{"$":[true]}'),
    "a negative size": frame(b'{"$":[-1]}'),
    "a size in parts": frame(b'{"$":[1.5]}'),
    "more behind it than allowed": frame(b'{"$":[1000,1001]}'),
    "a size beyond all numbers": frame(b'{"$":[' + b"9" * 500 + b"]}"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_is_no_frame_is_refused(what: str, step: int) -> None:
    """Each is an error of ours that names the sender, however it arrives."""
    decoder = FrameDecoder("a stranger", max_header_bytes=1000, max_attached_bytes=2000)
    data = HOSTILE[what]
    with pytest.raises(HoldfastError, match="a stranger sent"):
        for start in range(0, len(data), step):
            decoder.feed(data[start : start + step])


def test_nesting_beyond_the_interpreter_is_refused() -> None:
    """A header that would exhaust the stack of a parser is an error, not the end of the process."""
    with pytest.raises(HoldfastError, match="no message"):
        FrameDecoder("a stranger").feed(frame(b'{"a":' * 200_000))


def test_memory_follows_what_has_arrived() -> None:
    """Neither a length that is only claimed nor a message in single bytes takes much more than its bytes."""
    decoder = FrameDecoder("a stranger")
    head = json.dumps({"$": [1 << 39]}).encode()
    tracemalloc.start()
    try:
        decoder.feed(frame(head))
        for _ in range(50_000):
            decoder.feed(b"x")
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_all_who_read_sockets_refuse_the_same() -> None:
    """A channel and the control channel end with an error of ours at a hostile frame."""
    for read in (lambda sock: Channel(sock).receive(), lambda sock: Link(sock).receive()):
        for data in (frame(b"nonsense"), b"\xff\xff\xff\xff"):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(data)
                with pytest.raises(HoldfastError, match="sent"):
                    read(ours)


def test_a_hostile_frame_ends_what_reads_without_waiting_after_what_came_before_it() -> None:
    """Who reads from many hears the good messages of each, and then that one cannot be understood."""
    for data in (frame(b"nonsense"), b"\xff\xff\xff\xff"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = Channel(ours, "a worker")
            assert not channel.read()
            assert channel.drained
            theirs.sendall(encode({"on": "good"}))
            assert [one.header for one in channel.read()] == [{"on": "good"}]
            assert not channel.ended
            theirs.sendall(data)
            assert not channel.read()
            assert channel.ended
            assert "a worker sent" in channel.broken


def test_the_control_channel_takes_no_attachments() -> None:
    """Nothing but headers up to `MAX_MESSAGE`, and only such that say what to do."""
    for data in (
        encode({"do": "x"}, [b"1"]),
        frame(b'{"do":"x","$":[0]}'),
        struct.pack(">I", MAX_MESSAGE + 1),
        encode({"a": 1}),
    ):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            with pytest.raises(HoldfastError, match="control channel"):
                Link(ours).receive()


def test_a_channel_closes_the_descriptors_of_a_frame_that_never_ends() -> None:
    """The other end dies in the middle of a frame: its descriptors do not stay open here."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    read, write = os.pipe()
    socket.send_fds(theirs, [encode({"do": "arena"})[:6]], [write])
    os.close(write)
    theirs.close()
    assert channel.receive() is None
    assert os.read(read, 1) == b""  # the end of file: nobody holds the writing end
    os.close(read)
    channel.close()


def test_a_program_that_is_started_does_not_get_the_descriptors_of_a_channel() -> None:
    """It could hold the memory of a dead trainer, or the connection whose end says that trainer and writer are dead."""
    ours, theirs = map(Channel, socket.socketpair())
    with open(os.devnull, "rb") as file:
        theirs.send({"do": "arena"}, fds=[file.fileno()])
    message = ours.receive()
    assert message is not None
    (fd,) = message.fds
    assert not os.get_inheritable(fd)
    os.close(fd)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("waits", [True, False])
def test_last_words_are_read_though_nothing_can_be_sent_any_more(waits: bool) -> None:
    """The other side says why it ends and is gone with ours unread: it is heard, and what is sent then is refused."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    read, write = os.pipe()
    channel.send({"do": "begin"}, [bytes(16 << 20)])  # more than the socket takes: the rest waits in the channel
    channel.send({"do": "log"}, fds=[write])
    os.close(write)
    theirs.sendall(encode({"on": "failed"}))
    theirs.close()
    assert channel.flush(30)
    with pytest.raises(BrokenPipeError):
        channel.send({"do": "more"})
    assert os.read(read, 1) == b""  # the end of file: what was never sent is not held either
    os.close(read)
    if waits:
        message = channel.receive()
        assert message is not None
        assert message.header == {"on": "failed"}
        assert channel.receive() is None
    else:
        assert [one.header for one in channel.read()] == [{"on": "failed"}]
        assert channel.ended
    channel.close()


def test_a_message_with_descriptors_is_not_waited_for() -> None:
    """A socket that is full takes no message now, whether or not a descriptor goes with it: `send` returns."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(64 << 10), socket.MSG_DONTWAIT)
    read, write = os.pipe()
    sender = threading.Thread(target=channel.send, args=({"do": "log"},), kwargs={"fds": [write]}, daemon=True)
    sender.start()
    sender.join(20)
    held = sender.is_alive()
    theirs.close()
    sender.join(20)
    assert not held
    channel.close()
    for fd in (read, write):
        os.close(fd)


def test_a_message_that_the_socket_takes_in_parts() -> None:
    """What does not fit at once follows, every byte of it, and the next message behind it."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    one, other = Link(ends[0]), Link(ends[1])
    messages = [{"do": "left", "why": letter * (4 << 20)} for letter in "ab"]
    heard: list[dict[str, Any]] = []
    assert all(one.send(message) for message in messages)
    assert one.unsent
    while one.unsent:
        heard += other.receive() or []
        assert one.flush()
    heard += other.receive() or []  # all that was sent lies in the socket
    assert heard == messages
    one.close()
    other.close()
