"""The door of a local storage: no operation follows a link below the root, by the kernel's means or without them."""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
from holdfast.storage.local import beneath
from holdfast.storage.local.local_storage import as_given
from holdfast.testing import FaultyStorage, StorageTests


@pytest.fixture(params=["kernel", "by parts"])
def way(request, monkeypatch):
    """Both ways to open: `openat2`, and directory after directory where a sandbox refuses it."""
    found = beneath._by_kernel()
    if request.param == "kernel" and found is None:
        pytest.skip("this kernel or sandbox has no openat2")
    monkeypatch.setattr(beneath, "_way", lambda: found if request.param == "kernel" else beneath._by_parts)
    return request.param


@pytest.fixture
def outside(tmp_path):
    """A directory that nobody may touch, and a copy of what is in it."""
    home = tmp_path / "outside"
    (home / "sub").mkdir(parents=True)
    (home / "precious").write_bytes(b"precious")
    (home / "sub/file").write_bytes(b"also")
    before = tree(home)
    yield home
    assert tree(home) == before


def tree(home):
    return {
        os.path.relpath(os.path.join(at, name), home): Path(at, name).read_bytes()
        for at, _, names in os.walk(home)
        for name in names
    }


def write(storage, path):
    with storage.create(path, 3) as writer:
        writer.write(memoryview(b"abc"))


READ = {
    "open": lambda storage, path: storage.open(path),
    "read": lambda storage, path: storage.read(path),
    "stat": lambda storage, path: storage.stat(path),
    "exists": lambda storage, path: storage.exists(path),
    "copy from": lambda storage, path: storage.copy(path, "copied"),
    "list": lambda storage, path: list(storage.list(path)),
    "sync": lambda storage, path: storage.sync(path),
    "child": lambda storage, path: storage.child(path.rpartition("/")[0]).read(path.rpartition("/")[2]),
}
WRITE = {
    "put": lambda storage, path: storage.put(path, b"1"),
    "put new": lambda storage, path: storage.put(path, b"1", if_absent=True),
    "put if": lambda storage, path: storage.put(path, b"1", if_match="x"),
    "create": write,
    "copy to": lambda storage, path: storage.copy("own", path),
    "adopt": lambda storage, path: storage.adopt(os.path.join(storage.uri, "own"), path),
}
REMOVE = {
    "delete": lambda storage, path: storage.delete(path),
    "delete_tree": lambda storage, path: storage.delete_tree(path),
    "delete_tree above": lambda storage, path: storage.delete_tree("run"),
    "tidy": lambda storage, path: storage.tidy(path),
}


@pytest.mark.parametrize("name", [*READ, *WRITE, *REMOVE])
def test_a_directory_that_is_a_link(tmp_path, outside, way, name):
    """What lies behind it is not read, written, listed or removed; the message says that it is a link."""
    storage = LocalStorage(tmp_path / "root")
    storage.put("own", b"own")
    storage.put("run/a", b"1")
    (tmp_path / "root/run/link").symlink_to(outside)
    if name in REMOVE:
        for path in ("run/link/precious", "run/link/sub", "run/link/sub/file"):
            REMOVE[name](storage, path)
        return
    action = (READ | WRITE)[name]
    for path in ("run/link/precious", "run/link/sub/file", *(["run/link/new"] if name in WRITE else [])):
        with pytest.raises(StorageError, match="symbolic link") as caught:
            action(storage, path)
        assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("name", ["open", "read", "stat", "exists", "copy from", "sync"])
def test_a_file_that_is_a_link_is_not_read(tmp_path, outside, way, name):
    """Not even if it leads to a file of the same storage."""
    storage = LocalStorage(tmp_path / "root")
    storage.put("run/a", b"1")
    for target in (outside / "precious", "a"):
        (tmp_path / "root/run/link").symlink_to(target)
        with pytest.raises(StorageError, match="symbolic link"):
            READ[name](storage, "run/link")
        os.unlink(tmp_path / "root/run/link")


def test_a_file_that_is_a_link_is_replaced_and_removed_itself(tmp_path, outside, way):
    """Writing and deleting are about the name."""
    storage = LocalStorage(tmp_path / "root")
    link = tmp_path / "root/run/link"
    for change in (WRITE["put"], write, REMOVE["delete"]):
        storage.put("run/a", b"1")
        link.symlink_to(outside / "precious")
        change(storage, "run/link")
        assert not link.is_symlink()
        link.unlink(missing_ok=True)


