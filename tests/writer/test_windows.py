"""Saves through a small arena, window after window."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit

from holdfast import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import PendingCall


@cache
def contents() -> list[bytes]:
    return [kit.noise(1, 9 * kit.MIB + 4097), b"", kit.noise(2, 5), kit.noise(3, 2 * kit.MIB)]


def stream(
    client: WriterClient, save: PendingCall, arena: Arena, contents: list[bytes], *, padded: bool = False
) -> None:
    """Two windows of half the arena take turns, as the trainer does it."""
    window = arena.size // 2
    slots = deque([0, window])
    waiting: deque[tuple[Future[None], int]] = deque()
    for number, content in enumerate(contents):
        for start in range(0, len(content), window):
            if not slots:
                done, slot = waiting.popleft()
                done.result(30)
                slots.append(slot)
            slot = slots.popleft()
            part = content[start : start + window]
            room = kit.pages(len(part))
            arena.view[slot : slot + room] = part + bytes(room - len(part))
            size = room if padded else len(part)
            sent = client.window(save, file_no=number, file_offset=start, arena_offset=slot, nbytes=size)
            waiting.append((sent, slot))
    for done, _ in waiting:
        done.result(30)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_windows_give_the_files_of_one_big_arena(tmp_path: Path, kind: str, *, padded: bool) -> None:
    """Streaming through 2 x 1 MiB stores the same bytes and the same digests as a whole arena."""
    storage: Storage = LocalStorage(tmp_path) if kind == "process" else MemoryStorage(f"windows-{padded}")
    with WriterClient.start(storage) as client:
        assert (client.process_id is None) == (kind == "thread")
        with kit.fill(contents()) as arena:
            job = kit.make_job(contents())
            client.submit(storage, job, [b"{}"], arena).result(60)
            whole = Checkpoint.at(storage, job.directory).manifest
        with Arena.create(2 * kit.MIB) as arena:
            job = kit.make_job(contents(), step=2, windowed=True)
            future = client.submit(storage, job, [b"{}"], arena)
            stream(client, future, arena, contents(), padded=padded)
            client.seal(future)
            result = future.result(60)
    manifest = Checkpoint.at(storage, job.directory).manifest
    assert [(e.size, e.digest, e.chunks and e.chunks[1]) for e in manifest.files if e.role == "tensors"] == [
        (e.size, e.digest, e.chunks and e.chunks[1]) for e in whole.files if e.role == "tensors"
    ]
    assert result.bytes_written == manifest.total_bytes
    for plan, content in zip(job.files, contents(), strict=True):
        assert storage.read(f"{job.directory}/{plan.path}") == content


def expect_failure(tmp_path: Path, act: Any, match: str) -> None:
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client, Arena.create(4 * kit.MIB) as arena:
        future = client.submit(storage, kit.make_job([kit.noise(1, 3 * kit.MIB)], windowed=True), [b"{}"], arena)
        act(client, future)
        with pytest.raises(HoldfastError, match=match):
            future.result(30)
        assert list(storage.list()) == []
        with pytest.raises(HoldfastError, match="ended already"):
            client.window(future, file_no=0, file_offset=0, arena_offset=0, nbytes=kit.MIB).result(30)


def test_abandon_removes_the_files(tmp_path: Path) -> None:
    """An abandoned save fails its future and leaves nothing."""

    def act(client: WriterClient, save: PendingCall) -> None:
        client.window(save, file_no=0, file_offset=0, arena_offset=0, nbytes=kit.MIB).result(30)
        client.abandon(save)

    expect_failure(tmp_path, act, "abandoned")


def test_a_seal_before_the_end_is_refused(tmp_path: Path) -> None:
    """A save sealed with data missing is not committed."""

    def act(client: WriterClient, save: PendingCall) -> None:
        client.window(save, file_no=0, file_offset=0, arena_offset=0, nbytes=kit.MIB).result(30)
        client.seal(save)

    expect_failure(tmp_path, act, "before all data")


@pytest.mark.parametrize(("offset", "nbytes"), [(kit.MIB, kit.MIB), (0, 100), (0, 4 * kit.MIB)])
def test_windows_out_of_order_are_refused(tmp_path: Path, offset: int, nbytes: int) -> None:
    """A gap, an odd size in the middle or too much data fails the save instead of storing something else."""

    def act(client: WriterClient, save: PendingCall) -> None:
        client.window(save, file_no=0, file_offset=offset, arena_offset=0, nbytes=nbytes).exception(30)

    expect_failure(tmp_path, act, "window")


def test_a_full_disk_answers_every_window(tmp_path: Path) -> None:
    """When the disk is full in the middle, all windows are answered with the cause: the trainer cannot hang."""
    storage = FaultyStorage(tmp_path, disk_bytes=2 * kit.MIB)
    contents = [kit.noise(1, 6 * kit.MIB)]
    with WriterClient.start(storage) as client, Arena.create(2 * kit.MIB) as arena:
        future = client.submit(storage, kit.make_job(contents, windowed=True), [b"{}"], arena)
        with pytest.raises(HoldfastError):
            stream(client, future, arena, contents)
        assert future.exception(30) is not None
    assert not (tmp_path / "step_00000001").exists()
