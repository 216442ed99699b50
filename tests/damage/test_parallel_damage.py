"""Damage is found by whichever thread meets it: files of many blocks, a flipped byte in each, on every parallel path.

Small files are read, digested and copied by one thread; these are as large as it takes for the others to work too.
"""

from __future__ import annotations

import threading

import pytest
import torch

import holdfast as hf
from holdfast import Checkpoint
from holdfast.errors import CorruptCheckpointError
from holdfast.format.commit import read_manifest
from holdfast.state.load.reader import BLOCK
from holdfast.storage import FileReader, FileWriter, LocalStorage, MemoryStorage

BLOCKS = 10
LIMIT_S = 60


def make_state(fill: float = 1.0) -> dict[str, torch.Tensor]:
    """One tensor of many blocks, and small ones that share blocks and go through a buffer."""
    big = torch.full((BLOCKS * BLOCK // 4,), fill)
    return {
        "big": big,
        "small": torch.full((3, 1000), fill),
        **{f"t{n}": torch.full((50_000,), fill) for n in range(8)},
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    home = tmp_path_factory.mktemp("parallel") / "good"
    hf.save(home, make_state())
    return home


def blocks_of(home):
    """Yield a file and an offset within each block of each tensor file."""
    manifest = read_manifest(LocalStorage(home), "")
    places = [
        (home / entry.path, offset + 4321)
        for entry in manifest.with_role("tensors")
        for offset in range(0, entry.size - 4321, BLOCK)
    ]
    assert len(places) > BLOCKS
    return places


class Flipped:
    """A byte of a file that differs from what was written, for the time of a ``with``."""

    def __init__(self, path, offset: int) -> None:
        self._path, self._offset = path, offset

    def _flip(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._offset)
            (value,) = file.read(1)
            file.seek(self._offset)
            file.write(bytes([value ^ 8]))

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()


def test_a_flip_in_each_block_is_found_by_loads(good):
    """Whole, and into live tensors: each raises, whichever thread has the block."""
    for path, offset in blocks_of(good):
        with Flipped(path, offset):
            for into in (None, make_state(0.0)):
                with pytest.raises(CorruptCheckpointError, match=path.name):
                    hf.load(good, into)
    live = make_state(0.0)
    hf.load(good, live)
    assert all(bool((tensor == 1).all()) for tensor in live.values())


def test_a_flip_in_each_block_is_found_by_verify(good):
    """One problem, which names the chunk."""
    for path, offset in blocks_of(good):
        with Flipped(path, offset):
            (problem,) = Checkpoint(good).verify().problems
            assert f"(chunk {offset // 65536})" in problem


def test_a_flip_in_each_block_is_found_by_downloads(good, tmp_path):
    """A download ends with the error, and leaves no checkpoint (of every fifth block)."""
    away = MemoryStorage(f"away-{tmp_path.name}")
    for path in good.iterdir():
        away.put(f"one/{path.name}", path.read_bytes())
    for number, (path, offset) in enumerate(blocks_of(good)[::5]):
        data = bytearray(path.read_bytes())
        data[offset] ^= 8
        away.put(f"one/{path.name}", bytes(data))
        with pytest.raises(CorruptCheckpointError, match="digest differs"):
            Checkpoint.at(away, "one").to_directory(tmp_path / str(number))
        assert not (tmp_path / str(number) / "manifest.json").exists()
        away.put(f"one/{path.name}", path.read_bytes())
    away.delete_tree("one")


class WrongInTheOtherThread(MemoryStorage):
    """Gives wrong bytes once, to the thread that helps the caller; the caller waits for that before it reads on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.done, self.caller = threading.Event(), threading.current_thread()

    def open(self, path: str) -> FileReader:
        reader = super().open(path)
        return _WrongReader(reader, self) if reader.size > 5 * BLOCK else reader


class _WrongReader(FileReader):
    def __init__(self, reader: FileReader, storage: WrongInTheOtherThread) -> None:
        self._reader, self._storage, self.size = reader, storage, reader.size

    def read_into(self, offset: int, view: memoryview) -> None:
        self._reader.read_into(offset, view)
        if threading.current_thread() is self._storage.caller:
            assert self._storage.done.wait(LIMIT_S), "nobody helps"
        elif not self._storage.done.is_set():
            view[0] ^= 1
            self._storage.done.set()

    def close(self) -> None:
        self._reader.close()


def test_an_error_of_the_helping_thread_is_raised(good, tmp_path):
    """Whatever the caller's own blocks hold: the load fails with the error of the other thread."""
    storage = WrongInTheOtherThread(f"wrong-{tmp_path.name}")
    for path in good.iterdir():
        storage.put(f"one/{path.name}", path.read_bytes())
    with pytest.raises(CorruptCheckpointError, match="not what was written"):
        hf.load(Checkpoint.at(storage, "one"), make_state(0.0))
    assert storage.done.is_set()
    storage.delete_tree("one")


class LyingDisk(MemoryStorage):
    """Stores another byte than it was given, in one block of big files."""

    block = 0

    def create(self, path: str, size: int) -> FileWriter:
        writer = super().create(path, size)
        return _LyingWriter(writer, self.block * BLOCK + 77) if size > BLOCKS * BLOCK // 2 else writer


class _LyingWriter(FileWriter):
    def __init__(self, writer: FileWriter, at: int) -> None:
        self._writer, self._at, self._done = writer, at, 0

    def write(self, view: memoryview) -> None:
        data = bytearray(view)
        if self._done <= self._at < self._done + len(data):
            data[self._at - self._done] ^= 1
        self._done += len(data)
        self._writer.write(memoryview(data))

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.abort()


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_digests_are_of_what_was_to_be_written(tmp_path, way):
    """A disk that stores something else, in every third block in turn: the digests, made beside the writing, tell."""
    storage = LyingDisk(f"lying-{tmp_path.name}")
    for storage.block in range(0, BLOCKS, 3):
        target = Checkpoint.at(storage, f"{way}-{storage.block}")
        if way == "save":
            hf.save(target, make_state())
        else:
            hf.save_async(target, make_state()).result(LIMIT_S)
        assert len(target.verify().problems) == 1, storage.block
        with pytest.raises(CorruptCheckpointError):
            hf.load(target)
        storage.delete_tree(target.directory)
