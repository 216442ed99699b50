"""One download of a checkpoint for all threads and processes of a machine, gone after the last of them."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_kit import build, small

from holdfast import Checkpoint
from holdfast.copying import downloads as node
from holdfast.storage import LocalStorage, MemoryStorage, WrappedStorage


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Keep downloads of the tests to themselves."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def downloads() -> list[Path]:
    return list(node._base().iterdir())


def test_one_download_is_shared_and_removed_after_the_last(tmp_path, monkeypatch) -> None:
    """Nested users and many threads see one copy, made once, gone when the last one leaves."""
    storage = MemoryStorage(f"node-{tmp_path.name}")
    build(storage, "c", user={"x.bin": b"123"})
    checkpoint = Checkpoint.at(storage, "c")
    copies = []
    real = node.copy_checkpoint
    monkeypatch.setattr(node, "copy_checkpoint", lambda *args, **more: copies.append(args) or real(*args, **more))
    seen, barrier = [], threading.Barrier(8)

    def use() -> None:
        barrier.wait()
        with checkpoint.as_directory() as path, checkpoint.as_directory() as again:
            assert path == again
            seen.append((Path(path) / "x.bin").read_bytes())
            barrier.wait()  # nobody leaves before all are in

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"123"] * 8
    assert len(copies) == 1
    assert downloads() == []


def test_a_checkpoint_that_changed_is_downloaded_anew(tmp_path) -> None:
    """While an old version is in use, a new user gets the new one."""
    storage = MemoryStorage(f"node-{tmp_path.name}")
    small(storage, "c", step=1)
    with Checkpoint.at(storage, "c").as_directory() as old:
        small(storage, "c", step=2, overwrite=True)
        with Checkpoint.at(storage, "c").as_directory() as new:
            assert (Checkpoint(old).step, Checkpoint(new).step) == (1, 2)
    assert downloads() == []


def test_without_etags_the_time_tells_versions_apart(tmp_path) -> None:
    """A model.pt that was replaced by one of the same size, at a storage whose listings have no etags."""

    class Plain(WrappedStorage):
        modified = 1.0

        def list(self, prefix="", *, recursive=True):
            found = super().list(prefix, recursive=recursive)
            return (replace(info, etag=None, modified=self.modified) for info in found)

    storage = Plain(MemoryStorage(f"node-{tmp_path.name}"))
    storage.put("c/model.pt", b"A" * 5000)
    with Checkpoint.at(storage, "c").as_directory() as old:
        storage.put("c/model.pt", b"B" * 5000)
        storage.modified = 2.0
        with Checkpoint.at(storage, "c").as_directory() as new:
            assert [(Path(place) / "model.pt").read_bytes()[:1] for place in (old, new)] == [b"A", b"B"]


def test_a_directory_is_filled_again_after_the_clock_was_set_back(tmp_path, monkeypatch) -> None:
    """Whether another process has just brought the files is no matter of the time of day."""
    storage = MemoryStorage(f"node-{tmp_path.name}")
    small(storage, "c", step=1)
    target = tmp_path / "mine"
    Checkpoint.at(storage, "c").to_directory(target)
    for place in downloads():
        os.utime(place / "brought", (4e9, 4e9))
    shutil.rmtree(target)
    Checkpoint.at(storage, "c").to_directory(target)
    assert Checkpoint(target).step == 1


def test_a_failed_download_leaves_nothing(tmp_path, monkeypatch) -> None:
    """After an error in the middle the next user starts over."""
    storage = MemoryStorage(f"node-{tmp_path.name}")
    small(storage, "c", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(node, "copy_checkpoint", lambda *_, **__: (_ for _ in ()).throw(OSError("lost")))
        with pytest.raises(OSError, match="lost"), Checkpoint.at(storage, "c").as_directory():
            pass
    assert downloads() == []
    with Checkpoint.at(storage, "c").as_directory() as path:
        assert Checkpoint(path).step == 1


USER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from holdfast.copying import downloads as node
from holdfast.storage import LocalStorage
with node.shared_download(LocalStorage(sys.argv[2]), "c") as path:
    print(path, flush=True)
    sys.stdin.readline()
"""


def test_processes_share_and_a_killed_user_is_swept(tmp_path) -> None:
    """Two processes use one copy; one killed with -9 neither removes it nor keeps it for ever."""
    small(LocalStorage(tmp_path / "remote"), "c", step=1)
    environment = {**os.environ, "PYTHONPATH": str(Path(node.__file__).parents[2])}
    command = [sys.executable, "-c", USER, str(tmp_path), str(tmp_path / "remote")]
    users = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        paths = set()
        for user in users:
            assert select.select([user.stdout], [], [], 30)[0]
            paths.add(user.stdout.readline().strip())
        assert len(paths) == 1
        users[0].communicate("\n", timeout=30)
        assert Checkpoint(paths.pop()).step == 1
        users[1].kill()
        users[1].communicate(timeout=30)
        assert len(downloads()) == 1
        other = MemoryStorage(f"node-{tmp_path.name}")
        small(other, "d")
        with Checkpoint.at(other, "d").as_directory():
            assert len(downloads()) == 1
        assert downloads() == []
    finally:
        for user in users:
            user.kill()
            user.wait()
