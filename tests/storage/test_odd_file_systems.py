"""File systems with words of their own: mounts of buckets, network and FUSE file systems that lack calls."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from catalog_kit import hold

from holdfast.errors import RunBusyError, StorageConflictError, StorageError, StorageExistsError, StorageFullError
from holdfast.run.lease import Lease, make_owner
from holdfast.storage.local import beneath, local_tree
from holdfast.storage.local.beneath import Ops
from holdfast.storage.local.local_storage import LocalStorage


class OddOps(Ops):
    """A file system that answers some calls with errors of its own.

    Args:
        errors: call -> errno.
    """

    def __init__(self, **errors: int) -> None:
        self.errors = errors

    def _may(self, call: str) -> None:
        if code := self.errors.get(call):
            raise OSError(code, os.strerror(code))

    def link(self, source: str, target: str) -> None:
        self._may("link")
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._may("rename")
        super().rename(source, target)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._may("close")


class LateLink(Ops):
    """A server that makes the link, and whose answer is lost."""

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Rival(Ops):
    """No hard links, and another process that takes the name just before this one would."""

    def link(self, source: str, target: str) -> None:
        Path(str(target)).write_bytes(b"theirs")
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_where_no_file_gets_a_second_name(tmp_path, code):
    """link(2) fails, with EIO at rclone's mounts: a manifest is put, once, and an unchanged file is copied."""
    storage = LocalStorage(tmp_path, ops=OddOps(link=code))
    storage.put("ck/manifest.json", b"one", if_absent=True)
    with pytest.raises(StorageExistsError):
        storage.put("ck/manifest.json", b"two", if_absent=True)
    storage.copy("ck/manifest.json", "next/manifest.json")
    assert storage.read("ck/manifest.json") == storage.read("next/manifest.json") == b"one"
    with storage.replace("big", 3) as writer:
        writer.write(memoryview(b"abc"))
        writer.publish(if_absent=True)
    assert names(tmp_path) == ["big", "manifest.json", "manifest.json"]


def test_a_link_whose_answer_is_lost(tmp_path):
    """The link is there and the call says EIO: that is our file, and nothing is left beside it."""
    storage = LocalStorage(tmp_path, ops=LateLink())
    storage.put("ck/manifest.json", b"one", if_absent=True)
    with pytest.raises(StorageExistsError):
        storage.put("ck/manifest.json", b"two", if_absent=True)
    assert storage.read("ck/manifest.json") == b"one"
    assert names(tmp_path) == ["manifest.json"]


