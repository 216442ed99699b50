"""Two writers on machines that share no disk: what they stage is committed at the remote, by this life or the next."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Mirror
from holdfast.format.commit import read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.testing import FaultyStorage
from holdfast.writer import mirror
from holdfast.writer.arena import Arena
from holdfast.writer.board import BOARD_BYTES, Board
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import BlobPlan, SaveJob

LIMIT_S = 20.0


class Life:
    """Two ranks; the writers are threads of this process."""

    def __init__(self, home: Path, start_id: str, second: Any = None) -> None:
        self.start_id, self.remote = start_id, LocalStorage(home / "remote")
        self.disks = [LocalStorage(home / f"node{rank}") for rank in (0, 1)]
        self.clients = [WriterClient.start(disk, thread=True) for disk in self.disks]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._boards = [Arena.create(BOARD_BYTES) for _ in self.clients]
        for rank, client in enumerate(self.clients):
            Board(self._boards[rank].view).clear(step=0)
            client.join(
                self._boards[rank], rank=rank, world_size=2, addresses=[self._listener.getsockname()[:2]], token="t",
                timeout_s=LIMIT_S, listener=None if rank else self._listener.fileno(), beat_s=0.1, stale_s=10.0,
            )  # fmt: skip
        self.opened = self.clients[0].open_run(self.remote, owner={"start_id": start_id}).result(LIMIT_S)
        for client, disk, far in zip(self.clients, self.disks, (self.remote, second or self.remote), strict=True):
            client.stage(disk, far, Mirror(disk.uri), start_id=start_id)

    def save(self, step: int) -> None:
        """One save of both ranks, until it is staged."""
        futures = []
        for rank, client in enumerate(self.clients):
            save_id = f"{self.start_id}-{step:x}"
            manifest = {"run_id": self.opened.run_id, "checkpoint_id": save_id, "step": step}
            job = SaveJob(
                directory=f"step_{step:08d}", save_id=save_id, writer=rank, part=True, joint=True, run=rank == 0,
                blobs=(BlobPlan(path=f"rank-{rank:05d}-{save_id}.json", role="rank"),),
                manifest={**manifest, "attempt": self.opened.attempt},
            )  # fmt: skip
            futures.append(client.submit(self.disks[rank], job, [b"{}"]))
        for future in futures:
            future.result(LIMIT_S)

    def close(self) -> None:
        ends = [threading.Thread(target=client.close, args=(LIMIT_S,)) for client in self.clients]
        for one in ends:
            one.start()
        for one in ends:
            one.join()
        self._listener.close()


@contextlib.contextmanager
def life(home: Path, start_id: str, second: Any = None) -> Iterator[Life]:
    one = Life(home, start_id, second)
    try:
        yield one
    finally:
        one.close()


def files(home: Path) -> list[str]:
    return sorted(path.name for node in home.glob("node*") for path in node.rglob("*") if path.is_file())


def test_what_both_have_staged_is_committed_at_the_remote(tmp_path: Path) -> None:
    """And nothing of it stays on their disks."""
    with life(tmp_path, "aaaaaaa1") as one:
        one.save(1)
        one.save(2)
    for step in (1, 2):
        manifest = read_manifest(LocalStorage(tmp_path / "remote"), f"step_{step:08d}", check_sizes=True)
        assert manifest.writers == (0, 1)
    assert files(tmp_path) == []


def test_what_did_not_get_there_is_brought_by_the_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 could not reach the remote: nothing is committed, everything stays where it is until somebody asks."""
    monkeypatch.setattr(mirror, "END_S", 0.2)
    with life(tmp_path, "aaaaaaa1", FaultyStorage(tmp_path / "remote", fail_on={"pwrite": errno.EIO})) as one:
        one.save(1)
    assert not (tmp_path / "remote" / "step_00000001" / "manifest.json").exists()
    assert [name.split("-")[0] for name in files(tmp_path)] == ["part", "part", "rank", "rank", "staged"]
    with life(tmp_path, "aaaaaaa2") as two:
        two.clients[0].run_op("bring", name="step_00000001", save="aaaaaaa1-1").result(LIMIT_S)
        assert [row[0] for row in two.clients[0].run_op("records").result(LIMIT_S)] == ["step_00000001"]
    assert files(tmp_path) == []
