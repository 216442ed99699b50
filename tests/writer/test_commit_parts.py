"""Several writers store their parts, one commits them."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit

from holdfast.checkpoint.verify import verify
from holdfast.errors import CheckpointError, CheckpointExistsError, CorruptCheckpointError, HoldfastError, StorageError
from holdfast.format.commit import PartSummary, read_manifest
from holdfast.format.division import Division
from holdfast.format.parts import part_name, put_part
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob, SaveJob, SaveResult
from holdfast.writer.save import _collect, commit_parts

SAVE = "aaaaaaaa-7"
DIRECTORY = "checkpoint_000003"
FIELDS = {"run_id": "run", "checkpoint_id": f"id-{SAVE}", "attempt": 1, "step": 7, "world_size": 2}


def part(writer: int, contents: list[bytes], **fields: Any) -> SaveJob:
    """The part of one rank, under names that carry its number."""
    job = kit.make_job(contents, directory=DIRECTORY)
    plans = tuple(
        type(plan)(path=f"item{number}-{writer:05d}-{SAVE}.safetensors", size=plan.size, arena_offset=plan.arena_offset)
        for number, plan in enumerate(job.files)
    )
    blobs = (type(job.blobs[0])(path=f"rank-{writer:05d}-{SAVE}.json", role="rank"),)
    return SaveJob(
        directory=DIRECTORY, save_id=SAVE, writer=writer, files=plans, blobs=blobs, manifest=FIELDS, part=True, **fields
    )


def parts(*writers: int, **fields: Any) -> PartsJob:
    fields.setdefault("run", False)
    return PartsJob(directory=DIRECTORY, save_id=SAVE, writers=writers, manifest=dict(FIELDS), **fields)


def contents(writer: int) -> list[bytes]:
    return [kit.noise(writer, 100_000 + writer), kit.noise(50 + writer, 10)]


def store(client: WriterClient, storage: Storage, writer: int, **fields: Any) -> Future[SaveResult]:
    with kit.fill(contents(writer)) as arena:
        future = client.submit(storage, part(writer, contents(writer), **fields), [b"{}"], arena)
        future.exception(60)
    return future


@pytest.fixture(params=["processes", "threads"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Storage, list[WriterClient]]]:
    """A storage and three writers: of two ranks and of the driver."""
    storage: Storage = LocalStorage(tmp_path) if request.param == "processes" else MemoryStorage(tmp_path.name)
    with ExitStack() as stack:
        yield storage, [stack.enter_context(WriterClient.start(storage)) for _ in range(3)]


def test_two_parts_make_a_checkpoint(place: tuple[Storage, list[WriterClient]]) -> None:
    """Each part is durable files and a part file; the commit lists all of them and takes the part files away."""
    storage, (one, two, driver) = place
    for writer, client in enumerate((one, two)):
        result = store(client, storage, writer).result(0)
        assert result.manifest == b""
        assert result.bytes_total == result.bytes_written > 100_000
    assert storage.exists(f"{DIRECTORY}/{part_name(1, SAVE)}")
    with pytest.raises(CheckpointError):
        read_manifest(storage, DIRECTORY)
    result = driver.commit_parts(storage, parts(0, 1)).result(60)
    manifest = read_manifest(storage, DIRECTORY)
    assert verify(storage, DIRECTORY, deep=True).ok
    assert (manifest.writers, manifest.step, manifest.world_size) == ((0, 1), 7, 2)
    assert result.bytes_total == manifest.total_bytes
    assert {entry.writer for entry in manifest.files} == {0, 1}
    stored = kit.stored(storage, DIRECTORY)
    assert all(data in stored.values() for writer in (0, 1) for data in contents(writer))
    names = {info.path.split("/")[1] for info in storage.list(DIRECTORY)}
    assert names == {"manifest.json", *(entry.path for entry in manifest.files)}


def test_a_missing_part_stops_the_commit(place: tuple[Storage, list[WriterClient]]) -> None:
    """The error names the rank, and the files of the other ranks are removed."""
    storage, (one, _, driver) = place
    store(one, storage, 0)
    storage.put(f"{DIRECTORY}/mine.txt", b"mine")
    with pytest.raises(CheckpointError, match="the writers of ranks 1, 2"):
        driver.commit_parts(storage, parts(0, 1, 2)).result(60)
    assert [info.path for info in storage.list(DIRECTORY)] == [f"{DIRECTORY}/mine.txt"]


def test_a_late_part_is_waited_for(place: tuple[Storage, list[WriterClient]]) -> None:
    """A dead worker's writer is still at it: with wait_s its part is found when it comes."""
    storage, (one, two, driver) = place
    store(one, storage, 0)
    future = driver.commit_parts(storage, parts(0, 1, wait_s=30))
    assert not future.done()
    store(two, storage, 1)
    future.result(30)
    assert read_manifest(storage, DIRECTORY).writers == (0, 1)


