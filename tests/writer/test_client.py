"""Saves through the writer: the same files by process and thread, reuse, failures."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import writer_kit as kit
from process_kit import wait_until

from holdfast.checkpoint.verify import verify_files
from holdfast.errors import CheckpointExistsError, ConfigError, HoldfastError, StorageError, StorageFullError
from holdfast.format.commit import read_manifest
from holdfast.format.digest import CHUNK, chunk_digests
from holdfast.storage import FileWriter, LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.pipeline import Previous, read_previous

CONTENTS = [kit.noise(1, 3 * kit.MIB + 17), kit.noise(2, 4096), b"", kit.noise(3, 100)]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[tuple[Storage, WriterClient]]:
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client:
        yield storage, client


def save(client: WriterClient, storage: Storage, contents: list[bytes], **fields: object):
    with kit.fill(contents) as arena:
        job = kit.make_job(contents, **fields)  # type: ignore[arg-type]
        return client.submit(storage, job, [b'{"a":1}'], arena).result(60)


def test_process_and_thread_write_the_same(local: tuple[Storage, WriterClient]) -> None:
    """The same job through a process to a disk and through a thread to memory stores the same bytes and digests."""
    disk, process = local
    memory = MemoryStorage("writer-same")
    with WriterClient.start(memory) as thread:
        assert process.process_id is not None
        assert thread.process_id is None
        with kit.fill(CONTENTS) as arena:
            job = kit.make_job(CONTENTS)
            for storage, client in ((disk, process), (memory, thread)):
                client.submit(storage, job, [b'{"a":1}'], arena).result(60)
    first, second = read_manifest(disk, job.directory), read_manifest(memory, job.directory)
    assert first.files == second.files
    for entry in first.files:
        assert disk.read(f"{job.directory}/{entry.path}") == memory.read(f"{job.directory}/{entry.path}")
    for plan, content in zip(job.files, CONTENTS, strict=True):
        assert disk.read(f"{job.directory}/{plan.path}") == content


def test_result_counts(local: tuple[Storage, WriterClient]) -> None:
    """The result names every byte and the time of each phase."""
    storage, client = local
    result = save(client, storage, CONTENTS)
    manifest = read_manifest(storage, result.directory)
    assert result.bytes_total == manifest.total_bytes
    assert result.bytes_written == sum(entry.size for entry in manifest.files)
    assert result.bytes_reused == 0
    assert set(result.seconds) == {"digest", "write", "commit", "total"}
    assert result.manifest == storage.read(f"{result.directory}/manifest.json")


def test_existing_checkpoint_is_refused_and_kept(local: tuple[Storage, WriterClient]) -> None:
    """A second save of the same name fails with the right type; the first stays whole and no file is left over."""
    storage, client = local
    result = save(client, storage, CONTENTS)
    before = {info.path for info in storage.list(result.directory)}
    with pytest.raises(CheckpointExistsError):
        save(client, storage, [b"other"])
    assert {info.path for info in storage.list(result.directory)} == before


def test_overwrite_replaces(local: tuple[Storage, WriterClient]) -> None:
    """With overwrite the new checkpoint takes the place and the old files go."""
    storage, client = local
    save(client, storage, CONTENTS)
    result = save(client, storage, [b"new"], overwrite=True)
    manifest = read_manifest(storage, result.directory)
    assert {info.path.split("/")[1] for info in storage.list(result.directory)} == {
        "manifest.json",
        *(entry.path for entry in manifest.files),
    }


def test_unchanged_files_are_linked_nine_times(tmp_path: Path, local: tuple[Storage, WriterClient]) -> None:
    """A stable file is one inode for ten checkpoints, then it is written again; a changed one is always written."""
    storage, client = local
    frozen = kit.noise(9, 2 * kit.MIB)
    inodes = []
    for step in range(1, 13):
        contents = [kit.noise(step, 100_000), frozen]
        with kit.fill(contents) as arena:
            job = kit.make_job(contents, step=step, stable=(1,), reuse=True)
            result = client.submit(storage, job, [b"{}"], arena).result(60)
        inodes.append(os.stat(tmp_path / job.directory / job.files[1].path).st_ino)
        assert storage.read(f"{job.directory}/{job.files[0].path}") == contents[0]
        entry = next(e for e in read_manifest(storage, job.directory).files if e.path == job.files[1].path)
        if step in (1, 11):
            assert result.bytes_reused == 0
            assert entry.reused_from is None
        else:
            assert result.bytes_reused == len(frozen)
            assert entry.reused_from == f"step_{step - 1:08d}"
    assert len(set(inodes[:10])) == 1
    assert inodes[10] != inodes[9]
    assert inodes[11] == inodes[10]


def test_a_file_that_repeats_is_found_without_being_told(local: tuple[Storage, WriterClient]) -> None:
    """Without `stable`, equal bytes in two saves make the third one a link."""
    storage, client = local
    frozen = kit.noise(9, 300_000)
    reused = [
        save(client, storage, [frozen, kit.noise(step, 5000)], step=step, reuse=True).bytes_reused for step in (1, 2, 3)
    ]
    assert reused == [0, 0, len(frozen)]


def test_reuse_survives_the_loss_of_the_previous_checkpoint(local: tuple[Storage, WriterClient]) -> None:
    """When the previous checkpoint was deleted by hand, the file is written instead."""
    storage, client = local
    frozen = kit.noise(9, 300_000)
    save(client, storage, [frozen], step=1, reuse=True, stable=(0,))
    storage.delete_tree("step_00000001")
    result = save(client, storage, [frozen], step=2, reuse=True, stable=(0,))
    assert result.bytes_reused == 0
    assert frozen in kit.stored(storage, "step_00000002").values()


def test_a_file_that_was_cut_short_is_not_linked(tmp_path: Path, local: tuple[Storage, WriterClient]) -> None:
    """A link would hand the damage on: it is written instead."""
    storage, client = local
    frozen = kit.noise(9, 300_000)
    save(client, storage, [frozen], step=1, reuse=True, stable=(0,))
    (path,) = (tmp_path / "step_00000001").glob("item0-*")
    os.truncate(path, 1000)
    assert save(client, storage, [frozen], step=2, reuse=True, stable=(0,)).bytes_reused == 0
    assert frozen in kit.stored(storage, "step_00000002").values()


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_that_was_changed_in_place_is_not_linked(
    tmp_path: Path, local: tuple[Storage, WriterClient], linked: bool
) -> None:
    """Its size is as before, so the time of its change says so: later saves have the bytes of the memory."""
    storage, client = local
    frozen = kit.noise(9, 300_000)
    save(client, storage, [frozen], step=1, reuse=True, stable=(0,))
    if linked:
        assert save(client, storage, [frozen], step=2, reuse=True, stable=(0,)).bytes_reused
    (path,) = (tmp_path / f"step_0000000{1 + linked}").glob("item0-*")
    with path.open("r+b") as file:
        file.write(b"by hand")
    assert save(client, storage, [frozen], step=3, reuse=True, stable=(0,)).bytes_reused == 0
    assert frozen in kit.stored(storage, "step_00000003").values()


def test_what_an_earlier_life_wrote_is_reused_only_if_its_digests_are_its_own(
    tmp_path: Path, local: tuple[Storage, WriterClient]
) -> None:
    """Tables that were exchanged would link one file in place of another; linked files are written anew, once."""
    storage, client = local
    contents = [kit.noise(1, 3 * CHUNK), kit.noise(2, 3 * CHUNK)]
    for step in (1, 2):
        save(client, storage, contents, step=step, reuse=True, stable=(0,))
    first, second = (read_manifest(storage, f"step_0000000{step}") for step in (1, 2))
    tables = [chunk_digests(item) for item in contents]
    known = read_previous(storage, "step_00000001", first, 0)
    assert [known.same(3 * CHUNK, table) is not None for table in tables] == [True, True]
    known = read_previous(storage, "step_00000002", second, 0)
    assert [known.same(3 * CHUNK, table) is not None for table in tables] == [False, True]
    (digests,) = (tmp_path / "step_00000001").glob("digests-*")
    digests.write_bytes(tables[1] + tables[0])
    assert read_previous(storage, "step_00000001", first, 0) == Previous()


def test_nothing_is_written_or_digested_before_it_is_there(tmp_path: Path, local: tuple[Storage, WriterClient]) -> None:
    """A save that was handed over before its bytes were: the checkpoint has the bytes that came."""
    storage, client = local
    contents = [kit.noise(1, 3 * kit.MIB), kit.noise(2, 5000)]
    with kit.fill([bytes(len(item)) for item in contents]) as arena:
        job = kit.make_job(contents)
        future = client.submit(storage, job, [b"{}"], arena, filled=0)
        assert wait_until((tmp_path / job.directory).exists)
        for plan, item in zip(job.files, contents, strict=True):
            arena.view[plan.arena_offset : plan.arena_offset + plan.size] = item
            client.fill(future, plan.arena_offset + plan.size)
        future.result(60)
    assert [storage.read(f"{job.directory}/{plan.path}") for plan in job.files] == contents
    assert verify_files(storage, job.directory, read_manifest(storage, job.directory)) == []


class _Watched(MemoryStorage):
    """Tells when a file is begun, and when its first bytes are written."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.begun, self.written = threading.Event(), threading.Event()

    def create(self, path: str, size: int) -> FileWriter:
        inner, written = super().create(path, size), self.written

        class Writer(FileWriter):
            def write(self, view: memoryview) -> None:
                written.set()
                inner.write(view)

            def close(self) -> None:
                inner.close()

            def abort(self) -> None:
                inner.abort()

        self.begun.set()
        return Writer()


