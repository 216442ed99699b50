"""Reported directories become checkpoints: by process to a disk, by thread to memory."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import writer_kit as kit

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HoldfastError,
    StorageError,
)
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveResult

BIG = kit.noise(1, 17 * kit.MIB + 100)
RANKS = {
    0: {"model.pt": BIG, "own.bin": b"a", "deep/only0.bin": b"0" * 70_000, "same.json": b"{}"},
    1: {"model.pt": BIG, "own.bin": b"b", "only1.bin": b"", "same.json": b"{}"},
}
MERGED = {
    "model.pt": BIG,
    "own.bin": b"a",
    "own.rank-1.bin": b"b",
    "deep/only0.bin": b"0" * 70_000,
    "only1.bin": b"",
    "same.json": b"{}",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(params=["process", "thread"])
def client(request: pytest.FixtureRequest) -> Iterator[WriterClient]:
    with WriterClient.start(thread=request.param == "thread") as client:
        yield client


@pytest.fixture
def sources(tmp_path: Path) -> dict[int, Path]:
    return {rank: kit.make_files(tmp_path / f"rank{rank}", files) for rank, files in RANKS.items()}


def user_files(storage: Storage, directory: str = "checkpoint_000001") -> dict[str, bytes]:
    """Contents of a verified checkpoint, without what Holdfast added."""
    checkpoint = Checkpoint.at(storage, directory)
    assert checkpoint.verify().ok
    manifest = checkpoint.manifest
    return {e.path: storage.read(f"{directory}/{e.path}") for e in manifest.files if e.role != "digests"}


def take(client: WriterClient, storage: Storage, sources: dict[int, Path], **fields: object) -> SaveResult:
    return client.ingest(storage, kit.make_intake(sources, **fields)).result(60)  # type: ignore[arg-type]


@pytest.mark.parametrize("owned", [False, True])
def test_directories_of_two_ranks_merge(
    root: Path, client: WriterClient, sources: dict[int, Path], owned: bool
) -> None:
    """Equal files are stored once, differing ones all, unique ones as they are; sources stay or go as asked."""
    storage = LocalStorage(root)
    before = {rank: kit.tree(path) for rank, path in sources.items()}
    result = take(client, storage, sources, owned=owned)
    assert user_files(storage) == MERGED
    (warning,) = result.warnings
    assert "own.rank-1.bin" in warning
    manifest = Checkpoint.at(storage, "checkpoint_000001").manifest
    assert manifest.writers == (0, 1)
    assert {entry.path: entry.role for entry in manifest.files if entry.role != "user"} == {
        f"digests-00000-{manifest.checkpoint_id[3:]}.bin": "digests"
    }
    names = {path.split("/")[0] for path in kit.tree(root / "checkpoint_000001")}
    assert names == {entry.path.split("/")[0] for entry in manifest.files} | {"manifest.json"}
    if owned:
        assert not any(path.exists() for path in sources.values())
        assert result.bytes_written < 5000, "owned files are moved, not copied"
    else:
        assert {rank: kit.tree(path) for rank, path in sources.items()} == before
        assert result.bytes_written > len(BIG)
    assert result.bytes_total == manifest.total_bytes
    assert {"digest", "write", "commit", "total"} <= set(result.seconds)


@pytest.mark.parametrize("owned", [False, True])
def test_storages_without_a_disk_get_copies(tmp_path: Path, sources: dict[int, Path], owned: bool) -> None:
    """Memory (an object store, later): the same files and digests; owned sources are removed."""
    memory, disk = MemoryStorage(tmp_path.name), LocalStorage(tmp_path / "run")
    with WriterClient.start(memory) as client:
        take(client, disk, sources, start_id="bbbbbbbb")
        take(client, memory, sources, owned=owned, start_id="bbbbbbbb")
    assert user_files(memory) == user_files(disk) == MERGED
    entries = [Checkpoint.at(storage, "checkpoint_000001").manifest.files for storage in (memory, disk)]
    digests = [{entry.path: entry.digest for entry in files if entry.role == "user"} for files in entries]
    assert digests[0] == digests[1]
    assert all(path.exists() != owned for path in sources.values())


def test_many_tiny_owned_files_are_copied_together(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """A move takes two fsyncs, so 3000 of them took 17 s in place of 1 s; what is not tiny is moved as ever."""
    files = {f"{number}.bin": bytes([number]) * 100 for number in range(40)} | {"big.pt": b"1" * 70_000}
    source = kit.make_files(tmp_path / "source", files)
    inodes = {name: (source / name).stat().st_ino for name in files}
    take(client, LocalStorage(root), {0: source}, owned=True)
    assert user_files(LocalStorage(root)) == files
    same = {name for name in files if (root / "checkpoint_000001" / name).stat().st_ino == inodes[name]}
    assert same == {"big.pt"}
    assert not source.exists()


def test_owned_files_are_moved_unless_others_hold_them(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """A file with a second name is copied: whoever writes the other name does not change the checkpoint."""
    source = kit.make_files(tmp_path / "source", {"moved.pt": b"1" * 9000, "linked.pt": b"2" * 9000})
    mine = tmp_path / "mine.pt"
    mine.hardlink_to(source / "linked.pt")
    inode = (source / "moved.pt").stat().st_ino
    take(client, LocalStorage(root), {0: source}, owned=True)
    mine.write_bytes(b"3" * 9000)
    assert user_files(LocalStorage(root)) == {"moved.pt": b"1" * 9000, "linked.pt": b"2" * 9000}
    assert (root / "checkpoint_000001/moved.pt").stat().st_ino == inode
    assert not source.exists()


@pytest.mark.parametrize("owned", [False, True])
def test_links_are_resolved(root: Path, tmp_path: Path, client: WriterClient, owned: bool) -> None:
    """What links lead to is part of the checkpoint, and is never moved or removed, whoever owns the link."""
    outside = kit.make_files(tmp_path / "outside", {"base.bin": b"base", "dir/x.bin": b"x"})
    source = kit.make_files(tmp_path / "source", {"own.bin": b"own"})
    (source / "file.bin").symlink_to(outside / "base.bin")
    (source / "dir").symlink_to(outside / "dir")
    (source / "again.bin").symlink_to("own.bin")
    whole = tmp_path / "whole"
    whole.symlink_to(outside)
    storage = LocalStorage(root)
    take(client, storage, {0: source, 1: whole}, owned=owned)
    assert user_files(storage) == {
        "own.bin": b"own",
        "again.bin": b"own",
        "file.bin": b"base",
        "dir/x.bin": b"x",
        "base.bin": b"base",
    }
    assert not any(path.is_symlink() for path in (root / "checkpoint_000001").rglob("*"))
    assert kit.tree(outside) == {"base.bin": b"base", "dir/x.bin": b"x"}
    assert source.exists() != owned
    assert whole.is_symlink() != owned


def test_one_file_is_a_checkpoint(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """A reported FILE is a checkpoint of that file, and its metadata go along."""
    source = kit.make_files(tmp_path / "source", {"model.pt": b"weights", ".model.pt.metadata.json": b'{"a":1}'})
    take(client, LocalStorage(root), {0: source / "model.pt"}, owned=True)
    assert user_files(LocalStorage(root)) == {"model.pt": b"weights"}
    assert json.loads((root / "checkpoint_000001/.metadata.json").read_bytes()) == {"a": 1}
    assert kit.tree(source) == {}


def test_empty_directories_make_an_empty_checkpoint(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """Metrics with nothing to keep: a checkpoint without files, committed and sound."""
    take(client, LocalStorage(root), {0: kit.make_files(tmp_path / "a", {}), 1: kit.make_files(tmp_path / "b", {})})
    assert user_files(LocalStorage(root)) == {}
    assert kit.tree(root).keys() == {"checkpoint_000001/manifest.json"}


def test_metadata_goes_along(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """`.metadata.json` of the lowest rank that has one lies beside the manifest, not in it."""
    a = kit.make_files(tmp_path / "a", {"x": b"1"})
    b = kit.make_files(tmp_path / "b", {".metadata.json": b'{"n":2}', "deep/.metadata.json": b"a file like any"})
    take(client, LocalStorage(root), {0: a, 1: b})
    assert user_files(LocalStorage(root)) == {"x": b"1", "deep/.metadata.json": b"a file like any"}
    assert json.loads((root / "checkpoint_000001/.metadata.json").read_bytes()) == {"n": 2}


@pytest.mark.parametrize("data", [b"not JSON", b"[1]", b"\xff", b'{"n": 1}' + b" " * 65])
def test_metadata_that_nobody_could_read_are_refused(
    root: Path, tmp_path: Path, client: WriterClient, data: bytes
) -> None:
    """When the directory is reported, not when somebody asks: no JSON object, or not the one of its digest."""
    source = kit.make_files(tmp_path / "a", {"x": b"1", ".metadata.json": data})
    with pytest.raises(ConfigError, match=r"/a \(rank 0\): .metadata.json is not the JSON object"):
        take(client, LocalStorage(root), {0: source})
    assert kit.tree(root) == {}


def make_checkpoint(client: WriterClient, path: Path, contents: list[bytes], **fields: object) -> dict[str, bytes]:
    """A Holdfast checkpoint in a directory of its own; its files."""
    storage = LocalStorage(path.parent)
    with kit.fill(contents) as arena:
        job = kit.make_job(contents, directory=path.name, manifest={"run_id": None, "metrics": {"old": 1}}, **fields)  # type: ignore[arg-type]
        client.submit(storage, job, [b'{"a":1}'], arena).result(60)
    return kit.stored(storage, path.name)


@pytest.mark.parametrize("owned", [False, True])
def test_a_holdfast_checkpoint_stays_one(root: Path, tmp_path: Path, client: WriterClient, owned: bool) -> None:
    """Roles, digest tables and what divides the state go over, the run's fields are new; load() finds what it needs."""
    files = make_checkpoint(client, tmp_path / "saved", [kit.noise(1, 200_000), b"abc"], start_id="bbbbbbbb")
    kit.make_files(tmp_path / "saved", {"README": b"mine", ".metrics.json": b'{"metrics":{"late":1},"pinned":true}'})
    other = kit.make_files(tmp_path / "other", {"x.bin": b"x"})
    storage = LocalStorage(root)
    take(client, storage, {0: other, 1: tmp_path / "saved"}, owned=owned, step=7, metrics={"new": 2}, world_size=2)
    assert user_files(storage) == {
        **{name: data for name, data in files.items() if not name.startswith("digests")},
        "README": b"mine",
        "x.bin": b"x",
    }
    manifest = Checkpoint.at(storage, "checkpoint_000001").manifest
    entries = {entry.path: entry for entry in manifest.files}
    big = next(entry for entry in manifest.files if entry.size == 200_000)
    assert (big.role, big.chunks) == ("tensors", ("digests-00000-" + big.path.split("-", 2)[2][:-12] + ".bin", 0))
    assert entries["README"].role == "user"
    assert (manifest.step, manifest.run_id, dict(manifest.metrics)) == (7, "run", {"new": 2})
    assert (manifest.world_size, manifest.writers) == (1, (0,))
    assert not storage.exists("checkpoint_000001/.metrics.json"), "late metrics and pins were about another checkpoint"
    assert (tmp_path / "saved").exists() != owned


