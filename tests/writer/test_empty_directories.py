"""Directories that hold nothing are part of a reported directory, and of the checkpoint made of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import writer_kit as kit

from holdfast import Checkpoint
from holdfast.copying.transfer import copy_checkpoint
from holdfast.errors import ConfigError, CorruptCheckpointError, StorageError
from holdfast.format.commit import read_manifest, sweep
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import EMPTY_DIRECTORIES, MAX_FOLDERS, FileEntry, Manifest
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient

NAME = "checkpoint_000001"
WANTED = {"a.txt": b"a", "logs/empty/": b"", "tief/ü/": b""}


def source(root: Path) -> Path:
    made = kit.make_files(root, {"a.txt": b"a"})
    (made / "logs" / "empty").mkdir(parents=True)
    (made / "tief" / "ü").mkdir(parents=True)
    return made


def report(storage: Storage, *sources: Path, owned: bool = False) -> Checkpoint:
    with WriterClient.start(thread=True) as client:
        client.ingest(storage, kit.make_intake(dict(enumerate(sources)), owned=owned)).result(60)
    return Checkpoint.at(storage, NAME)


def files(path: str | Path) -> dict[str, bytes]:
    return {name: data for name, data in kit.tree(Path(path)).items() if name != "manifest.json"}


@pytest.mark.parametrize("owned", [False, True])
def test_they_come_back(tmp_path: Path, owned: bool) -> None:
    """From a disk and from a bucket, as the real path, a download, a copy and a copy of a copy."""
    local = report(LocalStorage(tmp_path / "run"), source(tmp_path / "a"), owned=owned)
    remote = report(MemoryStorage(f"empty-directories-{owned}"), source(tmp_path / "b"), owned=owned)
    pushed = MemoryStorage(f"empty-directories-pushed-{owned}")
    copy_checkpoint(local.storage, NAME, pushed, "pushed")
    for number, one in enumerate((local, remote, Checkpoint.at(pushed, "pushed"))):
        assert one.manifest is not None
        assert one.manifest.empty_directories == ("logs/empty", "tief/ü")
        with one.as_directory() as path:
            assert files(path) == WANTED
        assert files(one.to_directory(tmp_path / f"copy-{number}")) == WANTED
        assert files(one.to_directory()) == WANTED
        assert one.verify().ok
    again = report(LocalStorage(tmp_path / "again"), tmp_path / "copy-1")  # a checkpoint that is reported
    assert files(again.path) == WANTED


def test_one_that_another_rank_fills_is_not_empty(tmp_path: Path) -> None:
    """What holds something on any rank is an ordinary directory."""
    other = kit.make_files(tmp_path / "b", {"logs/empty/log": b"1"})
    one = report(LocalStorage(tmp_path / "run"), source(tmp_path / "a"), other)
    assert files(one.path) == {"a.txt": b"a", "logs/empty/log": b"1", "tief/ü/": b""}


def test_a_copy_that_lost_them_gets_them_back(tmp_path: Path) -> None:
    """Other tools leave them out, and a process may end right after the commit: the manifest knows them."""
    one = report(LocalStorage(tmp_path / "run"), source(tmp_path / "a"))
    (Path(one.path) / "logs" / "empty").rmdir()
    (Path(one.path) / "logs").rmdir()
    with one.as_directory() as path:
        assert files(path) == WANTED


def test_deletion_leaves_nothing(tmp_path: Path) -> None:
    """They go with the checkpoint, also with one that a crash has left in the middle of its deletion."""
    storage = LocalStorage(tmp_path / "run")
    report(storage, source(tmp_path / "a")).delete()
    assert kit.tree(tmp_path / "run") == {}
    bare = tmp_path / "bare"
    (bare / "nothing").mkdir(parents=True)
    for number in range(24):
        one = report(storage, bare if number % 2 else tmp_path / "a")
        faulty = FaultyStorage(tmp_path / "run", fail_at={number // 2: errno.EIO})
        try:
            Checkpoint.at(faulty, NAME).delete()
        except StorageError:
            sweep(storage, NAME)
            if (tmp_path / "run" / NAME / "manifest.json").exists():
                one.delete()
        assert not (tmp_path / "run" / NAME).exists()


@pytest.mark.parametrize(
    "folders",
    [["../up"], ["/etc"], ["a/../../b"], [""], ["a//b"], ["a\\b"], [1], "text", {"a": 1}, [["a"]], ["f.bin"],
     ["f.bin/inside"], ["manifest.json"], [".removing.json/x"], ["x/" * 2000 + "x"] * 101, ["\ud800/x"],
     ["d"] * (MAX_FOLDERS + 1)],
)  # fmt: skip
def test_hostile_names_are_refused(folders: object) -> None:
    """Outside, where a file is, no paths at all, too many or too deep: the manifest is damaged."""
    entry = FileEntry(path="f.bin", size=0, digest="xxh3:" + "0" * 32)
    with pytest.raises(ConfigError, match="cannot be committed"):
        Manifest(files=(entry,), extra={EMPTY_DIRECTORIES: folders}).to_bytes()
    data = Manifest(files=(entry,), extra={"mmmmm_directories": folders}).to_bytes()
    body, _, _ = data.replace(b"mmmmm_directories", EMPTY_DIRECTORIES.encode()).rpartition(b',\n"body_digest"')
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(body + f',\n"body_digest": "{bytes_digest(body)}"\n}}\n'.encode())


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Where somebody has put a link in the way, nothing is made behind it, and the files are there all the same."""
    one = report(LocalStorage(tmp_path / "run"), source(tmp_path / "a"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (Path(one.path) / "logs" / "empty").rmdir()
    (Path(one.path) / "logs").rmdir()
    (Path(one.path) / "logs").symlink_to(outside)
    with one.as_directory() as path:
        assert (Path(path) / "a.txt").read_bytes() == b"a"
    assert list(outside.iterdir()) == []
    one.delete()
    assert outside.is_dir()


def test_names_that_no_checkpoint_can_have(tmp_path: Path) -> None:
    """A directory called as a file of ours is refused by name when it is reported."""
    (tmp_path / "a" / ".removing.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot be called '.removing.json'"):
        report(LocalStorage(tmp_path / "run"), tmp_path / "a")


def test_in_place(tmp_path: Path) -> None:
    """What is committed where it lies keeps them, and they go with it."""
    storage = LocalStorage(tmp_path / "run")
    source(tmp_path / "run" / NAME)
    with WriterClient.start(thread=True) as client:
        client.ingest(storage, kit.make_intake({})).result(60)
    assert read_manifest(storage, NAME).empty_directories == ("logs/empty", "tief/ü")
    Checkpoint.at(storage, NAME).delete()
    assert kit.tree(tmp_path / "run") == {}