def test_a_file_that_is_begun_waits_for_its_bytes() -> None:
    """The first file is open and its bytes are not there yet: nothing is written until they are."""
    storage, contents = _Watched(), [kit.noise(1, 5000)]
    with kit.fill([bytes(5000)]) as arena, WriterClient.start(storage) as client:
        job = kit.make_job(contents)
        future = client.submit(storage, job, [b"{}"], arena, filled=0)
        assert storage.begun.wait(60)
        assert not storage.written.wait(0.2)
        plan = job.files[0]
        arena.view[plan.arena_offset : plan.arena_offset + plan.size] = contents[0]
        client.fill(future, plan.arena_offset + plan.size)
        future.result(60)
    assert storage.read(f"{job.directory}/{plan.path}") == contents[0]


def test_unchanged_ranges(local: tuple[Storage, WriterClient]) -> None:
    """Runs of equal chunks are told for a file that changed in part, and only when asked."""
    storage, client = local
    first = kit.noise(1, 4 * CHUNK + 10)
    second = bytearray(first)
    second[CHUNK + 5] ^= 1
    whole = kit.noise(2, 1000)
    save(client, storage, [first, whole], step=1, want_unchanged=True)
    result = save(client, storage, [bytes(second), whole], step=2, want_unchanged=True)
    assert result.unchanged == ((0, 0, CHUNK), (0, 2 * CHUNK, 2 * CHUNK + 10))
    assert save(client, storage, [first, whole], step=3).unchanged == ()


