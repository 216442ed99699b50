"""Big files that take the place of others in one step: `LocalStorage.replace`."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import pytest

from holdfast.errors import StorageConflictError, StorageError, StorageExistsError
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage.local import local_tree
from holdfast.storage.local.beneath import Ops
from holdfast.testing import FaultyOps, FaultyStorage, power_cut_states, snapshot

SIZE = 9000


def page_aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, -(-len(data) // 4096) * 4096)
    memory[: len(data)] = data
    return memoryview(memory)


NEW = bytes(range(250)) * 36
VIEW = page_aligned(NEW)


def started(storage, path="d/a"):
    """A replacement whose bytes are all written, the last view padded to a whole page."""
    writer = storage.replace(path, SIZE)
    writer.write(VIEW[:8192])
    writer.write(VIEW[8192:])
    return writer


def below(root):
    return sorted(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)


def test_nobody_sees_it_before_it_is_whole(tmp_path):
    """Until `publish` the old file is there, and no listing names the new one; then the new one, cut to its size."""
    storage = LocalStorage(tmp_path)
    storage.put("d/a", b"old")
    writer = started(storage)
    assert storage.read("d/a") == b"old"
    assert [info.path for info in storage.list()] == ["d/a"]
    writer.publish()
    assert storage.read("d/a") == NEW
    writer.publish()
    writer.close()
    writer.abort()
    assert below(tmp_path) == [str(tmp_path / "d/a")]


def test_conditions_may_fail_and_be_tried_again(tmp_path):
    """A condition that fails leaves what is there; the same bytes may then be published on another one."""
    storage = LocalStorage(tmp_path)
    writer = started(storage)
    theirs = storage.put("d/a", b"theirs")
    with pytest.raises(StorageExistsError):
        writer.publish(if_absent=True)
    with pytest.raises(StorageConflictError):
        writer.publish(if_match="another")
    assert storage.read("d/a") == b"theirs"
    writer.publish(if_match=theirs)
    assert storage.read("d/a") == NEW
    with started(storage, "b") as other:
        pass
    other.close()
    assert storage.read("b") == NEW
    third = started(storage, "c")
    third.publish(if_absent=True)
    assert storage.read("c") == NEW
    assert len(below(tmp_path)) == 3


def test_what_is_given_up_leaves_nothing(tmp_path):
    """Aborted, closed too early, or refused by the disk: no file, no directory, and the old content."""
    storage = LocalStorage(tmp_path)
    started(storage).abort()
    assert below(tmp_path) == []
    storage.put("d/a", b"old")
    writer = storage.replace("d/a", SIZE)
    writer.write(VIEW[:4096])
    with pytest.raises(StorageError, match=r"cannot finish .*/d/a: 4096 of 9000 bytes"):
        writer.close()
    for operation in ("open", "pwrite", "ftruncate", "fsync", "rename"):
        faulty = FaultyStorage(tmp_path, fail_on={operation: errno.EIO})
        with pytest.raises(StorageError, match=r"/d/a: .*device reported an error"), faulty.replace("d/a", SIZE) as new:
            new.write(VIEW)
    assert below(tmp_path) == [str(tmp_path / "d/a")]
    assert storage.read("d/a") == b"old"


@pytest.mark.parametrize("operation", ["fsync", "close"])
def test_lost_bytes_are_never_published_later(tmp_path, operation):
    """The kernel reports once what it could not store: who publishes again gets an error, not a file of other bytes."""

    class LosesBytes(Ops):
        lost = False

        def fail_once(self, at):
            if at == operation and not self.lost:
                self.lost = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        def fsync(self, fd):
            self.fail_once("fsync")
            super().fsync(fd)

        def close(self, fd):
            super().close(fd)
            self.fail_once("close")

    storage = LocalStorage(tmp_path)
    storage.put("d/a", b"old")
    writer = started(LocalStorage(tmp_path, ops=LosesBytes()))
    with pytest.raises(StorageError, match="device reported an error"):
        writer.publish()
    for again in (writer.publish, writer.close):
        with pytest.raises(StorageError, match="given up before; write it again"):
            again()
    assert storage.read("d/a") == b"old"
    assert below(tmp_path) == [str(tmp_path / "d/a")]


def test_one_that_is_written_is_not_swept(tmp_path):
    """Another process that starts in the same directory leaves it alone; what a dead process left it removes."""
    storage = LocalStorage(tmp_path)
    writer = started(storage)
    (tmp_path / "d/.tmp-1-0123456789ab").write_bytes(b"of a dead process")
    LocalStorage(tmp_path).put("d/b", b"next start")
    assert [name for name in os.listdir(tmp_path / "d") if name.startswith(".tmp-1-")] == []
    writer.publish()
    assert storage.read("d/a") == NEW


def test_every_power_cut_leaves_the_old_file_or_the_new_one(tmp_path):
    """Published means durable; before that the old content is whole."""
    ops = FaultyOps(record=True)
    storage = FaultyStorage(tmp_path, ops=ops)
    storage.put("d/a", b"old")
    before = snapshot(tmp_path)
    ops.log.clear()
    started(storage).publish()
    ops.mark("published")
    states = list(power_cut_states(ops.log, before))
    assert {state.files.get("d/a") for state in states} == {b"old", NEW}
    assert all(state.files["d/a"] == NEW for state in states if "published" in state.marks)


def test_stores_do_it_by_themselves(tmp_path):
    """A store has nothing of the kind; a prefix has what the storage below it has."""
    assert MemoryStorage("replaces").replace("a", 3) is None
    with LocalStorage(tmp_path).child("x").replace("a", SIZE) as writer:
        writer.write(VIEW)
    assert (tmp_path / "x/a").read_bytes() == NEW


@pytest.mark.parametrize("is_slow", [False, True], ids=["removed before the lock", "locked before the lock"])
def test_a_sweep_that_sees_the_new_file_before_its_lock_takes_no_bytes(tmp_path, monkeypatch, is_slow):
    """Another trainer that starts in the same folder at that moment costs another temporary name, not the file."""
    storage, lock_new, swept = LocalStorage(tmp_path), local_tree.lock_new, []

    def late(folder, name, fd):
        if not swept:
            swept.append(name)
            sweeper = os.open(folder.path + "/" + name, os.O_RDONLY)
            fcntl.flock(sweeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_slow:
                os.unlink(folder.path + "/" + name)
                os.close(sweeper)
        lock_new(folder, name, fd)

    monkeypatch.setattr(local_tree, "lock_new", late)
    started(storage).publish()
    assert len(swept) == 1
    assert storage.read("d/a") == NEW
    assert below(tmp_path) == [str(tmp_path / "d/a")]
