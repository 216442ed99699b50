"""What a local directory adds to the contract: durability, permissions, links, direct writes, cooperation."""

import errno
import mmap
import os
import pickle
import shutil
import stat

import pytest

import holdfast as hf
from holdfast.errors import (
    ConfigError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)
from holdfast.storage import LocalStorage
from holdfast.storage.local.beneath import Ops
from holdfast.testing import FaultyOps, FaultyStorage, count_operations

BLOCK = 4096


class WatchedOps(Ops):
    """Notes which writes were direct; with ``refuse`` a direct write fails as on file systems of other alignment."""

    def __init__(self, *, refuse=False):
        self.refuse, self.on, self.writes = refuse, False, []

    def set_direct(self, fd, *, on):
        super().set_direct(fd, on=on)
        self.on = on

    def pwrite(self, fd, view, offset):
        if self.on and self.refuse:
            raise OSError(errno.EINVAL, "refused")
        self.writes.append((self.on, len(view)))
        return super().pwrite(fd, view, offset)


def everything_below(path):
    return sorted(os.path.join(at, name) for at, dirs, files in os.walk(path) for name in [*dirs, *files])


# -- places and names ------------------------------------------------------------------------------------------------


def test_relative_root_survives_chdir(tmp_path, monkeypatch):
    """A relative root means the directory it meant when the storage was made."""
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs/gpt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.put("a", b"1")
    assert (tmp_path / "runs/gpt/a").read_bytes() == b"1"
    assert storage.uri == str(tmp_path / "runs/gpt")
    assert storage.local_root == tmp_path / "runs/gpt"