def test_links_above_the_root_are_the_users_own(tmp_path, way):
    """Also the root itself may be one, and may be made to lead elsewhere later."""
    (tmp_path / "disk/one").mkdir(parents=True)
    (tmp_path / "disk/two").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "root").symlink_to("runs/one")
    for root in (tmp_path / "root", tmp_path / "runs/one", tmp_path / "runs/one/new"):
        storage = LocalStorage(root)
        storage.put("a/b", b"1")
        assert storage.read("a/b") == b"1"
        assert [info.path for info in storage.list("a")] == ["a/b"]
        storage.delete("a/b")
    # A directory above is renamed, and a link is left in its place: the storage goes on.
    storage.put("a/b", b"1")
    (tmp_path / "disk").rename(tmp_path / "moved")
    (tmp_path / "disk").symlink_to("moved")
    assert storage.read("a/b") == b"1"
    storage.put("a/b", b"2")
    assert (tmp_path / "moved/one/new/a/b").read_bytes() == b"2"


def test_a_named_run_may_be_a_link(tmp_path, way):
    """`storage_path` and `name` are both the user's words: the run may lie on another disk."""
    (tmp_path / "big").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/first").symlink_to(tmp_path / "big")
    storage = as_given(LocalStorage(tmp_path / "runs").child("first"))
    storage.put("a", b"1")
    assert (tmp_path / "big/a").read_bytes() == b"1"
    (tmp_path / "big/link").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="symbolic link"):
        storage.put("link/b", b"1")


def test_links_that_come_and_go_while_it_works(tmp_path, outside, way):
    """Another process swaps a directory and a link as fast as it can: nothing gets out, between no two calls."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        pytest.skip("this libc has no renameat2")
    storage = LocalStorage(tmp_path / "root")
    storage.put("d/keep", b"1")
    (tmp_path / "link").symlink_to(outside)
    one, two, stop = os.fsencode(tmp_path / "root/d"), os.fsencode(tmp_path / "link"), threading.Event()

    def swap():
        while not stop.is_set():
            assert exchange(-100, one, -100, two, 2) == 0
            stop.wait(0.0002)

    thread = threading.Thread(target=swap)
    thread.start()
    refused = done = 0
    try:
        for _ in range(300):
            for action in (lambda: storage.put("d/x", b"evil"), lambda: storage.read("d/keep")):
                try:
                    action()
                    done += 1
                except StorageError:
                    refused += 1
            storage.delete("d/precious")
    finally:
        stop.set()
        thread.join()
    assert min(done, refused) > 10


def test_deep_directories_are_removed(tmp_path, way):
    """Deeper than Python's stack: an attacker's nesting is no way to stop a removal."""
    own, limit = len(inspect.stack(0)), sys.getrecursionlimit()
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_RDONLY)
    for _ in range(300 if way == "kernel" else 150):
        os.mkdir("d", dir_fd=fd)
        new = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = new
    os.close(fd)
    try:
        sys.setrecursionlimit(own + 120)  # a thousand levels show the same, and take seconds
        storage.delete_tree("")
    finally:
        sys.setrecursionlimit(limit)
    assert os.listdir(tmp_path / "root") == []


def test_a_directory_too_deep_for_a_path_is_an_error_of_the_storage(tmp_path, way):
    """What no path can name is refused, not met with a bare OSError."""
    storage = LocalStorage(tmp_path / "root")
    for call in (storage.read, storage.stat, storage.delete, lambda path: storage.put(path, b"")):
        with pytest.raises(StorageError, match=r"too long|shorter name"):
            call("/".join(["d" * 200] * 30))


def test_no_descriptor_is_left_open(tmp_path, outside, way):
    """Neither by work that succeeds nor by work that fails."""
    storage = LocalStorage(tmp_path / "root")
    storage.put("own", b"own")
    storage.put("run/a", b"1")
    (tmp_path / "root/run/link").symlink_to(outside)

    def work():
        for action in (READ | WRITE | REMOVE).values():
            for path in ("run/link/precious", "run/b", "gone/x", "own/x"):
                try:
                    found = action(storage, path)
                    getattr(found, "close", lambda: None)()
                except StorageError:
                    pass
            storage.put("own", b"own")
            storage.put("run/a", b"1")
        writer = storage.create("run/w", 3)
        writer.abort()

    work()
    before = len(os.listdir("/proc/self/fd"))
    work()
    assert len(os.listdir("/proc/self/fd")) == before


class TestWithoutOpenat2(StorageTests):
    """The conformance suite where the kernel has no `openat2`."""

    @pytest.fixture(autouse=True)
    def by_parts(self, monkeypatch):
        monkeypatch.setattr(beneath, "_way", lambda: beneath._by_parts)

    @pytest.fixture
    def storage(self, tmp_path):
        return FaultyStorage(tmp_path / "root")
