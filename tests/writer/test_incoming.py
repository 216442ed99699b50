"""Directories that ranks of other machines have put into the store of the run become checkpoints there."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import writer_kit as kit
from test_intake import MERGED, RANKS, user_files

import holdfast as hf
from holdfast import Checkpoint
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.ingest.sources import put_incoming, read_incoming
from holdfast.writer.messages import IngestJob, IngestSource


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return MemoryStorage(f"incoming-{tmp_path.name}")


@pytest.fixture
def client(storage: Storage) -> Iterator[WriterClient]:
    with WriterClient.start(storage) as client:
        yield client


def put(storage: Storage, sources: dict[int, Path]) -> IngestJob:
    """Put directories into a storage; the job that takes them in."""
    homes = {rank: f".incoming-aaaaaaaa/1-{rank}" for rank in sources}
    for rank, path in sources.items():
        put_incoming(storage, homes[rank], IngestSource(rank=rank, path=str(path)))
    job = kit.make_intake({})
    return replace(job, sources=tuple(IngestSource(rank=rank, path=homes[rank], owned=True) for rank in sources))


def make(folder: Path) -> dict[int, Path]:
    return {rank: kit.make_files(folder / f"rank{rank}", files) for rank, files in RANKS.items()}


def test_two_ranks_merge_as_from_a_disk(tmp_path: Path, storage: Storage, client: WriterClient) -> None:
    """The checkpoint is the one that the same directories give on one machine; nothing else is left."""
    sources = make(tmp_path)
    (sources[1] / "nothing" / "in it").mkdir(parents=True)
    (sources[0] / ".metadata.json").write_bytes(b'{"a": 1}')
    result = client.ingest(storage, put(storage, sources)).result(60)
    assert user_files(storage) == MERGED
    assert "own.rank-1.bin" in result.warnings[0]
    here = LocalStorage(tmp_path / "run")
    direct = client.ingest(here, kit.make_intake(sources)).result(60)
    told, wanted = json.loads(result.manifest), json.loads(direct.manifest)
    for name in ("writers", "extra", "total_bytes"):
        assert told[name] == wanted[name]
    assert [(row["path"], row["digest"]) for row in told["files"] if row["role"] != "digests"] == [
        (row["path"], row["digest"]) for row in wanted["files"] if row["role"] != "digests"
    ]
    assert json.loads(storage.read("checkpoint_000001/.metadata.json")) == {"a": 1}
    assert {info.path.split("/")[0] for info in storage.list()} == {"checkpoint_000001"}
    assert make(tmp_path / "same")[0].exists()


def test_a_checkpoint_of_ours_stays_one(tmp_path: Path, storage: Storage, client: WriterClient) -> None:
    """Its index and digests come along, so that `load` understands it; of several the lowest rank's is it."""
    for rank in (0, 1):
        hf.save(tmp_path / f"{rank}", {"value": [rank, 2.5]})
    client.ingest(storage, put(storage, {0: tmp_path / "0", 1: tmp_path / "1"})).result(60)
    assert Checkpoint.at(storage, "checkpoint_000001").load() == {"value": [0, 2.5]}
    assert "manifest.rank-1.json" in user_files(storage)


def test_damaged_on_its_way(tmp_path: Path, storage: Storage) -> None:
    """A checkpoint with other bytes than it was committed with is refused, and nothing of it is left."""
    hf.save(tmp_path / "0", {"value": 1})
    state = next((tmp_path / "0").glob("state*"))
    state.write_bytes(bytes(len(state.read_bytes())))
    with pytest.raises(CorruptCheckpointError, match="committed with"):
        put_incoming(storage, ".incoming-aaaaaaaa/1-0", IngestSource(rank=0, path=str(tmp_path / "0")))
    assert list(storage.list()) == []


@pytest.mark.parametrize("at", range(1, 40, 2))
def test_a_storage_that_fails_leaves_all_or_nothing(tmp_path: Path, at: int) -> None:
    """EIO at any operation of the driver's writer: the error says so, and no checkpoint or remains of one are there."""
    root = tmp_path / "run"
    job = put(LocalStorage(root), make(tmp_path))
    storage = FaultyStorage(root, fail_at={at: errno.EIO})
    with WriterClient.start(storage, thread=True) as client:
        error = client.ingest(storage, job).exception(60)
    if error is not None and not (root / "checkpoint_000001/manifest.json").exists():
        assert isinstance(error, StorageError)
        assert not list(root.glob("checkpoint_000001/*"))
        with WriterClient.start(LocalStorage(root), thread=True) as client:
            client.ingest(LocalStorage(root), job).result(60)  # what the ranks have put is there still
    assert user_files(LocalStorage(root)) == MERGED


@pytest.mark.parametrize("at", [4, 9, 16, 24, 32, 40])
def test_a_writer_that_is_killed_and_started_again_goes_on(tmp_path: Path, at: int) -> None:
    """SIGKILL of the driver's writer at an operation: the next one takes up its plan, and copies anew."""
    root, marker = tmp_path / "run", tmp_path / "marker"
    job = put(LocalStorage(root), make(tmp_path))
    storage = FaultyStorage(root, crash_at=at, crash_once=str(marker))
    with WriterClient.start(storage, thread=False) as client:
        client.ingest(storage, job).result(60)
    assert marker.exists()
    assert user_files(LocalStorage(root)) == MERGED
    assert not list(root.glob(".incoming-*/*"))


def test_what_is_not_there_is_said(storage: Storage) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"what rank 3 reported is not in .*incoming-aaaaaaaa/1-3"):
        read_incoming(storage, ".incoming-aaaaaaaa/1-3", 3)


@pytest.mark.parametrize(
    "listing",
    [
        b"{}",
        b'{"incoming": 1, "files": 3, "manifest_bytes": null, "metadata": null, "bare": []}',
        b'{"incoming": 1, "files": [["../x", 0, null]], "manifest_bytes": null, "metadata": null, "bare": []}',
        b'{"incoming": 1, "files": [["x", 9, null]], "manifest_bytes": null, "metadata": null, "bare": []}',
    ],
)
def test_a_listing_that_is_none(storage: Storage, listing: bytes) -> None:
    """Other shapes, names that leave the directory, digests that are missing: refused before anything is copied."""
    storage.put(".incoming-aaaaaaaa/1-0/listing.json", listing)
    storage.put(".incoming-aaaaaaaa/1-0/digests", b"")
    with pytest.raises(CorruptCheckpointError, match=r"listing\.json"):
        read_incoming(storage, ".incoming-aaaaaaaa/1-0", 0)