@pytest.mark.parametrize(("umask", "file_mode", "dir_mode"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_umask(tmp_path, umask, file_mode, dir_mode):
    """Files and directories get the permissions that the umask leaves, whichever way they are written."""
    old = os.umask(umask)
    try:
        storage = LocalStorage(tmp_path / "root")
        storage.put("d/put", b"1")
        storage.put("d/new", b"1", if_absent=True)
        storage.create("d/created", 0).close()
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((tmp_path / "root/d" / name).stat().st_mode) for name in ("put", "new", "created")}
    assert modes == dict.fromkeys(modes, file_mode)
    assert stat.S_IMODE((tmp_path / "root/d").stat().st_mode) == dir_mode


def test_nothing_is_made_before_the_first_write(tmp_path):
    """Making a storage, looking into it and asking for its free space leave no trace."""
    storage = LocalStorage(tmp_path / "a/b").child("c")
    assert list(storage.list()) == []
    assert not storage.exists("x")
    assert storage.free_bytes() > 0
    assert os.listdir(tmp_path) == []


def test_root_without_a_name():
    """An empty root is refused instead of meaning the working directory."""
    with pytest.raises(ConfigError):
        LocalStorage("")


def test_file_in_the_way(tmp_path):
    """A root below a file is an error that says so."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file, not a directory"):
        LocalStorage(tmp_path / "file/root").put("a/b", b"1")


def test_links_are_not_followed(tmp_path):
    """A link to a directory is neither listed nor emptied; a link to a file is an object, and is removed alone."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    storage = LocalStorage(tmp_path / "root")
    storage.put("run/a", b"1")
    (tmp_path / "root/run/latest").symlink_to(outside)
    (tmp_path / "root/run/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/run/file").symlink_to(outside / "precious")
    (tmp_path / "root/run/dangling").symlink_to("nowhere")
    assert {info.path for info in storage.list()} == {"run/a", "run/file"}
    storage.delete_tree("run")
    assert (outside / "precious").read_bytes() == b"1"
    assert os.listdir(tmp_path / "root") == []


def test_fifo_does_not_hang(tmp_path):
    """A FIFO is no object: opening it fails at once."""
    os.mkfifo(tmp_path / "fifo")
    storage = LocalStorage(tmp_path)
    with pytest.raises(StorageNotFoundError):
        storage.open("fifo")
    assert list(storage.list()) == []


# -- direct writes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    with mmap.mmap(-1, 64 * BLOCK) as memory:
        memory[:] = os.urandom(len(memory))
        yield memory


def write(storage, memory, size, *, start=0, step=16 * BLOCK):
    end = -(-size // BLOCK) * BLOCK
    with memoryview(memory) as view, storage.create("c/data", size) as writer:
        for offset in range(0, end, step):
            writer.write(view[start + offset : start + min(end, offset + step)])


def test_aligned_views_are_written_directly(tmp_path, memory):
    """Aligned memory goes past the page cache, padding included, and the file has its true size."""
    ops = WatchedOps()
    storage = LocalStorage(tmp_path, ops=ops)
    write(storage, memory, 60 * BLOCK - 5)
    assert storage.read("c/data") == memory[: 60 * BLOCK - 5]
    assert ops.writes == [(True, 16 * BLOCK)] * 3 + [(True, 12 * BLOCK)]


def test_read_only_aligned_views_are_written_directly(tmp_path, memory):
    """A read-only mapping is as good as a writable one."""
    ops = WatchedOps()
    with memoryview(memory) as view, view.toreadonly() as frozen:
        writer = LocalStorage(tmp_path, ops=ops).create("a", BLOCK)
        writer.write(frozen[:BLOCK])
        writer.close()
    assert ops.writes == [(True, BLOCK)]


def test_unaligned_views_go_through_the_page_cache(tmp_path, memory):
    """Memory at any other address is written too, without its padding."""
    ops = WatchedOps()
    storage = LocalStorage(tmp_path, ops=ops)
    write(storage, memory, 20 * BLOCK - 5, start=8)
    assert storage.read("c/data") == memory[8 : 8 + 20 * BLOCK - 5]
    assert ops.writes == [(False, 16 * BLOCK), (False, 4 * BLOCK - 5)]


def test_refused_direct_write(tmp_path, memory):
    """A file system that accepts the flag and refuses the write gets ordinary writes from then on."""
    ops = WatchedOps(refuse=True)
    storage = LocalStorage(tmp_path, ops=ops)
    write(storage, memory, 40 * BLOCK - 5)
    assert storage.read("c/data") == memory[: 40 * BLOCK - 5]
    assert [direct for direct, _ in ops.writes] == [False] * 3


def test_file_system_without_direct_writes(tmp_path, memory):
    """Where O_DIRECT does not exist the same bytes arrive through the page cache."""
    storage = FaultyStorage(tmp_path, direct=False)
    write(storage, memory, 40 * BLOCK - 5)
    assert storage.read("c/data") == memory[: 40 * BLOCK - 5]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at a known place")
def test_tmpfs(memory):
    """A file system in memory holds checkpoints, whether it knows O_DIRECT or not."""
    storage = LocalStorage(f"/dev/shm/holdfast-test-{os.getpid()}")
    try:
        write(storage, memory, 40 * BLOCK - 5)
        assert storage.read("c/data") == memory[: 40 * BLOCK - 5]
    finally:
        storage.delete_tree("")
        os.rmdir(storage.uri)


@pytest.mark.parametrize("limit", [1, 4095, 4096, 10_000])
def test_short_writes(tmp_path, memory, limit):
    """A kernel that takes few bytes at a time, aligned or not, loses none."""
    storage = FaultyStorage(tmp_path, short_write=limit)
    write(storage, memory, 3 * BLOCK + 1)
    assert storage.read("c/data") == memory[: 3 * BLOCK + 1]


# -- failures --------------------------------------------------------------------------------------------------------


def replace(storage):
    storage.put("d/a", b"new" * 2000)


def create(storage):
    with storage.create("d/data", 5000) as writer:
        writer.write(memoryview(b"n" * 5000))


@pytest.mark.parametrize("number", range(7))
def test_full_disk_at_each_operation_of_a_put(tmp_path, number):
    """Whatever runs out of space, the object is the old or the new one, whole; only the last fsync comes too late."""
    LocalStorage(tmp_path).put("d/a", b"old")
    storage = FaultyStorage(tmp_path, fail_at={number: errno.ENOSPC})
    assert count_operations(lambda ops: replace(LocalStorage(tmp_path / "other", ops=ops))) >= 7
    with pytest.raises(StorageFullError, match=r"d/a.*free some space"):
        replace(storage)
    assert storage.read("d/a") == (b"new" * 2000 if number == 6 else b"old")
    assert os.listdir(tmp_path / "d") == ["a"]
    replace(storage)
    assert storage.read("d/a") == b"new" * 2000


def test_full_disk_at_each_operation_of_a_create(tmp_path):
    """A big file that could not be finished leaves no trace of itself, and can be written again."""
    num_operations = count_operations(lambda ops: create(LocalStorage(tmp_path, ops=ops)))
    assert num_operations >= 8
    LocalStorage(tmp_path).delete_tree("")
    for number in range(num_operations):
        root = tmp_path / str(number)
        root.mkdir()
        storage = FaultyStorage(root, fail_at={number: errno.ENOSPC})
        with pytest.raises(StorageFullError):
            create(storage)
        assert [path for path in everything_below(root) if "data" in path] == [], number
        create(storage)
        assert storage.read("d/data") == b"n" * 5000


def test_disk_fills_up(tmp_path):
    """A real lack of space cuts a write short, then fails it: the object before it stays."""
    storage = FaultyStorage(tmp_path, disk_bytes=3 * BLOCK)
    storage.put("a", b"o" * BLOCK)
    for attempt in (lambda: storage.put("a", b"n" * 4 * BLOCK), lambda: create_big(storage)):
        with pytest.raises(StorageFullError):
            attempt()
        assert storage.read("a") == b"o" * BLOCK
        assert everything_below(tmp_path) == [str(tmp_path / "a")]
        assert storage.free_bytes() == 2 * BLOCK


def create_big(storage):
    with storage.create("big", 4 * BLOCK) as writer:
        writer.write(memoryview(bytes(4 * BLOCK)))


def test_failed_fsync_is_not_repeated(tmp_path):
    """EIO of fsync is an error at once: a second fsync would report success for bytes that are lost."""
    for work in (replace, create):
        ops = FaultyOps(fail_on={"fsync": errno.EIO}, record=True)
        with pytest.raises(StorageError, match="device reported an error") as caught:
            work(FaultyStorage(tmp_path, ops=ops))
        assert caught.value.errno == errno.EIO
        assert everything_below(tmp_path) in ([], [str(tmp_path / "d")])
        assert not any(operation.name in ("rename", "link") for operation in ops.log)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("operation", ["mkdir", "open", "rename"])
def test_no_permission(tmp_path, operation, code):
    """Refused access is StoragePermissionError (and PermissionError) with path and advice, never "not found"."""
    storage = FaultyStorage(tmp_path / "root", fail_on={operation: code})
    with pytest.raises(StoragePermissionError, match=r"root/a.*use another place") as caught:
        storage.put("a", b"1")
    assert isinstance(caught.value, PermissionError)


def test_a_disk_without_inodes(tmp_path, monkeypatch):
    """A disk that shows free space and takes no file more: the message says what is used up, and how to see it."""
    storage = FaultyStorage(tmp_path, fail_on={"open": errno.ENOSPC})
    with pytest.raises(StorageFullError, match="free some space"):
        storage.put("a", b"1")
    statvfs = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*statvfs(path)[:7], 0, *statvfs(path)[8:]]))
    for path in ("a", "directory/not/made/b"):
        with pytest.raises(StorageFullError, match=r"has space, but no inodes for more files \(`df -i`\)"):
            storage.put(path, b"1")
    unmade = FaultyStorage(tmp_path, fail_on={"mkdir": errno.ENOSPC})
    with pytest.raises(StorageFullError, match=r"has space, but no inodes for more files"):
        unmade.put("step/model", b"1")


