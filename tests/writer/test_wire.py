"""Framing over the socket pair."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from holdfast import errors
from holdfast.writer.frames import Channel, FrameDecoder, encode
from holdfast.writer.messages import BlobPlan, FilePlan, SafetensorsFile, SaveJob, error_from_json, error_to_json


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_messages_keep_order_attachments_and_descriptors(ends: tuple[Channel, Channel]) -> None:
    """Small, empty and large messages arrive whole and in order although nobody reads while they are sent."""
    one, other = ends
    big = bytes(range(256)) * (32 << 10)
    read, write = os.pipe()
    one.send({"n": 1}, [b"a", b""], fds=[write])
    one.send({"n": 2}, [big])
    one.send({"n": 3}, fds=[write])
    os.close(write)
    first, second, third = other.receive(), other.receive(), other.receive()
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.attachments == (b"a", b"")
    assert second.attachments == (big,)
    assert [m.header["n"] for m in (first, second, third)] == [1, 2, 3]
    for message in (first, third):
        os.write(message.fds[0], b"x")
        os.close(message.fds[0])
    assert os.read(read, 10) == b"xx"
    os.close(read)
    one.close()
    assert other.receive() is None
    other.close()


def test_close_wakes_a_waiting_reader(ends: tuple[Channel, Channel]) -> None:
    """A thread in `receive` ends when another closes the channel."""
    one, other = ends
    got: list[object] = [...]
    reader = threading.Thread(target=lambda: got.append(other.receive()))
    reader.start()
    other.close()
    reader.join(10)
    assert got[-1] is None
    with pytest.raises(OSError):
        for _ in range(2):
            one.send({"n": 1})
            other.send({"n": 1})
    one.close()


@pytest.mark.parametrize(
    "error",
    [
        errors.StorageFullError("full"),
        errors.CorruptCheckpointError("bad", file="a", tensor="t", chunk=3),
        errors.StateMismatchError("no", problems=("x",)),
        errors.RunBusyError("busy"),
    ],
)
def test_errors_keep_type_and_details(error: errors.HoldfastError) -> None:
    """Every Holdfast error crosses the wire with its class, message and attributes."""
    back = error_from_json(error_to_json(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_foreign_error_becomes_a_holdfast_error() -> None:
    """A bug in the writer is told by type and message, and never looked up as code."""
    back = error_from_json(error_to_json(KeyError("k")))
    assert type(back) is errors.HoldfastError
    assert "KeyError" in str(back)
    assert type(error_from_json({"type": "Any", "message": "m"})) is errors.HoldfastError


def test_jobs_survive_the_wire() -> None:
    """A job is the same value after its JSON form, with the values in it."""
    plans = {"files": (FilePlan(path="a", size=1),), "blobs": (BlobPlan(path="b", role="state"),)}
    file = SafetensorsFile(size=8, lease=None, data_at=4, digest_at=2)
    for more in ({}, plans, {"container": file}):
        job = SaveJob(directory="d", save_id="a-1", manifest={"step": 1}, reuse=True, **more)
        (message,) = FrameDecoder("a test").feed(encode({"job": job}))
        assert SaveJob.from_json(message.header["job"]) == job
