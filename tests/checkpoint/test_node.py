"""Downloads shared by the processes of a machine: what forks and threads do to their locks."""

from __future__ import annotations

import os
import signal
import tempfile
import threading

from build import small

from holdfast.checkpoint import node
from holdfast.checkpoint.handle import Checkpoint
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