def test_files_of_several_checkpoints_are_kept(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """The lowest rank's can be loaded, the other is beside it with its manifest under another name."""
    one = make_checkpoint(client, tmp_path / "one", [b"abc"], start_id="bbbbbbbb")
    two = make_checkpoint(client, tmp_path / "two", [b"def"], start_id="cccccccc")
    was = (tmp_path / "two/manifest.json").read_bytes()
    result = take(client, LocalStorage(root), {3: tmp_path / "two", 1: tmp_path / "one"})
    assert kit.stored(LocalStorage(root), "checkpoint_000001") == {**one, **two, "manifest.rank-3.json": was}
    roles = {e.path: e.role for e in Checkpoint.at(LocalStorage(root), "checkpoint_000001").manifest.files}
    assert {roles[path] for path in two} == {"user"}
    assert "load() gives that of rank 1" in result.warnings[0]


def test_a_damaged_checkpoint_is_refused(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """Cut short, or changed on the way: named, and nothing is left of the attempt."""
    storage = LocalStorage(root)
    files = make_checkpoint(client, tmp_path / "saved", [kit.noise(1, 200_000)])
    path = tmp_path / "saved" / next(name for name, data in files.items() if len(data) == 200_000)
    data = bytearray(path.read_bytes())
    data[150_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        take(client, storage, {0: tmp_path / "saved"})
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match="199999 bytes"):
        take(client, storage, {0: tmp_path / "saved"})
    assert kit.tree(root) == {}


@pytest.mark.parametrize("name", ["manifest.json", ".metrics.json", ".removing.json"])
def test_names_that_checkpoints_need_are_refused(root: Path, tmp_path: Path, client: WriterClient, name: str) -> None:
    """Files of other tools under our names: the error names them; in a deeper directory they are files like any."""
    source = kit.make_files(tmp_path / "source", {name: b'{"mine": 1}', "x": b""})
    with pytest.raises(ConfigError, match=f"/source/{name}"):
        take(client, LocalStorage(root), {0: source})
    with pytest.raises(ConfigError, match="source"):
        take(client, LocalStorage(root), {0: source / name})
    assert kit.tree(root) == {}
    deeper = kit.make_files(tmp_path / "deeper", {f"deep/{name}": b'{"mine": 1}'})
    take(client, LocalStorage(root), {0: deeper})
    assert user_files(LocalStorage(root)) == {f"deep/{name}": b'{"mine": 1}'}


def bad_link(path: Path) -> None:
    (path / "to-nowhere").symlink_to("gone")


def loop(path: Path) -> None:
    (path / "to-itself").symlink_to(path)


def pipe(path: Path) -> None:
    os.mkfifo(path / "a-pipe")


def plug(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path / "a-socket"))


def odd(path: Path) -> None:
    (path / "back\\slash-to-nowhere").touch()


def temporary(path: Path) -> None:
    (path / ".tmp-a").touch()


def bytes_name(path: Path) -> None:
    Path(os.fsdecode(os.fsencode(path) + b"/\xff-a")).touch()


@pytest.mark.parametrize("spoil", [bad_link, loop, pipe, plug, odd, temporary, bytes_name])
def test_what_no_checkpoint_can_hold_is_refused(
    root: Path, tmp_path: Path, client: WriterClient, spoil: object
) -> None:
    """Dead and circular links, pipes, sockets, impossible names: an error that names the file, nothing stored."""
    source = kit.make_files(tmp_path / "source", {"fine.bin": b"1"})
    spoil(source)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"to-nowhere|to-itself|a-pipe|a-socket|tmp-a|-a"):
        take(client, LocalStorage(root), {0: source}, owned=True)
    assert kit.tree(root) == {}
    assert (source / "fine.bin").exists()


