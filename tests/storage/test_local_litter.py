"""Local storage among other processes: cooperation, and the litter that dead ones leave."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading

import pytest

from holdfast.errors import (
    StorageConflictError,
)
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyStorage

BLOCK = 4096
DEAD, ALIVE, YOUNG = (f".tmp-{number}-0123456789ab" for number in (1, 2, 3))


CRASHES = """
import os, sys
from holdfast.storage import LocalStorage
from holdfast.testing import CRASH_EXIT_CODE, FaultyOps, FaultyStorage
root, tear = sys.argv[1], sys.argv[2] == "tear"
number = 0
while True:
    place = f"{root}/{number}"
    LocalStorage(place).put("d/a", b"old")
    child = os.fork()
    if child == 0:
        storage = FaultyStorage(place, crash_at=number, tear=tear)
        storage.put("d/a", b"new" * 1000)
        storage.put("d/b", b"new", if_absent=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = LocalStorage(place).read("d/a")
    assert found in (b"old", b"new" * 1000), (number, found)
    LocalStorage(place).put("d/c", b"next start")
    assert set(os.listdir(place + "/d")) <= {"a", "b", "c"}, (number, os.listdir(place + "/d"))
    if status == 0:
        break
    assert status == CRASH_EXIT_CODE, status
    number += 1
print(number)
"""


@pytest.mark.parametrize("tear", ["", "tear"])
def test_crash_at_each_operation(tmp_path, tear):
    """A process killed before (or in the middle of) any operation leaves old or new, and the next start no litter."""
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path), tear], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 13


def test_dead_temporaries_are_swept_and_live_ones_kept(tmp_path):
    """The first write into a directory removes temporary files whose writer is dead; one in use keeps its lock."""
    (tmp_path / DEAD).write_bytes(b"1")
    with open(tmp_path / ALIVE, "wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        storage = LocalStorage(tmp_path)
        assert list(storage.list()) == []
        storage.put("a", b"1")
        assert sorted(os.listdir(tmp_path)) == [ALIVE, "a"]


def test_dead_temporaries_are_swept_where_a_lock_needs_a_file_open_for_writing(tmp_path, monkeypatch):
    """NFS locks exclusively only what is open for writing, and perhaps on one machine only: old dead files go."""
    real = fcntl.flock

    def flock(fd, how):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR) == os.O_RDONLY:
            raise OSError(errno.EBADF, "open for writing first")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    for name in (DEAD, YOUNG):
        (tmp_path / name).write_bytes(b"1")
    with open(tmp_path / ALIVE, "wb") as alive:
        for name in (DEAD, ALIVE):
            os.utime(tmp_path / name, (1.0, 1.0))
        fcntl.flock(alive, fcntl.LOCK_EX)
        LocalStorage(tmp_path).put("a", b"1")
        assert sorted(os.listdir(tmp_path)) == [ALIVE, YOUNG, "a"]


def test_files_of_other_programs_stay(tmp_path):
    """A name that only begins like ours is a user's file: no write, sweep or deletion beside it takes it."""
    storage, names = LocalStorage(tmp_path), [".tmp-download.part", ".tmp-1-notes", ".tmp-12345"]
    (tmp_path / "d").mkdir()
    for name in (*names, DEAD):
        (tmp_path / "d" / name).write_bytes(b"hours of work")
    storage.put("d/a", b"1")
    storage.tidy("d")
    storage.delete("d/a")
    assert sorted(os.listdir(tmp_path / "d")) == sorted(names)


def test_temporaries_that_are_no_files_stay(tmp_path):
    """Sweeping removes files alone."""
    (tmp_path / ".tmp-directory").mkdir()
    (tmp_path / DEAD).write_bytes(b"1")
    LocalStorage(tmp_path).put("a", b"1")
    assert sorted(os.listdir(tmp_path)) == [".tmp-directory", "a"]


def test_delete_takes_dead_temporaries_along(tmp_path):
    """A directory that holds only what a dead writer left counts as empty."""
    storage = LocalStorage(tmp_path)
    storage.put("d/a", b"1")
    (tmp_path / f"d/{DEAD}").write_bytes(b"1")
    storage.delete("d/a")
    assert os.listdir(tmp_path) == []


def test_directory_that_vanishes(tmp_path):
    """Writers and deleters of one directory do not trip over each other when it is pruned in between."""
    another, stop, failures = LocalStorage(tmp_path), threading.Event(), []

    def other():
        try:
            while not stop.is_set():
                another.put("d/x", b"1")
                another.delete("d/x")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        storage = LocalStorage(tmp_path)
        for _ in range(60):
            storage.put("d/a", b"1")
            storage.create("d/b", 0).close()
            storage.delete("d/a")
            storage.delete("d/b")
    finally:
        stop.set()
        thread.join(60)
    assert failures == []


def test_conditional_put_where_directories_cannot_be_locked(tmp_path, monkeypatch):
    """Where the file system locks no directory (NFS), a lock file that is never listed does it."""
    real = fcntl.flock

    def flock(fd, how):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "open for writing first")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    storage = LocalStorage(tmp_path)
    first = storage.put("d/a", b"1")
    storage.put("d/a", b"2", if_match=first)
    with pytest.raises(StorageConflictError, match="another process changed it"):
        storage.put("d/a", b"3", if_match=first)
    assert [info.path for info in storage.list()] == ["d/a"]
    storage.delete("d/a")
    assert os.listdir(tmp_path) == []


def test_copy_shares_bytes(tmp_path):
    """A copy is a hard link: it costs no space; where links are impossible the bytes are copied."""
    storage = LocalStorage(tmp_path)
    storage.put("a", b"1" * 100_000)
    storage.copy("a", "d/b")
    assert os.path.samefile(tmp_path / "a", tmp_path / "d/b")
    other = FaultyStorage(tmp_path, fail_on={"link": errno.EXDEV})
    other.copy("a", "d/c")
    assert not os.path.samefile(tmp_path / "a", tmp_path / "d/c")
    assert storage.read("d/c") == b"1" * 100_000