def test_a_name_that_another_process_takes_first(tmp_path):
    """Without hard links, too, one of two processes has the name, and the other hears of it."""
    storage = LocalStorage(tmp_path, ops=Rival())
    with pytest.raises(StorageExistsError):
        storage.put("ck/manifest.json", b"ours", if_absent=True)
    assert storage.read("ck/manifest.json") == b"theirs"
    assert names(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_fsync(tmp_path, monkeypatch, caplog, code):
    """Fsync of a file says "not supported": a run starts and saves there, and what that means is logged once."""

    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(beneath, "_unsynced", set())
    storage = LocalStorage(tmp_path)
    hold(storage).release()
    with storage.create("a", 1) as writer:
        writer.write(memoryview(b"a"))
    storage.put("ck/manifest.json", b"one", if_absent=True)
    assert storage.read("ck/manifest.json") == b"one"
    said = [record.getMessage() for record in caplog.records if "has no fsync" in record.getMessage()]
    assert len(said) == 1
    assert str(tmp_path) in said[0]


def test_an_fsync_that_fails_is_no_missing_call(tmp_path, monkeypatch):
    """EIO of the fsync of a file is a lost write, and said as that."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="the device reported an error"):
        LocalStorage(tmp_path).put("a", b"one")
    assert names(tmp_path) == []


def write_put(storage: LocalStorage) -> None:
    storage.put("ck/manifest.json", b"one")


def write_new(storage: LocalStorage) -> None:
    storage.put("ck/manifest.json", b"one", if_absent=True)


def write_big(storage: LocalStorage) -> None:
    with storage.create("ck/manifest.json", 3) as writer:
        writer.write(memoryview(b"one"))


def write_replace(storage: LocalStorage) -> None:
    with storage.replace("ck/manifest.json", 3) as writer:
        writer.write(memoryview(b"one"))


def write_batch(storage: LocalStorage) -> None:
    with storage.batch(1) as batch:
        batch.add("ck/manifest.json", b"one")


WRITES = [write_put, write_new, write_big, write_replace, write_batch]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, StorageError), (errno.EDQUOT, StorageFullError)])
def test_a_close_that_says_what_was_lost(tmp_path, write, code, kind):
    """NFS and mounts of buckets report at close: the write fails, names the file, and no such file counts."""
    with pytest.raises(kind, match=r"cannot write .*manifest\.json"):
        write(LocalStorage(tmp_path, ops=OddOps(close=code)))
    if write is not write_batch:  # what a batch has added counts only after its close
        assert names(tmp_path) == []


@pytest.mark.parametrize("write", [write_put, write_new, write_replace])
def test_a_file_system_without_rename(tmp_path, write):
    """Nothing stands in for a rename: the error says what the file system lacks, and nothing is left."""
    storage = LocalStorage(tmp_path, ops=OddOps(rename=errno.ENOSYS, link=errno.ENOSYS))
    with pytest.raises(StorageError, match="lacks the call"):
        write(storage)
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_taken_is_copied(tmp_path):
    """`adopt` needs a rename; without it the caller copies the file."""
    (tmp_path / "source").write_bytes(b"abc")
    storage = LocalStorage(tmp_path / "run", ops=OddOps(rename=errno.ENOSYS))
    assert storage.adopt(str(tmp_path / "source"), "a") is False
    assert (tmp_path / "source").read_bytes() == b"abc"


# -- the same in real processes: a library that answers for the C library

SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>
#include <sys/file.h>
int linkat(int a, const char *b, int c, const char *d, int e) { errno = EIO; return -1; }
int link(const char *a, const char *b) { errno = EIO; return -1; }
int fsync(int fd) { errno = EINVAL; return -1; }
int fdatasync(int fd) { errno = EINVAL; return -1; }
"""

TRAINING = """
import sys, torch, holdfast as hf
for life in range(2):
    with hf.Checkpointer(sys.argv[1], {"w": torch.zeros(1000)}, every=1) as ck:
        for step in range(3):
            ck.step(loss=1.0)
    print(ck.latest().step)
print(ck.latest().verify(deep=True).ok)
"""


@pytest.mark.skipif(shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="needs gcc on Linux")
def test_a_run_on_a_mount_of_a_bucket(tmp_path):
    """Trainer and writer on a file system without links and fsync (rclone's way): saved, found, resumed, verified."""
    (tmp_path / "odd.c").write_text(SHIM)
    library = tmp_path / "odd.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "odd.c"], check=True)
    environment: dict[str, Any] = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, tmp_path / "run"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "6", "True"]
    assert "has no fsync" in done.stderr