def test_a_full_disk_reaches_the_future(tmp_path: Path) -> None:
    """ENOSPC in the writer process is StorageFullError in the trainer; older checkpoints stay, remains go."""
    small = [kit.noise(1, 100_000)]
    storage = FaultyStorage(tmp_path, disk_bytes=2 * kit.MIB)
    with WriterClient.start(storage) as client:
        assert client.process_id is not None
        old = save(client, storage, small, step=1)
        with pytest.raises(StorageFullError):
            save(client, storage, [kit.noise(2, 4 * kit.MIB)], step=2)
        assert read_manifest(storage, old.directory)
        assert not (tmp_path / "step_00000002").exists()
        assert save(client, storage, small, step=3).directory == "step_00000003"


def test_an_error_of_the_disk_reaches_the_future(tmp_path: Path) -> None:
    """EIO at fsync fails the save: never a commit of data that may not be there."""
    storage = FaultyStorage(tmp_path, fail_on={"fsync": errno.EIO})
    with WriterClient.start(storage) as client, pytest.raises(StorageError):
        save(client, storage, CONTENTS)
    assert not (tmp_path / "step_00000001" / "manifest.json").exists()


def test_wrong_use_is_refused(local: tuple[Storage, WriterClient]) -> None:
    """A storage without description, missing small files and a run job without a run name the mistake."""
    storage, client = local
    with Arena.create(4096) as arena:
        with pytest.raises(ConfigError, match="described"):
            client.submit(MemoryStorage("writer-wrong"), kit.make_job([b"a"]), [b"{}"], arena)
        with pytest.raises(HoldfastError, match="0 small files"):
            client.submit(storage, kit.make_job([b"a"], step=7), [], arena).result(30)
        with pytest.raises(HoldfastError, match="open_run"):
            client.submit(storage, kit.make_job([b"a"], step=8, run=True), [b"{}"], arena).result(30)
    assert list(storage.list()) == []