def test_the_wait_is_bounded(place: tuple[Storage, list[WriterClient]]) -> None:
    """Nobody finishes it: given up after wait_s, and said."""
    storage, (one, _, driver) = place
    store(one, storage, 0)
    with pytest.raises(CheckpointError, match=r"within 0\.1 s from the writers of rank 1"):
        driver.commit_parts(storage, parts(0, 1, wait_s=0.1)).result(20)


def test_parts_of_different_states_are_refused(place: tuple[Storage, list[WriterClient]]) -> None:
    """What the ranks derived about the state must agree."""
    storage, (one, two, driver) = place
    store(one, storage, 0, division={"num_ranks": 2, "structure": "a"})
    store(two, storage, 1, division={"num_ranks": 2, "structure": "b"})
    with pytest.raises(CheckpointError, match="rank 1 has another structure"):
        driver.commit_parts(storage, parts(0, 1)).result(60)
    assert list(storage.list(DIRECTORY)) == []


def test_a_part_without_its_files_is_refused(place: tuple[Storage, list[WriterClient]]) -> None:
    """Something removed a file behind our back: no commit of what is not there."""
    storage, (one, _, driver) = place
    store(one, storage, 0)
    storage.delete(f"{DIRECTORY}/item0-00000-{SAVE}.safetensors")
    with pytest.raises(CorruptCheckpointError, match="item0-00000"):
        driver.commit_parts(storage, parts(0)).result(60)


def test_a_committed_checkpoint_is_not_replaced(place: tuple[Storage, list[WriterClient]]) -> None:
    """Another checkpoint has the name: refused, and its files are untouched."""
    storage, (one, _, driver) = place
    with kit.fill([b"other"]) as arena:
        driver.submit(storage, kit.make_job([b"other"], directory=DIRECTORY), [b"{}"], arena).result(60)
    before = kit.stored(storage, DIRECTORY)
    store(one, storage, 0)
    with pytest.raises(CheckpointExistsError):
        driver.commit_parts(storage, parts(0)).result(60)
    assert kit.stored(storage, DIRECTORY) == before
    assert verify(storage, DIRECTORY, deep=True).ok
    assert not storage.exists(f"{DIRECTORY}/{part_name(0, SAVE)}")


def test_a_part_can_link_to_the_one_before(tmp_path: Path) -> None:
    """What did not change since this rank's last part is linked, as in a save of one rank."""
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client, kit.fill(contents(1)) as arena:
        for number in (7, 8):
            job = part(1, contents(1), reuse=True)
            save_id = f"aaaaaaaa-{number}"
            plans = tuple(
                type(plan)(
                    path=plan.path.replace(SAVE, save_id), size=plan.size, arena_offset=plan.arena_offset, stable=True
                )
                for plan in job.files
            )
            fields = {**job.to_json(), "save_id": save_id, "directory": f"checkpoint_{number:06d}"}
            job = SaveJob.from_json({**fields, "files": [plan.to_json() for plan in plans], "blobs": []})
            result = client.submit(storage, job, [], arena).result(60)
    assert result.bytes_reused == sum(map(len, contents(1)))


@pytest.mark.parametrize("at", range(0, 26, 3))
def test_a_failing_disk_leaves_no_part(tmp_path: Path, at: int) -> None:
    """EIO at any operation of a part: no part file without whole files."""
    storage = FaultyStorage(tmp_path, fail_at={at: errno.EIO})
    with WriterClient.start(storage, thread=True) as client:
        error = store(client, storage, 0).exception(0)
    if error is not None:
        assert isinstance(error, StorageError)
        assert kit.tree(tmp_path) in ({}, {f"{DIRECTORY}/": b""})
    with WriterClient.start(thread=True) as client:
        future = client.commit_parts(LocalStorage(tmp_path), parts(0))
        assert (future.exception(30) is None) == (error is None)


