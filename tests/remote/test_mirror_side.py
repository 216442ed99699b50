"""The remote side of a mirrored run, one step at a time."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit
from catalog_kit import catalog_of, index_of

from holdfast.errors import CheckpointExistsError, RunBusyError
from holdfast.format.commit import read_manifest, remove
from holdfast.run.fence import Fence
from holdfast.run.lease import make_owner
from holdfast.run.record import METRICS_FILE, read_sidecar
from holdfast.storage import LocalStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import MirrorLimits
from holdfast.writer.uploads.mirror import Mirroring, RemoteRun


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    """A run with one checkpoint."""
    storage = LocalStorage(tmp_path / "local")
    contents = [kit.noise(1, 5000)]
    with WriterClient.start(storage) as client:
        opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(60)
        fields = {"run_id": opened.run_id, "attempt": opened.attempt}
        with kit.fill(contents) as arena:
            job = kit.make_job(contents, step=1, start_id=opened.start_id, run=True, manifest=fields)
            client.submit(storage, job, [b"{}"], arena).result(60)
    return storage


@pytest.fixture
def remote(tmp_path: Path, local: LocalStorage) -> Iterator[RemoteRun]:
    owner = make_owner("bbbbbbbb")
    side = RemoteRun.open(
        LocalStorage(tmp_path / "remote"), local, owner=owner, keep=None, wait_s=0.0, pause=time.sleep
    )
    side.register(())
    yield side
    side.heartbeat.close()


def take(remote: RemoteRun, name: str) -> None:
    remote.take(name, stop=lambda: False)


def test_the_index_knows_what_arrived_without_rules(local: LocalStorage, remote: RemoteRun) -> None:
    """Without rules of retention run.json of the remote has the checkpoint as soon as it is there."""
    (name,) = catalog_of(local).index.rows
    take(remote, name)
    assert list(index_of(remote.catalog.storage).rows) == [name]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_late_commit_of_a_sleeper_is_replaced(
    when: str, local: LocalStorage, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was taken over may commit under a name that we bring: before we do, or in the middle of it."""
    (name,) = catalog_of(local).index.rows
    ours, storage = read_manifest(local, name), remote.catalog.storage
    remote.catalog.fence = Fence(below=ours.attempt)
    theirs = replace(ours, attempt=ours.attempt - 1, checkpoint_id="theirs").to_bytes()
    put, waiting = LocalStorage.put, [name]

    def sleeper_wakes_up() -> None:
        put(storage, f"{waiting.pop()}/manifest.json", theirs, if_absent=True)

    def put_late(self: LocalStorage, path: str, *args: Any, **options: Any) -> Any:
        if waiting and self.uri == storage.uri and path.endswith("manifest.json"):
            sleeper_wakes_up()
        return put(self, path, *args, **options)

    if when == "before":
        sleeper_wakes_up()
    monkeypatch.setattr(LocalStorage, "put", put_late)
    take(remote, name)
    assert not waiting
    assert read_manifest(storage, name, check_sizes=True).checkpoint_id == ours.checkpoint_id
    assert list(remote.catalog.index.rows) == [name]


def test_a_quarantined_one_is_not_taken_for_complete(local: LocalStorage, remote: RemoteRun) -> None:
    """Its sizes tell nothing of the damage: it stays quarantined, and the local one counts as not uploaded."""
    (name,) = catalog_of(local).index.rows
    take(remote, name)
    remote.catalog.index.quarantine(name, "rotten")
    with pytest.raises(CheckpointExistsError, match="quarantined"):
        take(remote, name)
    assert remote.catalog.index.quarantined == {name: "rotten"}


def test_late_metrics_of_one_removed_by_hand_hold_nothing_up(
    local: LocalStorage, remote: RemoteRun, caplog: pytest.LogCaptureFixture
) -> None:
    """They are dropped with a word in the log."""
    (name,) = catalog_of(local).index.rows
    take(remote, name)
    remove(remote.catalog.storage, name)
    remote.late(name, {"val": 1.0}, None)
    assert f"late metrics or a pin of {name} could not be stored" in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_a_pin_at_the_remote_of_an_earlier_life_stays(damaged: bool, local: LocalStorage, remote: RemoteRun) -> None:
    """Somebody pinned it at the store alone, or its sidecar there is damaged: no later look at the disk undoes that."""
    (name,) = catalog_of(local).index.rows
    take(remote, name)
    store = remote.catalog.storage
    remote.catalog.pin(name)
    if damaged:
        store.put(f"{name}/{METRICS_FILE}", b"{")
    before = read_sidecar(store, name)
    next_life = RemoteRun(remote.heartbeat, store, local, None)
    next_life.both.add(name)
    for value in (1.0, 2.0):  # the first look, and one after something came late on the disk
        next_life.bring_sidecars()
        catalog_of(local).set_metrics(name, {"val": value})
        next_life.bring_sidecars()
        found = read_sidecar(store, name)
        assert (found.pinned, found.damage, found.metrics["val"]) == (True, before.damage, value)


def test_a_lost_lease_wakes_the_uploading_thread(local: LocalStorage, remote: RemoteRun) -> None:
    """Who follows the mirror hears at once that another trainer took the remote, not some seconds later."""
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    mirror = Mirroring(remote, MirrorLimits(), waiting=(), uploaded=(), changed=lambda: None)
    mirror.queue.go()
    try:
        mirror.queue.follow(None, heard.put)
        since = heard.get(timeout=30)["version"]
        mirror.queue.follow(since, heard.put)
        with pytest.raises(RunBusyError):
            for _ in range(100):  # the mirror's own thread may be between reading the lease and renewing it
                other = {**make_owner("cccccccc"), "pid": 1, "beat": 1}
                remote.catalog.storage.put("lease.json", json.dumps(other).encode())
                remote.heartbeat.confirm()
        state = heard.get(timeout=30)
        while state["lost"] is None:
            mirror.queue.follow(state["version"], heard.put)
            state = heard.get(timeout=30)
        assert "lost to process" in state["lost"]
    finally:
        mirror.close()
