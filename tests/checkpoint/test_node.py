"""Downloads shared by the processes of a machine: what forks and threads do to their locks."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import threading
import time

import pytest
from checkpoint_kit import small

from holdfast.checkpoint.handle import Checkpoint
from holdfast.copying import downloads as node
from holdfast.copying import transfer
from holdfast.errors import StorageError
from holdfast.storage.memory import MemoryStorage


def test_a_child_forked_during_a_download_does_not_keep_its_lock(tmp_path, monkeypatch) -> None:
    """Another thread starts loader workers while one downloads: the next user, and our own end, need not wait for them.

    The child has a copy of the descriptor of the lock.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = MemoryStorage(f"node-fork-{tmp_path.name}")
    small(storage, "c", step=1)
    children = []
    real = node.copy_checkpoint

    def meanwhile(*arguments, **options) -> None:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        children.append(child)
        real(*arguments, **options)

    monkeypatch.setattr(node, "copy_checkpoint", meanwhile)
    seen = []

    def use() -> None:
        with Checkpoint.at(storage, "c").as_directory() as path:
            seen.append(Checkpoint(path).step)

    user = threading.Thread(target=use, daemon=True)
    try:
        user.start()
        user.join(20)
        assert not user.is_alive(), "leaving waits for the lock that the child holds"
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    user.join(20)
    assert seen == [1]
    assert len(children) == 1


def _fetch_at_once(storage: MemoryStorage, monkeypatch, targets) -> tuple[list[str], int]:
    """Let one thread for each target fetch at the same time; where the files are, and the downloads it took."""
    downloads = []
    real = node.copy_checkpoint
    all_here = threading.Barrier(len(targets))

    def counted(source, *arguments, **options):
        if source is storage:
            downloads.append(1)
            time.sleep(0.2)  # the others come meanwhile
        return real(source, *arguments, **options)

    monkeypatch.setattr(node, "copy_checkpoint", counted)
    monkeypatch.setattr(transfer, "copy_checkpoint", counted)
    places = []

    def fetch(target) -> None:
        all_here.wait()
        places.append(Checkpoint.at(storage, "c").to_directory(target))

    threads = [threading.Thread(target=fetch, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return places, len(downloads)


def test_directories_of_their_own_share_a_download(tmp_path, monkeypatch) -> None:
    """Everybody gets files that nobody else has; a single one moves them, and nothing stays behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = MemoryStorage(f"node-own-{tmp_path.name}")
    small(storage, "c", step=1)
    places, downloads = _fetch_at_once(storage, monkeypatch, [None] * 3)
    assert (len({*places}), downloads) == (3, 1)
    inodes = {os.stat(os.path.join(place, "manifest.json")).st_ino for place in places}
    assert len(inodes) == 3
    assert all(Checkpoint(place).verify().ok for place in places)
    assert Checkpoint(Checkpoint.at(storage, "c").to_directory()).step == 1
    assert list(node._base().iterdir()) == []


def test_one_directory_is_filled_once(tmp_path, monkeypatch) -> None:
    """The others wait and find it, foreign files as well; later it is filled anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = MemoryStorage(f"node-one-{tmp_path.name}")
    storage.put("c/weights.pt", b"1234")
    target = tmp_path / "mine"
    places, downloads = _fetch_at_once(storage, monkeypatch, [target] * 3)
    assert (places, downloads) == ([str(target)] * 3, 1)
    (target / "weights.pt").unlink()
    Checkpoint.at(storage, "c").to_directory(target)
    assert (target / "weights.pt").read_bytes() == b"1234"


def test_without_locks_each_downloads_for_itself(tmp_path, monkeypatch) -> None:
    """A temporary directory on a share without flock: nothing is shared, and what needs turns says what to do."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = MemoryStorage(f"node-locks-{tmp_path.name}")
    small(storage, "c", step=1)
    checkpoint = Checkpoint.at(storage, "c")
    with checkpoint.as_directory() as one, checkpoint.as_directory() as other:
        assert one != other
        assert Checkpoint(one).step == Checkpoint(other).step == 1
    assert not os.path.exists(one)
    assert Checkpoint(checkpoint.to_directory()).step == 1
    with pytest.raises(StorageError, match="set TMPDIR"):
        checkpoint.to_directory(tmp_path / "target")