def test_a_windowed_part(tmp_path: Path) -> None:
    """A part may come in windows as well."""
    storage = LocalStorage(tmp_path)
    data = kit.noise(3, kit.MIB + 5)
    with WriterClient.start(storage) as client, kit.fill([data]) as arena:
        future = client.submit(storage, part(0, [data], windowed=True), [b"{}"], arena)
        client.window(future, file_no=0, file_offset=0, arena_offset=0, nbytes=len(data)).result(30)
        client.seal(future)
        assert future.result(30).manifest == b""
        client.commit_parts(storage, parts(0)).result(30)
    assert data in kit.stored(storage, DIRECTORY).values()


def test_jobs_wait_for_each_other_in_order(tmp_path: Path) -> None:
    """What is handed over first is done first, also when the waiting takes its time; close finishes both."""
    storage = LocalStorage(tmp_path)
    order: list[str] = []
    done = threading.Event()
    with WriterClient.start(storage) as one, WriterClient.start(storage) as driver:
        first = driver.commit_parts(storage, parts(0, wait_s=20))
        second = driver.ingest(storage, kit.make_intake({0: kit.make_files(tmp_path / "s", {"x": b"1"})}))
        first.add_done_callback(lambda _: order.append("parts"))
        second.add_done_callback(lambda _: (order.append("ingest"), done.set()))
        store(one, storage, 0)
        assert done.wait(30)
    assert order == ["parts", "ingest"]
    assert first.exception() is None
    with pytest.raises(HoldfastError):
        driver.commit_parts(storage, parts(0))


@pytest.mark.parametrize("committed", [False, True])
def test_a_complete_part_is_not_written_again(tmp_path: Path, committed: bool) -> None:
    """A worker's writer died after its part was complete: the repeated job touches no file, committed or not."""
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client:
        first = store(client, storage, 1).result(0)
        if committed:
            client.commit_parts(storage, parts(1)).result(30)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    with WriterClient.start(storage) as client, kit.fill(contents(1)) as arena:
        conversation = client._conversation
        with conversation.lock:
            send, conversation.send = conversation.send, lambda *_a, **_k: None  # type: ignore[method-assign]
            future = client.submit(storage, part(1, contents(1)), [b"{}"], arena)
            conversation.send = send  # type: ignore[method-assign]
            conversation._repeat("it died")
        again = future.result(30)
    assert (again.manifest, again.bytes_total, again.bytes_written) == (b"", first.bytes_total, 0)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


class Watching(MemoryStorage):
    """Notes whether the garbage collector runs while it works."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.running: set[tuple[str, bool]] = set()

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self.running.add(("open", gc.isenabled()))
        return super().open(*args, **kwargs)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        self.running.add(("put", gc.isenabled()))
        return super().put(*args, **kwargs)

    def list(self, *args: Any, **kwargs: Any) -> Any:
        self.running.add(("list", gc.isenabled()))
        return super().list(*args, **kwargs)


def test_the_garbage_collector_runs_while_the_storage_works() -> None:
    """A storage may try again for long: garbage must not pile up meanwhile."""
    storage = Watching("watching")
    for writer in (0, 1):
        put_part(storage, DIRECTORY, SAVE, PartSummary(writer=writer))
    commit_parts(storage, parts(0, 1), None, again=False)
    assert storage.running == {("open", True), ("put", True), ("list", True)}


def test_what_all_parts_say_alike_is_in_memory_once(tmp_path: Path) -> None:
    """Ten thousand ranks have the same samples of the same 64 tensors: rank 0's writer must not hold all of them."""
    storage = LocalStorage(tmp_path)
    samples = {f"layer.{number}": "xxh3:00" for number in range(64)}
    for writer in range(3):
        division = Division(num_ranks=3, structure="one", samples=samples if writer < 2 else {})
        put_part(storage, DIRECTORY, SAVE, PartSummary(writer=writer, division=division))
    found = _collect(storage, parts(0, 1, 2))
    assert [one.writer for one in found] == [0, 1, 2]
    assert found[0].division is found[1].division
    assert found[2].division == Division(num_ranks=3, structure="one")
