"""What the system refuses for a moment, or altogether: memory of the arena, room in a socket, memfd and pidfd."""

from __future__ import annotations

import errno
import os
import socket

import pytest
import torch
from writer_kit import fill, make_job, noise, stored

import holdfast as hf
from holdfast.checkpointer import functions
from holdfast.errors import HoldfastError
from holdfast.state.load import shared_reads
from holdfast.storage import LocalStorage
from holdfast.writer import arena as arena_module
from holdfast.writer import conversation, frames
from holdfast.writer.client import WriterClient
from holdfast.writer.frames import Channel
from holdfast.writer.server import HandedOver


def refuse(code):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    return refused


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "run")


@pytest.mark.parametrize("failures", [1, 2])
def test_the_arena_cannot_be_mapped_for_a_moment(storage, monkeypatch, failures):
    """Tried again by the first job that needs it; if it fails then too, that save is lost and said, and no other."""
    left = [failures]
    real = HandedOver._map

    def failing(self, message):
        if left[0]:
            left[0] -= 1
            refuse(errno.ENOMEM)()
        return real(self, message)

    monkeypatch.setattr(HandedOver, "_map", failing)
    data = [noise(1, 10_000)]
    with fill(data) as arena, WriterClient.start(storage, thread=True) as writer:
        first = writer.submit(storage, make_job(data, step=1), [b"{}"], arena)
        if failures == 1:
            assert first.result(60).bytes_written >= 10_000
        else:
            with pytest.raises(HoldfastError, match=r"cannot map .* this save is lost, the next one tries again"):
                first.result(60)
        second = writer.submit(storage, make_job(data, step=2), [b"{}"], arena)
        assert second.result(60).bytes_written >= 10_000
        assert data[0] in stored(storage, "step_00000002").values()


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
def test_a_message_that_the_kernel_has_no_room_for_is_said_again(monkeypatch, code):
    """Neither the message nor its order, nor what comes with it, is lost."""
    left = [5]
    real = frames._send_some

    def failing(*args):
        if left[0]:
            left[0] -= 1
            refuse(code)()
        return real(*args)

    monkeypatch.setattr(frames, "_send_some", failing)
    one, two = (Channel(end) for end in socket.socketpair())
    fd = os.open(os.devnull, os.O_RDONLY)
    one.send({"number": 1}, (b"attached",), (fd,))
    one.send({"number": 2})
    os.close(fd)
    first, second = two.receive(), two.receive()
    assert (first.header["number"], first.attachments, second.header["number"]) == (1, (b"attached",), 2)
    assert (left[0], len(first.fds)) == (0, 1)
    os.close(first.fds[0])
    one.close()
    two.close()


def test_no_thread_for_the_pages_of_an_arena(monkeypatch):
    """They are faulted by the first copy then."""
    arena = arena_module.Arena.create(1 << 16)

    def refused(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(arena_module.threading.Thread, "start", refused)
        arena.prefault()
    assert arena.prefaulted.is_set()
    arena.view[:3] = b"abc"
    arena.close()


@pytest.fixture
def fresh(monkeypatch):
    """What was found out about the system is found out anew; no writer or memory of an earlier test serves saves."""
    monkeypatch.setattr(functions, "_clients", {})
    monkeypatch.setattr(functions, "_idle", {})
    caches = (arena_module.can_share_memory, shared_reads._can_watch)
    for one in caches:
        one.cache_clear()
    yield
    for client in functions._clients.values():
        client.close()
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_a_sandbox_without_memfd_or_pidfd(tmp_path, monkeypatch, fresh, name, code):
    """The calls are there and refused, as in gVisor and old containers: saves, runs and loads work all the same."""
    monkeypatch.setattr(os, name, refuse(code))
    model = torch.nn.Linear(2, 2)
    hf.save(tmp_path / "one", {"model": model})
    with hf.Checkpointer(tmp_path / "run", {"model": model}, every=1) as ck:
        ck.step(loss=1.0)
    assert torch.equal(hf.load(tmp_path / "one")["model"]["weight"], model.weight)
    assert [one.name for one in (tmp_path / "run").iterdir() if one.name.startswith("step_")] == ["step_00000001"]
    assert conversation.can_run_process() == (name != "memfd_create")
    assert not shared_reads.can_share()
