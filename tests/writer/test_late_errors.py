"""One error at each future and thread of a save: none is lost, and what it belongs to does not count."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
import writer_kit as kit

from holdfast import Checkpoint, load, save
from holdfast.errors import HoldfastError, StorageError, StorageUnavailableError
from holdfast.format.commit import read_manifest
from holdfast.storage import FileWriter, MemoryStorage, StorageTraits
from holdfast.writer.client import WriterClient
from holdfast.writer.pipeline import Watermark, WindowSource
from holdfast.writer.ranks.agreement import CommitSave, JointSaves

CONTENTS = [kit.noise(1, 3 * kit.MIB), b"", kit.noise(2, 5), kit.noise(3, kit.MIB)]
_numbers = count()


class _Breaking(FileWriter):
    def __init__(self, inner: FileWriter, storage: Breaking, *, breaks: bool) -> None:
        self._inner, self._storage, self._breaks = inner, storage, breaks

    def write(self, view: memoryview) -> None:
        if self._breaks:
            self._storage.may("write")
        self._inner.write(view)

    def close(self) -> None:
        self._inner.close()
        self._storage.ended.add(self)
        if self._breaks:
            self._storage.may("close")

    def abort(self) -> None:
        self._inner.abort()
        self._storage.ended.add(self)


class Breaking(MemoryStorage):
    """Fails one call of one of the files that are created, counted from 0.

    Args:
        number: of the file.
        call: "create", "write" or "close".
        parallel: requests side by side, as a store takes them; 1 for a disk.
    """

    def __init__(self, number: int, call: str, parallel: int) -> None:
        super().__init__(f"breaking-{next(_numbers)}")
        self.left, self.call, self.has_failed = number, call, False
        self.begun: list[_Breaking] = []
        self.ended: set[_Breaking] = set()
        self._traits = StorageTraits(num_parallel=parallel)

    @property
    def traits(self) -> StorageTraits:
        return self._traits

    def may(self, call: str) -> None:
        if call == self.call:
            self.has_failed = True
            raise StorageError("lost by the disk")

    def create(self, path: str, size: int) -> FileWriter:
        self.left, mine = self.left - 1, self.left == 0
        if mine:
            self.may("create")
        self.begun.append(_Breaking(super().create(path, size), self, breaks=mine))
        return self.begun[-1]


class Backlog(MemoryStorage):
    """A gateway that does not answer to the next manifest, and carries the request out later."""

    def __init__(self) -> None:
        super().__init__(f"backlog-{next(_numbers)}")
        self.is_slow, self.waiting = False, []

    def put(self, path: str, data: bytes | memoryview, **conditions: Any) -> str | None:
        if self.is_slow and path.endswith("manifest.json"):
            self.waiting.append(partial(super().put, path, bytes(data), **conditions))
            raise StorageUnavailableError("no answer in time")
        return super().put(path, data, **conditions)

    def catch_up(self) -> None:
        """Do what waits, as far as it is not refused by now."""
        self.is_slow = False
        for act in self.waiting:
            with suppress(StorageError):
                act()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_lands_after_its_save_has_failed(overwrite: bool, again: bool) -> None:
    """The checkpoint is then whole: nothing of it was taken away. A save after it leaves nothing of it behind."""
    storage = Backlog()
    at = Checkpoint.at(storage, "best")
    if overwrite:
        save(at, {"w": 1})
    storage.is_slow = True
    with pytest.raises(StorageUnavailableError):
        save(at, {"w": 2}, overwrite=overwrite)
    if again:
        storage.is_slow = False
        save(at, {"w": 3}, overwrite=True)
    storage.catch_up()
    assert load(at)["w"] == 2 + again
    listed = {entry.path for entry in read_manifest(storage, "best").files}
    assert again <= ({info.path.partition("/")[2] for info in storage.list("best")} == {*listed, "manifest.json"})


@pytest.mark.parametrize("parallel", [1, 16])
@pytest.mark.parametrize("call", ["create", "write", "close"])
def test_each_file_of_a_save_may_fail(call: str, parallel: int) -> None:
    """An error of any file, also one that comes late on the other thread, is the error of the save: no commit."""
    failed = 0
    for number in range(12):
        storage = Breaking(number, call, parallel)
        with WriterClient.start(storage) as client, kit.fill(CONTENTS) as arena:
            job = kit.make_job(CONTENTS)
            error = client.submit(storage, job, [b"{}"], arena).exception(60)
            assert storage.ended == {*storage.begun}, "each file is closed, or given up"
            if not storage.has_failed:  # there are no more files, or nothing is written to this one
                assert error is None
                continue
            failed += 1
            assert error is not None
            assert "lost by the disk" in str(error)
            assert Checkpoint.at(storage, job.directory).verify(deep=False).state in ("missing", "incomplete")
    assert failed >= 4


def test_a_save_that_is_being_committed_is_not_given_up() -> None:
    """All parts are stored and the manifest is on its way: time that runs out then makes no failure of it."""
    one: Any = JointSaves(2, timeout_s=10.0)
    for rank in (0, 1):
        one.begun(rank, "s-1", "step_4", 4, 0.0)
    assert one.stored(0, "s-1") == []
    assert one.stored(1, "s-1") == [CommitSave(save="s-1")]
    assert one.expire(1000.0) == []
    assert one.failed(0, "s-1", {"type": "StorageError", "message": "late", "extra": {}}) == []
    assert one.lost(1, "its writer process has died") == []
    assert one.left(0, "closed") == []
    (told,) = one.committed("s-1", value={}, error=None)
    assert told.error is None


class Late(MemoryStorage):
    """Stores the manifest, and fails afterwards: the directory could not be made durable, say."""

    def put(self, path: str, data: Any, **conditions: Any) -> str | None:
        etag = super().put(path, data, **conditions)
        if path.endswith("manifest.json"):
            raise StorageError("too late")
        return etag


def test_an_error_after_the_manifest_takes_no_file_away() -> None:
    """Nobody may count on the save; who finds its manifest finds a whole checkpoint."""
    storage = Late(f"late-{next(_numbers)}")
    with WriterClient.start(storage) as client, kit.fill(CONTENTS) as arena:
        job = kit.make_job(CONTENTS)
        assert "too late" in str(client.submit(storage, job, [b"{}"], arena).exception(60))
    checkpoint = Checkpoint.at(storage, job.directory)
    assert checkpoint.verify(deep=False).ok
    assert checkpoint.step == job.manifest["step"]


@pytest.mark.parametrize("kind", ["filled", "windowed"])
def test_what_is_complete_is_not_given_up(kind: str) -> None:
    """The trainer has died in between: all bytes were there, so the save goes on."""
    why = HoldfastError("the trainer has died")
    if kind == "filled":
        mark = Watermark(0, 8)
        mark.rise(8)
        mark.abandon(why)
        mark.wait(8)
        mark = Watermark(0, 8)
        mark.rise(7)
        mark.abandon(why)
        with pytest.raises(HoldfastError, match="has died"):
            mark.wait(4)
        return
    source = WindowSource(print)
    source.seal()
    source.abandon(why)
    assert list(source.windows()) == []
    source = WindowSource(print)
    source.abandon(why)
    with pytest.raises(HoldfastError, match="has died"):
        list(source.windows())