def test_large_small_files_do_not_block(local: tuple[Storage, WriterClient]) -> None:
    """A small file larger than the socket's buffer arrives whole."""
    storage, client = local
    index = kit.noise(5, 24 * kit.MIB)
    with Arena.create(4096) as arena:
        job = kit.make_job([b"a"])
        client.submit(storage, job, [index], arena).result(60)
    assert storage.read(f"{job.directory}/{job.blobs[0].path}") == index


def test_an_arena_may_close_while_it_is_written(local: tuple[Storage, WriterClient]) -> None:
    """Closing the trainer's arena right after submit does not harm the save, by process or by thread."""
    storage, client = local
    contents = [kit.noise(6, 32 * kit.MIB)]
    arena = kit.fill(contents)
    job = kit.make_job(contents)
    future = client.submit(storage, job, [b"{}"], arena)
    arena.close()
    future.result(60)
    assert storage.read(f"{job.directory}/{job.files[0].path}") == contents[0]
    with WriterClient.start(thread=True) as thread:
        arena = kit.fill(contents)
        job = kit.make_job(contents, step=2)
        future = thread.submit(storage, job, [b"{}"], arena)
        arena.close()
        future.result(60)
    assert storage.read(f"{job.directory}/{job.files[0].path}") == contents[0]


def test_probe(tmp_path: Path, local: tuple[Storage, WriterClient]) -> None:
    """The probe reports free space, leaves nothing behind, and meets the errors a save would meet."""
    storage, client = local
    answer = client.probe(storage, directory=".probe-aaaaaaaa").result(30)
    assert answer["free_bytes"] > 0
    assert list(storage.list()) == []
    full = FaultyStorage(tmp_path / "full", disk_bytes=10)
    with pytest.raises(StorageFullError):
        client.probe(full, directory=".probe-aaaaaaaa").result(30)


def test_what_other_ranks_were_told_is_told_again_after_a_death(local: tuple[Storage, WriterClient]) -> None:
    """A wish of this rank that nobody has acted on is repeated to a new writer, once; one that was done is not."""
    _, client = local
    conversation, header = client._conversation, {"rank": 0}
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "send", lambda header, *_: sent.append(header.get("what", header["do"])))
        patch.setattr(conversation, "tell_membership", lambda: sent.append("join"))
        patch.setattr(conversation, "membership", (header, None, ()))
        client.tell_ranks("want", kind="stop")
        client.tell_ranks("want", kind="stop")
        client.tell_ranks("part_failed", save="a", error={})
        sent.clear()
        conversation._repeat("died")
        assert [one for one in sent if one != "storage"] == ["join", "want", "part_failed"]
        client.tell_ranks("acted", step=3)
        sent.clear()
        conversation._repeat("died")
        assert [one for one in sent if one != "storage"] == ["join", "part_failed"]
