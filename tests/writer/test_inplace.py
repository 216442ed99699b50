"""Files that somebody brought into the run himself are committed where they are."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import writer_kit as kit

from holdfast import Checkpoint
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, StorageError
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyOps, FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveResult

FILES = {"model.pt": kit.noise(1, 200_000), "deep/x.bin": b"x", "empty": b""}


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "run") if request.param == "disk" else MemoryStorage(tmp_path.name)


@pytest.fixture
def client(storage: Storage) -> Iterator[WriterClient]:
    with WriterClient.start(storage) as client:
        yield client


def bring(storage: Storage, files: dict[str, bytes], directory: str = "mine") -> None:
    for name, data in files.items():
        with storage.create(f"{directory}/{name}", len(data)) as writer:
            writer.write(memoryview(data))


def commit(client: WriterClient, storage: Storage, **fields: object) -> SaveResult:
    return client.ingest(storage, kit.make_intake({}, directory="mine", **fields)).result(60)  # type: ignore[arg-type]


def contents(storage: Storage) -> dict[str, bytes]:
    return {info.path.removeprefix("mine/"): storage.read(info.path) for info in storage.list("mine")}


def test_metadata_that_nobody_could_read_are_refused(client: WriterClient, storage: Storage) -> None:
    """No checkpoint is made of them, and nothing is changed."""
    bring(storage, {**FILES, ".metadata.json": b"not JSON"})
    with pytest.raises(ConfigError, match=r"mine.*\.metadata\.json is not the JSON object"):
        commit(client, storage)
    assert contents(storage) == {**FILES, ".metadata.json": b"not JSON"}


def test_files_are_committed_where_they_are(client: WriterClient, storage: Storage) -> None:
    """Every file is listed with its digests; none is moved or changed; metadata stay what they are."""
    bring(storage, {**FILES, ".metadata.json": b"{}"})
    before = {info.path: info.etag for info in storage.list("mine")}
    result = commit(client, storage)
    manifest = Checkpoint.at(storage, "mine").manifest
    assert Checkpoint.at(storage, "mine").verify().ok
    assert {entry.path for entry in manifest.files if entry.role == "user"} == set(FILES)
    assert next(entry for entry in manifest.files if entry.path == "model.pt").chunks is not None
    after = {info.path: info.etag for info in storage.list("mine")}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2
    assert result.bytes_written < 1000


def test_nothing_there_is_an_error(client: WriterClient, storage: Storage) -> None:
    """Who says that he has uploaded something, and has not, must hear of it."""
    with pytest.raises(CheckpointNotFoundError, match="NO_UPLOAD"):
        commit(client, storage)
    assert list(storage.list()) == []


def test_a_checkpoint_gets_a_new_manifest(client: WriterClient, storage: Storage) -> None:
    """One that was saved there on its own joins the run: same files, roles and digests, the run's fields."""
    with kit.fill([kit.noise(1, 200_000)]) as arena, WriterClient.start(thread=True) as other:
        job = kit.make_job([kit.noise(1, 200_000)], directory="mine", manifest={"run_id": None}, start_id="bbbbbbbb")
        other.submit(storage, job, [b"{}"], arena).result(60)
    bring(storage, {"notes.txt": b"mine", ".metadata.json": b"{}", ".metrics.json": b'{"metrics":{"late":1}}'})
    before = Checkpoint.at(storage, "mine").manifest
    was = contents(storage)
    commit(client, storage, step=5)
    manifest = Checkpoint.at(storage, "mine").manifest
    assert manifest.files[: len(before.files)] == before.files
    assert [entry.path for entry in manifest.files[len(before.files) :]] == ["notes.txt"]
    assert (manifest.step, manifest.run_id) == (5, "run")
    assert {**contents(storage), "manifest.json": b""} == {**was, "manifest.json": b""}
    with pytest.raises(CheckpointExistsError, match="of this run already"):
        commit(client, storage, step=6)
    assert Checkpoint.at(storage, "mine").manifest == manifest


def test_other_peoples_manifests_are_refused(client: WriterClient, storage: Storage) -> None:
    """A manifest.json of something else: named, and everything stays as it is."""
    bring(storage, {**FILES, "manifest.json": b"{}"})
    was = contents(storage)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        commit(client, storage)
    assert contents(storage) == was


def test_links_are_refused(tmp_path: Path) -> None:
    """What is only linked there would be missing from the checkpoint or change with the original: refused."""
    storage = LocalStorage(tmp_path)
    bring(storage, {"a": b"1"}, "elsewhere")
    bring(storage, {"x": b"1"})
    for target in ("a", ""):
        (tmp_path / "mine/link").symlink_to(tmp_path / "elsewhere" / target)
        with WriterClient.start(storage) as client, pytest.raises(ConfigError, match="link"):
            commit(client, storage)
        os.unlink(tmp_path / "mine/link")
    assert kit.tree(tmp_path) == {"elsewhere/a": b"1", "mine/x": b"1"}


def test_files_are_durable_before_the_commit(tmp_path: Path) -> None:
    """Whoever wrote them need not have synced them: every file, and every directory up to the run, is."""
    ops = FaultyOps(record=True)
    storage = FaultyStorage(tmp_path, ops=ops)
    kit.make_files(tmp_path / "mine", FILES)
    with WriterClient.start(storage) as client:
        commit(client, storage)
    names = [(one.name, os.path.relpath(one.path, tmp_path)) for one in ops.log]
    end = names.index(("link", next(path for name, path in names if name == "link")))
    for name in FILES:
        assert ("fsync", f"mine/{name}") in names[:end]
    for directory in (".", "mine", "mine/deep"):
        assert ("fsync_dir", directory) in names[:end]


@pytest.mark.parametrize("at", range(0, 24, 2))
def test_a_failing_disk_leaves_the_files_alone(tmp_path: Path, at: int) -> None:
    """EIO at any operation: the files of the user are all there, whether the commit came about or not."""
    storage = FaultyStorage(tmp_path, fail_at={at: errno.EIO})
    kit.make_files(tmp_path / "mine", FILES)
    with WriterClient.start(storage, thread=True) as client:
        error = client.ingest(storage, kit.make_intake({}, directory="mine")).exception(60)
    assert error is None or isinstance(error, StorageError)
    assert FILES.items() <= kit.tree(tmp_path / "mine").items()
    if (tmp_path / "mine/manifest.json").exists():
        assert Checkpoint.at(LocalStorage(tmp_path), "mine").verify().ok
    elif error is not None:
        assert kit.tree(tmp_path / "mine") == FILES
