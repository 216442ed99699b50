"""The contract of `holdfast.storage.Storage` as tests: pass them, and Holdfast can keep checkpoints in your storage."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from holdfast.errors import ConfigError, StorageConflictError, StorageError, StorageExistsError
from holdfast.storage.base import BLOCK, FileWriter, ReplacingWriter, Storage

from ._tree_tests import TreeTests, create

__all__ = ["StorageTests"]

_T = TypeVar("_T")

_NUM_THREADS = 8


class StorageTests(TreeTests):
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
        create(storage, "c/data", b"old" * 2000)
        storage.copy("c/data", "d/data")
        create(storage, "c/data", b"new")
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
        create(storage, "data", memory[:10_000])
        assert storage.read("data", 4097, 100) == memory[4097:4197]
        assert storage.read("data", 9_990) == memory[9_990:10_000]
        with storage.open("data") as reader:
            assert reader.size == 10_000
            reader.read_into(10_000, memoryview(bytearray()))
            with pytest.raises(StorageError, match="data"):
                reader.read_into(9_999, memoryview(bytearray(2)))

    def test_concurrent_readers(self, storage: Storage, memory: mmap.mmap) -> None:
        """Many threads read ranges through the same reader at once."""
        create(storage, "data", memory[:])
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
