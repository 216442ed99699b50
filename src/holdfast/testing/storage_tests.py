"""The contract of `holdfast.storage.Storage` as tests: pass them, and Holdfast can keep checkpoints in your storage."""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.errors import ConfigError, StorageConflictError, StorageError, StorageExistsError, StorageNotFoundError
from holdfast.storage.base import BLOCK, FileWriter, ReplacingWriter, Storage
from holdfast.storage.resolve import from_description, import_paths
from holdfast.writer.conversation import own_paths

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
_T = TypeVar("_T")

_NUM_THREADS = 8


class StorageTests:
    """Subclass, give a ``storage`` fixture that returns an empty storage, and run pytest.

    Example:
        >>> class TestMyStorage(StorageTests):
        ...     @pytest.fixture
        ...     def storage(self, tmp_path):
        ...         return MyStorage(tmp_path)
    """

    @pytest.fixture
    def memory(self) -> Iterator[mmap.mmap]:
        """Give one MiB of page-aligned memory with known bytes, like the arena that saves are written from."""
        with mmap.mmap(-1, 1 << 20) as memory:
            memory[:] = (bytes(range(251)) * (len(memory) // 251 + 1))[: len(memory)]
            yield memory

    # -- put ----------------------------------------------------------------------------------------------------

    def test_put_then_read(self, storage: Storage) -> None:
        """A put object is read back as it was, from bytes and from views, in directories that were never made."""
        storage.put("a/b/c.json", b"12345")
        storage.put("view", memoryview(bytearray(b"678")))
        assert (storage.read("a/b/c.json"), storage.read("view")) == (b"12345", b"678")

    def test_put_replaces(self, storage: Storage) -> None:
        """A put replaces the whole object, also by a shorter one."""
        storage.put("a", b"long content")
        storage.put("a", b"new")
        assert storage.read("a") == b"new"

    def test_put_of_nothing(self, storage: Storage) -> None:
        """An empty object is an object."""
        storage.put("empty", b"")
        assert (storage.stat("empty").size, storage.read("empty"), storage.exists("empty")) == (0, b"", True)

    def test_put_if_absent(self, storage: Storage) -> None:
        """With if_absent the first put wins and a later one changes nothing."""
        storage.put("d/a", b"first", if_absent=True)
        with pytest.raises(StorageExistsError, match="a"):
            storage.put("d/a", b"second", if_absent=True)
        assert storage.read("d/a") == b"first"
        assert [info.path for info in storage.list()] == ["d/a"]

    def test_put_if_absent_has_one_winner(self, storage: Storage) -> None:
        """Of many puts that create the same object at once exactly one succeeds, and its content stays."""

        def create(number: int) -> int | None:
            try:
                storage.put("d/lease", str(number).encode(), if_absent=True)
            except StorageExistsError:
                return None
            return number

        winners = [number for number in _at_once(create) if number is not None]
        assert len(winners) == 1
        assert storage.read("d/lease") == str(winners[0]).encode()

    def test_put_if_match(self, storage: Storage) -> None:
        """With if_match a put replaces only the version it names; the etag returned is that of stat."""
        old = _etag_of_put(storage, "d/a", b"1")
        new = storage.put("d/a", b"2", if_match=old)
        assert new not in (None, old)
        assert storage.stat("d/a").etag == new
        with pytest.raises(StorageConflictError):
            storage.put("d/a", b"3", if_match=old)
        assert storage.read("d/a") == b"2"

    def test_put_if_match_of_a_missing_object(self, storage: Storage) -> None:
        """With if_match nothing is created."""
        old = _etag_of_put(storage, "d/a", b"1")
        storage.delete("d/a")
        with pytest.raises(StorageConflictError):
            storage.put("d/a", b"2", if_match=old)
        assert not storage.exists("d/a")

    def test_put_if_match_has_one_winner(self, storage: Storage) -> None:
        """Of many puts that replace the same version at once exactly one succeeds."""
        old = _etag_of_put(storage, "d/a", b"old")

        def replace(number: int) -> int | None:
            try:
                storage.put("d/a", str(number).encode(), if_match=old)
            except StorageConflictError:
                return None
            return number

        winners = [number for number in _at_once(replace) if number is not None]
        assert len(winners) == 1
        assert storage.read("d/a") == str(winners[0]).encode()

    def test_readers_never_see_half_a_put(self, storage: Storage) -> None:
        """A reader sees the old or the new object, whole, while it is replaced."""
        contents = [bytes([letter]) * size for letter, size in ((97, 300_000), (98, 200_000))]
        storage.put("a", contents[0])
        stop = threading.Event()

        def write() -> None:
            for number in range(60):
                storage.put("a", contents[number % 2])
            stop.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            seen = set()
            while not stop.is_set() and not writing.done():
                seen.add(storage.read("a"))
            writing.result()
        assert seen <= set(contents)

    def test_concurrent_puts_of_one_object(self, storage: Storage) -> None:
        """Many puts of the same object at once leave the content of one of them, whole, and no other file."""
        _at_once(lambda number: storage.put("d/a", bytes([number]) * 50_000))
        assert storage.read("d/a") in {bytes([number]) * 50_000 for number in range(_NUM_THREADS)}
        assert [info.path for info in storage.list()] == ["d/a"]

    # -- create and open ----------------------------------------------------------------------------------------

    def test_create_with_a_padded_last_view(self, storage: Storage, memory: mmap.mmap) -> None:
        """The padding that keeps the last view a multiple of 4096 bytes is not stored."""
        size = 3 * BLOCK + 17
        with memoryview(memory) as view, storage.create("c/data", size) as writer:
            writer.write(view[: 2 * BLOCK])
            writer.write(view[2 * BLOCK : 4 * BLOCK])
        assert storage.stat("c/data").size == size
        assert storage.read("c/data") == memory[:size]

    def test_create_with_a_bare_last_view(self, storage: Storage, memory: mmap.mmap) -> None:
        """The last view need not be padded."""
        size = 2 * BLOCK + 1000
        with memoryview(memory) as view, storage.create("c/data", size) as writer:
            writer.write(view[:BLOCK])
            writer.write(view[BLOCK:size])
        assert storage.read("c/data") == memory[:size]

    @pytest.mark.parametrize("size", [1, 511, BLOCK, BLOCK + 1])
    def test_create_from_unaligned_memory(self, storage: Storage, memory: mmap.mmap, size: int) -> None:
        """Views may begin at any address and be read-only."""
        with memoryview(memory) as view, storage.create("c/data", size) as writer:
            writer.write(memoryview(bytes(view[3 : 3 + size])))
        assert storage.read("c/data") == memory[3 : 3 + size]

    def test_memory_is_free_after_a_write(self, storage: Storage, memory: mmap.mmap) -> None:
        """What is written may be overwritten at once: saves and copies send large files through a few buffers."""
        num = 21
        with memoryview(memory) as view, storage.create("c/data", num * len(memory)) as writer:
            for number in range(num):
                view[:] = bytes([number]) * len(view)
                writer.write(view)
            view[:] = bytes(len(view))
        with storage.open("c/data") as reader:
            for number in range(num):
                piece = bytearray(1 << 20)
                reader.read_into(number << 20, memoryview(piece))
                assert piece == bytes([number]) * (1 << 20), f"MiB {number}"

    def test_create_of_nothing(self, storage: Storage) -> None:
        """An object of 0 bytes can be created without a view."""
        storage.create("c/empty", 0).close()
        assert storage.stat("c/empty").size == 0

    def test_create_replaces_without_touching_copies(self, storage: Storage) -> None:
        """Creating over an older object replaces it; a copy made of the older object keeps its bytes."""
        _create(storage, "c/data", b"old" * 2000)
        storage.copy("c/data", "d/data")
        _create(storage, "c/data", b"new")
        assert (storage.read("c/data"), storage.read("d/data")) == (b"new", b"old" * 2000)

    def test_unfinished_create(self, storage: Storage) -> None:
        """Closing before all bytes are there fails and leaves no object."""
        writer = storage.create("c/data", 2 * BLOCK)
        writer.write(memoryview(bytes(BLOCK)))
        with pytest.raises(StorageError, match="data"):
            writer.close()
        assert not storage.exists("c/data")

    def test_replace_in_one_step(self, storage: Storage, memory: mmap.mmap) -> None:
        """The older object stays until the new one is whole, or given up; without `replace`, `create` does so."""

        def begin(size: int) -> FileWriter:
            return storage.replace("r/data", size) or storage.create("r/data", size)

        def is_old() -> bool:
            return (storage.read("r/data"), [info.path for info in storage.list("r")]) == (b"old", ["r/data"])

        storage.put("r/data", b"old")
        begin(2 * BLOCK).abort()
        assert is_old()
        writer = begin(2 * BLOCK)
        writer.write(memoryview(memory)[:BLOCK])
        assert storage.read("r/data") == b"old"
        writer.abort()
        writer.abort()
        assert is_old()
        writer = begin(2 * BLOCK)
        writer.write(memoryview(memory)[:BLOCK])
        with pytest.raises(StorageError, match="data"):
            writer.close()
        assert is_old()
        writer = begin(BLOCK + 10)
        writer.write(memoryview(memory)[: 2 * BLOCK])
        assert storage.read("r/data") == b"old"
        if isinstance(writer, ReplacingWriter):
            with pytest.raises(StorageExistsError):
                writer.publish(if_absent=True)
            assert storage.read("r/data") == b"old"
            writer.publish()
            writer.publish()
        writer.close()
        writer.abort()
        assert storage.read("r/data") == bytes(memory[: BLOCK + 10])
        assert [info.path for info in storage.list("r")] == ["r/data"]

    def test_too_many_bytes(self, storage: Storage) -> None:
        """A view that reaches past the padded size is refused."""
        writer = storage.create("c/data", 10)
        with pytest.raises(ConfigError, match="data"):
            writer.write(memoryview(bytes(2 * BLOCK)))
        writer.abort()

    def test_batch(self, storage: Storage, memory: mmap.mmap) -> None:
        """A batch stores objects in any directories, replaces older ones, and leaves the memory to the caller."""
        storage.put("many/a/0", b"old")
        with storage.batch(40) as batch:
            for number in range(40):
                data = bytearray(memory[: number * 333])
                batch.add(f"many/{'ab'[number % 2]}/{number}", memoryview(data))
                data[:] = bytes(len(data))
            batch.add("top", b"1")
        for number in range(40):
            assert storage.read(f"many/{'ab'[number % 2]}/{number}") == memory[: number * 333]
        assert storage.read("top") == b"1"
        batch.close()
        with pytest.raises(ConfigError), storage.batch(1) as batch:
            batch.add("../out", b"1")
        with pytest.raises(ZeroDivisionError), storage.batch(1):
            raise ZeroDivisionError

    def test_sync_all(self, storage: Storage) -> None:
        """Existing objects can be made durable together."""
        for path in ("s/a", "s/d/b", "c"):
            storage.put(path, b"1")
        storage.sync_all(["s/a", "s/d/b", "c"])
        assert storage.read("s/d/b") == b"1"

    def test_abort(self, storage: Storage) -> None:
        """An aborted object is gone, with the directory made for it; abort may be repeated, close after it too."""
        writer = storage.create("c/data", 2 * BLOCK)
        writer.write(memoryview(bytes(BLOCK)))
        writer.abort()
        writer.abort()
        writer.close()
        assert not storage.exists("c/data")
        assert list(storage.list(recursive=False)) == []

    def test_exception_aborts(self, storage: Storage) -> None:
        """Leaving the writer's block by an exception drops the object and passes the exception on."""

        def fail_halfway() -> None:
            with storage.create("c/data", BLOCK) as writer:
                writer.write(memoryview(bytes(BLOCK)))
                raise KeyError

        with pytest.raises(KeyError):
            fail_halfway()
        assert not storage.exists("c/data")

    def test_ranges(self, storage: Storage, memory: mmap.mmap) -> None:
        """Any range is read, and a range past the end is an error, never fewer bytes."""
        _create(storage, "data", memory[:10_000])
        assert storage.read("data", 4097, 100) == memory[4097:4197]
        assert storage.read("data", 9_990) == memory[9_990:10_000]
        with storage.open("data") as reader:
            assert reader.size == 10_000
            reader.read_into(10_000, memoryview(bytearray()))
            with pytest.raises(StorageError, match="data"):
                reader.read_into(9_999, memoryview(bytearray(2)))

    def test_concurrent_readers(self, storage: Storage, memory: mmap.mmap) -> None:
        """Many threads read ranges through the same reader at once."""
        _create(storage, "data", memory[:])
        with storage.open("data") as reader:

            def check(number: int) -> bool:
                for start in range(number * 1000, len(memory) - 5000, 37_000):
                    buffer = bytearray(5000)
                    reader.read_into(start, memoryview(buffer))
                    if buffer != memory[start : start + 5000]:
                        return False
                return True

            assert all(_at_once(check))

    def test_reader_keeps_its_version(self, storage: Storage) -> None:
        """An open reader goes on reading the version that it opened, or fails; it never mixes two versions."""
        storage.put("a", b"old" * 1000)
        with storage.open("a") as reader:
            storage.put("a", b"new" * 1000)
            buffer = bytearray(reader.size)
            try:
                reader.read_into(0, memoryview(buffer))
            except StorageError:
                return
        assert buffer in (b"old" * 1000, b"new" * 1000)

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
        _create(storage, "one/data", memory[:100_001])
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
        _create(storage, f"big/{path}", b"2")
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
        _create(child, "c/data", b"2")
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


def _create(storage: Storage, path: str, data: bytes) -> None:
    """Write one object through `Storage.create`."""
    with storage.create(path, len(data)) as writer:
        writer.write(memoryview(data))


def _etag_of_put(storage: Storage, path: str, data: bytes) -> str:
    etag = storage.put(path, data)
    if etag is None:
        pytest.skip("this storage has no etags")
    return etag


def _at_once(work: Callable[[int], _T]) -> list[_T]:
    """Run ``work(0), work(1), ...`` in threads that start together."""
    barrier = threading.Barrier(_NUM_THREADS)

    def run(number: int) -> _T:
        barrier.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(run, range(_NUM_THREADS)))