@pytest.mark.parametrize("code", [0, errno.ENOTSUP, errno.ENOTTY, errno.EIO])
def test_where_fsync_leaves_bytes_in_the_cache_of_the_disk(tmp_path, monkeypatch, code):
    """On macOS the disk is told to store them, by a call that some file systems lack; a lost write is an error."""
    asked, synced, fsync = [], [], os.fsync

    def full(fd: int, command: int) -> int:
        asked.append(command)
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    monkeypatch.setattr(beneath, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    with pytest.raises(StorageError) if code == errno.EIO else contextlib.nullcontext():
        LocalStorage(tmp_path).put("a", b"one")
    assert set(asked) == {51}
    assert len(synced) == (0 if code in (0, errno.EIO) else len(asked))


def refuse_locks(fd: int, how: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_no_change_of_a_file_is_lost(tmp_path, monkeypatch):
    """Four at once swap a counter on a share without flock: each change is made on what the one before has written."""
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    storage = LocalStorage(tmp_path)
    storage.put("count", b"0")

    def count() -> None:
        for _ in range(10):
            while True:
                data, etag = storage.read_tagged("count")
                with contextlib.suppress(StorageConflictError):
                    storage.put("count", b"%d" % (int(data) + 1), if_match=etag, durable=False)
                    break

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(count) for _ in range(4)]:
            one.result()
    assert storage.read("count") == b"40"
    assert not (tmp_path / local_tree._HELD_NAME).exists()


def test_without_locks_the_name_of_a_dead_holder_is_taken_away(tmp_path, monkeypatch):
    """Who dies in the middle of a swap leaves a name: the next waits for it, then goes on; one that lives is let be."""
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    monkeypatch.setattr(local_tree, "_GONE_S", 0.2)
    held, storage = tmp_path / local_tree._HELD_NAME, LocalStorage(tmp_path)
    etag = storage.put("a", b"1")
    held.touch()
    begun = time.monotonic()
    storage.put("a", b"2", if_match=etag)
    assert time.monotonic() - begun >= 0.2
    assert names(tmp_path) == ["a"]
    held.touch()  # of another, who was first to take the dead one's away
    local_tree._take_away(str(held), None, (0, 0))
    assert held.exists()


def test_without_locks_a_run_has_one_owner(tmp_path, monkeypatch):
    """The lease is had, renewed, refused to another, and given up."""
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    storage = LocalStorage(tmp_path)
    lease = Lease.acquire(storage, make_owner("ab12"), wait_s=0)
    lease.heartbeat()
    with pytest.raises(RunBusyError):
        Lease.acquire(storage, make_owner("cd34"), wait_s=0)
    lease.release()
    Lease.acquire(storage, make_owner("cd34"), wait_s=0).release()


SWAP = """
import sys
from holdfast.storage.local import beneath, local_tree
from holdfast.storage.local.local_storage import LocalStorage
local_tree.type_of_file_system = lambda fd: 0x6969
storage = LocalStorage(sys.argv[1])
print("begins", flush=True)
storage.put("a", b"2", if_match=sys.argv[2], durable=False)
print("done", flush=True)
"""


def test_where_the_lock_of_a_directory_is_that_of_one_machine(tmp_path, monkeypatch):
    """On NFS a file is locked, as the other machine does: a lock of the directory, which it does not see, is none."""
    etag = LocalStorage(tmp_path).put("a", b"1")
    monkeypatch.setattr(local_tree, "type_of_file_system", lambda fd: 0x6969)
    here = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(here, fcntl.LOCK_EX)  # of this machine alone, so it keeps nobody out
    with local_tree.locked(str(tmp_path)):
        other = subprocess.Popen(
            [sys.executable, "-c", SWAP, tmp_path, etag], stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "begins\n"
        time.sleep(0.2)
        assert LocalStorage(tmp_path).read("a") == b"1"
    assert other.stdout.readline() == "done\n"
    assert other.wait() == 0
    other.stdout.close()
    os.close(here)
    assert LocalStorage(tmp_path).read("a") == b"2"
    assert [found.path for found in LocalStorage(tmp_path).list()] == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_share_without_locks(tmp_path, monkeypatch, code):
    """Lustre without its option for flock says ENOSYS for a file: a name that one process can make stands in."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local_tree, "type_of_file_system", lambda fd: 0x0BD00BD0)
    monkeypatch.setattr(fcntl, "flock", refuse)
    storage = LocalStorage(tmp_path)
    etag = storage.put("a", b"1")
    with local_tree.locked(str(tmp_path)):
        assert (tmp_path / local_tree._HELD_NAME).exists()
    storage.put("a", b"2", if_match=etag, durable=False)
    assert names(tmp_path) == ["a"]
