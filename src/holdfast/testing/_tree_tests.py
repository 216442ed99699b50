"""The part of `StorageTests` about the tree of objects: finding, removing, copying and naming them."""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StorageConflictError, StorageExistsError, StorageNotFoundError
from holdfast.storage.base import Storage
from holdfast.storage.resolve import from_description, import_paths
from holdfast.writer.launch import own_paths

__all__ = ["TreeTests", "create"]

_ODD_NAMES = (
    "with space.txt",
    "Größe-データ-🔥.json",
    "epoch=1-loss=0.25.bin",
    "a+b%20c&d#e?f.txt",
    ".hidden",
    "step_00000100/deep/er/~x'$.bin",
    "n" * 200,
)
_BAD_PATHS = ("", "/", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a/", "a/.", "nul\0byte", ".tmp-mine")


# As a writer process begins: a plain interpreter that is told over a pipe what to import from where.
_ELSEWHERE = """
import json, sys
order = json.load(sys.stdin)
sys.path.extend(order["paths"])
from holdfast.storage.resolve import extend_path, from_description
extend_path(order["imports"])
print(from_description(order["description"], order["secrets"]).read("run/a").decode(), end="")
"""


class TreeTests:
    """Tests of `stat`, `list`, `delete`, `copy`, names, and places; subclasses give ``storage`` and ``memory``."""

    # -- stat, list, delete, copy -------------------------------------------------------------------------------

    def test_missing(self, storage: Storage) -> None:
        """A missing object raises StorageNotFoundError, also below an object; a directory is no object."""
        storage.put("dir/a", b"1")
        for path in ("no", "dir/no", "dir", "dir/a/below"):
            assert not storage.exists(path), path
            with pytest.raises(StorageNotFoundError):
                storage.stat(path)
            with pytest.raises(StorageNotFoundError):
                storage.open(path)
        with pytest.raises(StorageNotFoundError):
            storage.copy("no", "target")

    def test_list(self, storage: Storage) -> None:
        """Listing gives all objects below a directory, with sizes, and not those of a directory of similar name."""
        sizes = {"run/a": 1, "run/b/c": 2, "run/b/d/e": 3, "run2/x": 4, "top": 5}
        for path, size in sizes.items():
            storage.put(path, bytes(size))
        assert {info.path: info.size for info in storage.list()} == sizes
        assert {info.path for info in storage.list("run")} == {"run/a", "run/b/c", "run/b/d/e"}
        assert {info.path for info in storage.list("run/b/")} == {"run/b/c", "run/b/d/e"}
        assert list(storage.list("nothing/here")) == []
        assert list(storage.list("top")) == []

    def test_list_children(self, storage: Storage) -> None:
        """Not recursive, a listing has the objects and, with a "/" at the end, the directories of one level."""
        for path in ("run/a", "run/b/c", "run/b/d/e", "top"):
            storage.put(path, b"12")
        assert {(i.path, i.size) for i in storage.list(recursive=False)} == {("run/", 0), ("top", 2)}
        assert {(i.path, i.size) for i in storage.list("run", recursive=False)} == {("run/a", 2), ("run/b/", 0)}

    def test_list_agrees_with_stat(self, storage: Storage) -> None:
        """Where a listing gives an etag, it is that of stat."""
        storage.put("d/a", b"1")
        (info,) = storage.list("d")
        assert info.etag in (None, storage.stat("d/a").etag)

    def test_delete(self, storage: Storage) -> None:
        """Deleting removes one object, is fine if there is none, and leaves no empty directory."""
        storage.put("d/e/a", b"1")
        storage.put("d/b", b"2")
        for _ in range(2):
            storage.delete("d/e/a")
            assert [info.path for info in storage.list("d", recursive=False)] == ["d/b"]
        storage.delete("d")
        storage.delete("not/there")
        assert storage.read("d/b") == b"2"

    def test_delete_many(self, storage: Storage) -> None:
        """delete_many removes the existing objects of a list, and no others."""
        paths = [f"run/{number}/<a> & 'b' {number % 7}" for number in range(40)]
        for path in [*paths, "run/0/stays"]:
            storage.put(path, b"1")
        storage.delete_many(["run/not there", *paths, "not/there"])
        storage.delete_many(paths)
        storage.delete_many([])
        assert [info.path for info in storage.list()] == ["run/0/stays"]

    def test_read_tagged(self, storage: Storage) -> None:
        """A version that was read can be replaced by its etag; after another write it cannot."""
        storage.put("a", b"1" * 300_000)
        data, etag = storage.read_tagged("a")
        assert data == b"1" * 300_000
        if etag is None:
            return
        storage.put("a", b"2", if_match=etag)
        with pytest.raises(StorageConflictError):
            storage.put("a", b"3", if_match=etag)
        assert storage.read_tagged("a")[0] == b"2"

    def test_delete_tree(self, storage: Storage) -> None:
        """delete_tree removes all below a directory, nothing beside it, and is fine if there is nothing."""
        for path in ("run/a", "run/b/c", "run2/a", "run.json"):
            storage.put(path, b"1")
        storage.delete_tree("run")
        storage.delete_tree("run")
        assert {info.path for info in storage.list()} == {"run2/a", "run.json"}
        storage.delete_tree("")
        assert list(storage.list(recursive=False)) == []

    def test_write_after_delete_tree(self, storage: Storage) -> None:
        """A directory that was removed can be written again."""
        storage.put("run/a", b"1")
        storage.delete_tree("run")
        storage.put("run/a", b"2")
        assert storage.read("run/a") == b"2"

    def test_copy(self, storage: Storage, memory: mmap.mmap) -> None:
        """A copy has the same bytes and outlives its source."""
        create(storage, "one/data", memory[:100_001])
        storage.copy("one/data", "two/deep/data")
        storage.delete_tree("one")
        assert storage.read("two/deep/data") == memory[:100_001]

    def test_copy_replaces_nothing(self, storage: Storage) -> None:
        """Copying onto an object is refused and changes nothing."""
        storage.put("a", b"1")
        storage.put("b", b"2")
        with pytest.raises(StorageExistsError):
            storage.copy("a", "b")
        assert storage.read("b") == b"2"

    # -- files of this machine ----------------------------------------------------------------------------------

    def test_adopt(self, storage: Storage, tmp_path: Path) -> None:
        """A file is taken over whole and then gone, or refused and then untouched."""
        source = tmp_path / "source.bin"
        source.write_bytes(b"1" * 70_000)
        if storage.adopt(str(source), "a/deep/data"):
            assert not source.exists()
            assert storage.read("a/deep/data") == b"1" * 70_000
            assert storage.stat("a/deep/data").size == 70_000
        else:
            assert source.read_bytes() == b"1" * 70_000
            assert list(storage.list()) == []

    def test_adopted_bytes_belong_to_nobody_else(self, storage: Storage, tmp_path: Path) -> None:
        """A file with a second name, or behind a link, is not taken over: who writes the other name would change it."""
        source, other, link = (tmp_path / name for name in ("source.bin", "other.bin", "link.bin"))
        source.write_bytes(b"1")
        other.hardlink_to(source)
        link.symlink_to(source)
        for path in (source, link):
            taken = storage.adopt(str(path), f"a/{path.name}")
            other.write_bytes(b"changed")
            assert not taken or storage.read(f"a/{path.name}") == b"1"
            other.write_bytes(b"1")
        assert other.exists()

    def test_adopt_replaces_nothing(self, storage: Storage, tmp_path: Path) -> None:
        """An object that is there stays, and so does the file; a missing file changes nothing."""
        source = tmp_path / "source.bin"
        source.write_bytes(b"new")
        storage.put("a/data", b"old")
        with contextlib.suppress(StorageExistsError):
            assert not storage.adopt(str(source), "a/data")
        assert (storage.read("a/data"), source.read_bytes()) == (b"old", b"new")
        with contextlib.suppress(StorageNotFoundError):
            assert not storage.adopt(str(tmp_path / "no.bin"), "a/other")
        assert [info.path for info in storage.list()] == ["a/data"]

    def test_sync(self, storage: Storage) -> None:
        """Any object can be made durable once more; a missing one is an error."""
        storage.put("a/deep/data", b"1")
        storage.sync("a/deep/data")
        assert storage.read("a/deep/data") == b"1"
        with pytest.raises(StorageNotFoundError):
            storage.sync("a/no")

    # -- names and places ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", _ODD_NAMES)
    def test_odd_names(self, storage: Storage, path: str) -> None:
        """Spaces, letters of any script, "=", "%" and long names are ordinary."""
        storage.put(path, b"1")
        create(storage, f"big/{path}", b"2")
        storage.copy(f"big/{path}", f"copy/{path}")
        assert {info.path for info in storage.list()} == {path, f"big/{path}", f"copy/{path}"}
        assert (storage.read(path), storage.read(f"copy/{path}")) == (b"1", b"2")
        storage.delete(path)
        assert not storage.exists(path)

    @pytest.mark.parametrize("path", _BAD_PATHS)
    def test_bad_paths(self, storage: Storage, path: str) -> None:
        """Paths that are empty, absolute, leave the storage or use a reserved name are refused by every operation."""
        storage.put("a", b"1")
        calls: list[Callable[[], object]] = [
            lambda: storage.put(path, b""),
            lambda: storage.create(path, 0),
            lambda: storage.open(path),
            lambda: storage.stat(path),
            lambda: storage.delete(path),
            lambda: storage.copy("a", path),
            lambda: storage.copy(path, "b"),
            lambda: storage.adopt("/nowhere", path),
            lambda: storage.sync(path),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()

    def test_child(self, storage: Storage) -> None:
        """A child is the same storage seen from deeper: same objects, shorter paths, longer uri."""
        child = storage.child("run/x")
        tag = child.put("c/a", b"1")
        create(child, "c/data", b"2")
        child.copy("c/data", "d/data")
        assert storage.stat("run/x/c/a").etag == child.stat("c/a").etag == tag
        assert {info.path for info in child.list()} == {"c/a", "c/data", "d/data"}
        assert {info.path for info in child.list("c")} == {"c/a", "c/data"}
        assert {info.path for info in child.list(recursive=False)} == {"c/", "d/"}
        assert storage.child("run").child("x").read("c/a") == b"1"
        assert storage.child("").uri == storage.uri
        assert child.uri == storage.uri.rstrip("/") + "/run/x"
        storage.put("run/y", b"3")
        child.delete_tree("")
        assert {info.path for info in storage.list()} == {"run/y"}

    def test_description(self, storage: Storage) -> None:
        """A storage that describes itself does so in JSON, and what is rebuilt from that sees the same objects."""
        storage.put("run/a", b"1")
        for place, path in ((storage, "run/a"), (storage.child("run"), "a")):
            description = place.describe()
            if description is not None:
                rebuilt = from_description(json.loads(json.dumps(description)))
                assert rebuilt.read(path) == b"1"
                assert rebuilt.uri == place.uri

    def test_another_process(self, storage: Storage) -> None:
        """The process that writes checkpoints makes the storage of its description, and reads what was stored here."""
        description = storage.describe()
        if description is None:
            return
        storage.put("run/a", b"read elsewhere")
        told = {"description": description, "secrets": storage.secrets()}
        order = {**told, "paths": own_paths(), "imports": import_paths(description)}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ELSEWHERE],
            input=json.dumps(order), capture_output=True, text=True, timeout=60, cwd="/", check=False,
        )  # fmt: skip
        assert done.stdout == "read elsewhere", done.stderr

    def test_free_bytes(self, storage: Storage) -> None:
        """The free space is a number of bytes, or None where nobody knows, also before anything was written."""
        free = storage.free_bytes()
        assert free is None or free > 0


def create(storage: Storage, path: str, data: bytes) -> None:
    """Write one object through `Storage.create`."""
    with storage.create(path, len(data)) as writer:
        writer.write(memoryview(data))