def test_parent_that_cannot_be_read(tmp_path):
    """A root whose parent may be passed but not read is usable: its own name is not ours to sync."""
    (tmp_path / "root").mkdir()

    class Closed(Ops):
        def fsync_dir(self, path):
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, "closed", path)
            super().fsync_dir(path)

    storage = LocalStorage(tmp_path / "root", ops=Closed())
    storage.put("a", b"1")
    assert storage.read("a") == b"1"


def test_a_root_that_is_durable_is_not_looked_at_again(tmp_path):
    """Directories below it cost no fsync above it; one that was taken away is made anew, durably."""
    above = []

    class Noting(Ops):
        def fsync_dir(self, path):
            above.extend([path] * (path == str(tmp_path)))
            super().fsync_dir(path)

    storage = LocalStorage(tmp_path / "root", ops=Noting())
    storage.put("a", b"1")
    num_first = len(above)
    storage.put("s1/a", b"1")
    storage.put("s2/deep/a", b"1")
    assert len(above) == num_first > 0
    shutil.rmtree(tmp_path / "root")
    storage.put("s3/deep/a", b"1")
    assert storage.read("s3/deep/a") == b"1"
    assert len(above) > num_first


def test_errors_pickle(tmp_path):
    """A storage error crosses process boundaries with its message."""
    with pytest.raises(StorageFullError) as caught:
        FaultyStorage(tmp_path, fail_on={"pwrite": errno.EDQUOT}).put("a", b"1")
    assert "quota" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_two_slashes_at_the_head_are_one(tmp_path):
    """//home/x is /home/x on Linux: a run has one name, however its place is written."""
    assert LocalStorage(f"/{tmp_path}").uri == LocalStorage(tmp_path).uri
    assert hf.Checkpoint(f"/{tmp_path}/a") == hf.Checkpoint(tmp_path / "a") == hf.Checkpoint(f"file:///{tmp_path}/a")