def test_a_directory_that_is_gone(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """The error names the rank and what to do."""
    with pytest.raises(CheckpointNotFoundError, match="rank 3 reported"):
        take(client, LocalStorage(root), {3: tmp_path / "gone"})


def test_sources_and_checkpoint_must_be_apart(root: Path, tmp_path: Path, client: WriterClient) -> None:
    """A directory that holds the run, one inside of the checkpoint, two of one rank, a relative path: refused."""
    storage = LocalStorage(root)
    kit.make_files(root, {"checkpoint_000001/sub/x": b"1"})
    for path in (root, root / "checkpoint_000001", root / "checkpoint_000001/sub"):
        with pytest.raises(ConfigError, match="inside"):
            take(client, storage, {0: path})
    job = kit.make_intake({0: tmp_path})
    with pytest.raises(ConfigError, match="one for each rank"):
        client.ingest(storage, replace(job, sources=job.sources * 2)).result(60)
    with pytest.raises(ConfigError, match="checkpoint_id"):
        client.ingest(storage, replace(job, manifest={}))
    with pytest.raises(ConfigError, match="absolute"):
        kit.make_intake({0: Path("relative")})
    assert kit.tree(root) == {"checkpoint_000001/sub/x": b"1"}


@pytest.mark.parametrize("owned", [False, True])
def test_nothing_that_is_there_is_replaced(
    root: Path, client: WriterClient, sources: dict[int, Path], owned: bool
) -> None:
    """A checkpoint of this name, or a file of somebody: refused. Files that are not in the way stay beside ours."""
    storage = LocalStorage(root)
    before = {rank: kit.tree(path) for rank, path in sources.items()}
    kit.make_files(root / "checkpoint_000001", {"deep/only0.bin": b"mine", "notes.txt": b"mine"})
    with pytest.raises(CheckpointExistsError, match=r"holds deep/only0\.bin"):
        take(client, storage, sources, owned=owned)
    assert kit.tree(root / "checkpoint_000001") == {"deep/only0.bin": b"mine", "notes.txt": b"mine"}
    (root / "checkpoint_000001/deep/only0.bin").unlink()
    take(client, storage, {0: sources[0]}, start_id="bbbbbbbb")
    assert (root / "checkpoint_000001/notes.txt").read_bytes() == b"mine"
    was = kit.tree(root)
    with pytest.raises(CheckpointExistsError, match="committed checkpoint"):
        take(client, storage, sources, owned=owned)
    assert kit.tree(root) == was
    assert {rank: kit.tree(path) for rank, path in sources.items()} == before


@pytest.mark.parametrize("at", range(0, 60, 3))
@pytest.mark.parametrize("owned", [False, True])
def test_a_failing_disk_changes_nothing(root: Path, sources: dict[int, Path], owned: bool, at: int) -> None:
    """EIO at any operation: the future says so, nothing of the job stays, and the sources are as they were."""
    before = {rank: kit.tree(path) for rank, path in sources.items()}
    storage = FaultyStorage(root, fail_at={at: errno.EIO})
    with WriterClient.start(storage, thread=True) as client:
        error = client.ingest(storage, kit.make_intake(sources, owned=owned)).exception(60)
    if error is not None:
        assert isinstance(error, StorageError)
        if not (root / "checkpoint_000001/manifest.json").exists():
            assert kit.tree(root) in ({}, {"checkpoint_000001/": b""})
            assert {rank: kit.tree(path) for rank, path in sources.items()} == before
            return
    assert user_files(LocalStorage(root)) == MERGED


def test_a_full_disk_applies_retention_and_goes_on(tmp_path: Path, root: Path) -> None:
    """Copies do not fit until old checkpoints go by the rules; what was copied before is not lost or doubled."""
    storage = FaultyStorage(root, disk_bytes=7 * kit.MIB)
    with WriterClient.start(storage) as client:
        opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(60)
        for step in (1, 2):
            source = kit.make_files(tmp_path / f"{step}", {"m.pt": kit.noise(step, 2 * kit.MIB)})
            take(client, storage, {0: source}, run=True, directory=f"checkpoint_{step:06d}", step=step,
                 run_id=opened.run_id)  # fmt: skip
        client.run_op("close_run").result(20)
        opened = client.open_run(storage, owner={"start_id": "bbbbbbbb"}, keep=Keep(last=1).to_json()).result(60)
        files = {"a.pt": kit.noise(3, 2 * kit.MIB), "b.pt": kit.noise(4, 2 * kit.MIB)}
        result = take(client, storage, {0: kit.make_files(tmp_path / "3", files)}, run=True, start_id="bbbbbbbb",
                      directory="checkpoint_000003", step=3, attempt=2, run_id=opened.run_id)  # fmt: skip
    assert [name for name, _ in result.deleted] == ["checkpoint_000001", "checkpoint_000002"]
    assert not (root / "checkpoint_000001").exists()
    assert user_files(LocalStorage(root), "checkpoint_000003") == files


def test_a_run_is_needed_where_one_is_meant(root: Path, client: WriterClient, sources: dict[int, Path]) -> None:
    """run=True without open_run says so; with it the commit is in the index and retention follows."""
    storage = LocalStorage(root)
    with pytest.raises(HoldfastError, match="open_run"):
        take(client, storage, sources, run=True)
    opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}, keep=Keep(last=1).to_json()).result(60)
    for step in (1, 2):
        result = take(client, storage, sources, run=True, run_id=opened.run_id, step=step,
                      directory=f"checkpoint_{step:06d}")  # fmt: skip
    assert [name for name, _ in result.deleted] == ["checkpoint_000001"]
    assert [row[0] for row in client.run_op("records").result(20)] == ["checkpoint_000002"]
    assert not (root / "checkpoint_000001").exists(), "files of users go with their checkpoint"


@pytest.mark.parametrize("back", [False, True])
def test_a_directory_swapped_for_a_link_moves_nobody_elses_file(
    back: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user puts a link where an owned directory was, after it was listed, or while its files are put back."""
    outside = kit.make_files(tmp_path / "outside", {"data.pt": b"2" * 9000})
    source = kit.make_files(tmp_path / "source", {"deep/data.pt": b"1" * 9000, "deep/last.pt": b"3" * 9000})
    precious = (outside / "data.pt").stat().st_ino
    before = LocalStorage.adopt

    def swap(storage: LocalStorage, path: str, target: str) -> bool:
        if target.endswith("last.pt" if back else "data.pt"):
            monkeypatch.setattr(LocalStorage, "adopt", before)
            (source / "deep").rename(tmp_path / "away")
            (source / "deep").symlink_to(outside)
            if back:
                (outside / "data.pt").rename(outside / "hidden.pt")
                raise StorageError("the disk fails")
        return before(storage, path, target)

    monkeypatch.setattr(LocalStorage, "adopt", swap)
    with WriterClient.start(thread=True) as client, suppress(HoldfastError):
        take(client, LocalStorage(root), {0: source}, owned=True)
    assert [path.stat().st_ino for path in outside.iterdir()] == [precious]
