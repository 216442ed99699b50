"""A run through the writer: lease, attempts, index, retention, reports."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit
from catalog_kit import index_of
from process_kit import wait_until

from holdfast.config import Keep
from holdfast.errors import CheckpointNotFoundError, ConfigError, HoldfastError, RunBusyError, StorageFullError
from holdfast.run import catalog as catalog_module
from holdfast.run import lease as lease_module
from holdfast.run.catalog import Catalog
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened, SaveResult
from holdfast.writer.open_run import Run


@pytest.fixture
def client(tmp_path: Path) -> Iterator[WriterClient]:
    with WriterClient.start(LocalStorage(tmp_path)) as client:
        yield client


def open_run(
    client: WriterClient, storage: LocalStorage, start_id: str = "aaaaaaaa", keep: Keep | None = None
) -> RunOpened:
    rules = None if keep is None else keep.to_json()
    return client.open_run(storage, owner={"start_id": start_id}, keep=rules).result(60)


def save(
    client: WriterClient, storage: LocalStorage, opened: RunOpened, step: int, nbytes: int = 5000, **metrics: float
) -> SaveResult:
    contents = [kit.noise(step, nbytes)]
    fields = {"run_id": opened.run_id, "attempt": opened.attempt, "metrics": metrics}
    with kit.fill(contents) as arena:
        job = kit.make_job(contents, step=step, start_id=opened.start_id, run=True, manifest=fields)
        return client.submit(storage, job, [b"{}"], arena).result(60)


def names(storage: LocalStorage) -> list[str]:
    return sorted(info.path.split("/")[0] for info in storage.list() if info.path.endswith("manifest.json"))


def test_retention_follows_each_commit(tmp_path: Path, client: WriterClient) -> None:
    """Keep rules are applied after every commit; the result names what went and why; the index agrees."""
    storage = LocalStorage(tmp_path)
    opened = open_run(client, storage, keep=Keep(last=2, best=1, metric="loss"))
    assert opened.attempt == 1
    deleted: list[str] = []
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)):
        result = save(client, storage, opened, step, loss=loss)
        deleted += [name for name, _ in result.deleted]
    assert deleted == ["step_00000002"]
    assert names(storage) == ["step_00000001", "step_00000003", "step_00000004"]
    assert not (tmp_path / "step_00000002").exists()
    assert sorted(index_of(storage).rows) == names(storage)


def test_many_deletions_do_not_hold_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that has become narrow: a save takes one bite, the others are taken between the saves and at the end."""
    monkeypatch.setattr(catalog_module, "_BITE", 2)
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage, thread=True) as client:
        opened = open_run(client, storage)
        for step in range(1, 10):
            save(client, storage, opened, step)
    with WriterClient.start(storage, thread=True) as client:
        opened = open_run(client, storage, "bbbbbbbb", Keep(last=1))
        result = save(client, storage, opened, 10)
        assert [name for name, _ in result.deleted] == ["step_00000002", "step_00000001"]
        assert wait_until(lambda: names(storage) == ["step_00000010"])
        told = save(client, storage, opened, 11).deleted
        assert len(told) == 8, "what went in between is told with the next one"
    with WriterClient.start(storage, thread=True) as client:
        opened = open_run(client, storage, "cccccccc")
        for step in range(12, 16):
            save(client, storage, opened, step)
    with WriterClient.start(storage, thread=True) as client:
        opened = open_run(client, storage, "dddddddd", Keep(last=1))
        save(client, storage, opened, 16)
    assert names(storage) == ["step_00000016"]


def test_pins_and_late_metrics_steer_retention(tmp_path: Path, client: WriterClient) -> None:
    """A pinned checkpoint and one whose late metric is best stay; both facts are on disk beside the manifest."""
    storage = LocalStorage(tmp_path)
    opened = open_run(client, storage, keep=Keep(last=1, best=1, metric="val"))
    save(client, storage, opened, 1)
    client.run_op("pin", name="step_00000001", on=True).result(20)
    save(client, storage, opened, 2)
    client.run_op("metrics", name="step_00000002", metrics={"val": 0.1}).result(20)
    save(client, storage, opened, 3)
    assert names(storage) == ["step_00000001", "step_00000002", "step_00000003"]
    sidecar = json.loads(storage.read("step_00000002/.metrics.json"))
    assert sidecar["metrics"] == {"val": 0.1}
    with pytest.raises(CheckpointNotFoundError):
        client.run_op("metrics", name="step_00000009", metrics={"val": 0.1}).result(20)
    assert not (tmp_path / "step_00000009").exists()


def test_a_new_start_is_a_new_attempt(tmp_path: Path) -> None:
    """The second start sees the checkpoints of the first, newest first, with quarantine and end noted."""
    storage = LocalStorage(tmp_path)
    with WriterClient.start(storage) as client:
        opened = open_run(client, storage)
        save(client, storage, opened, 1)
        save(client, storage, opened, 2)
        client.run_op("quarantine", name="step_00000002", reason="NaN").result(20)
        client.run_op("finished", info={"step": 2}).result(20)
    with WriterClient.start(storage) as client:
        again = open_run(client, storage, "bbbbbbbb")
        assert (again.run_id, again.attempt, again.start_id) == (opened.run_id, 2, "bbbbbbbb")
        assert [row[0] for row in again.records] == ["step_00000001"]
        assert again.quarantined == {"step_00000002": "NaN"}
        assert again.finished is not None
        assert again.finished["step"] == 2
        client.run_op("resumed", name="step_00000001", step=1).result(20)
    attempts = index_of(storage).attempts
    assert attempts[0].reason == "closed"
    assert attempts[1].resumed_from is not None


def test_a_live_run_is_busy(tmp_path: Path, client: WriterClient) -> None:
    """A second writer is refused at once, by name, while the first lives; after its end the run is free."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    with WriterClient.start(storage) as other:
        with pytest.raises(RunBusyError, match=str(client.process_id)):
            open_run(other, storage, "bbbbbbbb")
        client.run_op("close_run", reason="done").result(20)
        assert open_run(other, storage, "bbbbbbbb").attempt == 2


def test_reports_are_durable_within_a_second(tmp_path: Path, client: WriterClient) -> None:
    """A thousand rows cost a few writes; each answer comes when its row can be read from the disk."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    begun = time.monotonic()
    futures = [client.run_op("report", rows=[{"step": step, "metrics": {"loss": 0.5}}]) for step in range(1000)]
    for future in futures:
        future.result(20)
    assert time.monotonic() - begun < 60
    assert len(index_of(storage).history()) == 1000
    assert len(list(storage.list("reports"))) < 10


def test_reports_do_not_wait_for_a_save(tmp_path: Path, client: WriterClient) -> None:
    """Rows are written while a windowed save is still open."""
    storage = LocalStorage(tmp_path)
    opened = open_run(client, storage)
    contents = [kit.noise(1, kit.MIB)]
    with kit.fill(contents) as arena:
        fields: dict[str, Any] = {"run_id": opened.run_id}
        job = kit.make_job(contents, run=True, windowed=True, manifest=fields)
        future = client.submit(storage, job, [b"{}"], arena)
        client.run_op("report", rows=[{"step": 1, "metrics": {}}]).result(20)
        assert not future.done()
        client.abandon(future)
        future.exception(20)


def test_a_full_disk_applies_retention_once_and_tries_again(tmp_path: Path) -> None:
    """With rules that free space a save on a full disk succeeds; one that cannot fit fails and the kept ones stay."""
    storage = FaultyStorage(tmp_path, disk_bytes=3 * kit.MIB + kit.MIB // 2)
    with WriterClient.start(storage) as client:
        opened = open_run(client, storage)
        for step in (1, 2, 3):
            save(client, storage, opened, step, nbytes=kit.MIB)
        client.run_op("close_run", reason="other rules").result(20)
        opened = open_run(client, storage, "bbbbbbbb", keep=Keep(last=1))
        result = save(client, storage, opened, 4, nbytes=2 * kit.MIB)
        assert names(storage) == ["step_00000004"]
        assert sorted(name for name, _ in result.deleted) == [f"step_{step:08d}" for step in (1, 2, 3)], "all are told"
        with pytest.raises(StorageFullError):
            save(client, storage, opened, 5, nbytes=2 * kit.MIB)
        assert names(storage) == ["step_00000004"]


def test_operations_need_an_open_run(client: WriterClient) -> None:
    """Without open_run, and for an unknown operation, the answer says so."""
    with pytest.raises(HoldfastError, match="open_run"):
        client.run_op("pin", name="x", on=True).result(20)


def test_unknown_operation(tmp_path: Path, client: WriterClient) -> None:
    """An unknown operation lists the known ones."""
    open_run(client, LocalStorage(tmp_path))
    with pytest.raises(ConfigError, match="quarantine"):
        client.run_op("fly").result(20)


def test_probe_remains_of_dead_lives_are_swept(tmp_path: Path, client: WriterClient) -> None:
    """A probe directory of an earlier start is removed, a foreign directory is not."""
    storage = LocalStorage(tmp_path)
    storage.put(".probe-00000001/state-00000001-0.json", b"{}")
    storage.put("mine/notes.txt", b"hello")
    opened = open_run(client, storage)
    assert ".probe-00000001" in opened.swept
    assert storage.exists("mine/notes.txt")
    assert not (tmp_path / ".probe-00000001").exists()


def test_the_lease_names_writer_and_trainer(tmp_path: Path, client: WriterClient) -> None:
    """The lease names the writer as owner and this process as its trainer."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    lease = json.loads(storage.read("lease.json"))
    assert lease["pid"] == client.process_id
    assert lease["trainer_pid"] == os.getpid()


class Beating(MemoryStorage):
    """Counts the heartbeats of the lease; ``fail`` is raised by the next one."""

    fail: Exception | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.beats = 0
        self.beaten = threading.Event()

    def put(self, path: str, data: Any, **options: Any) -> str | None:
        if path == "lease.json" and "if_match" in options:
            error, self.fail = self.fail, None
            if error is not None:
                raise error
            self.beats += 1
            self.beaten.set()
        return super().put(path, data, **options)


def test_the_lease_is_renewed_while_the_run_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeping what dead lives left may take longer than a lease lasts without a heartbeat."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.01)
    storage = Beating("beating-open")
    during: list[bool] = []
    monkeypatch.setattr(Catalog, "sweep", lambda _: during.append(storage.beaten.wait(20)) or [])
    run, _ = Run.open(storage, owner={"start_id": "aaaaaaaa"}, keep=None, wait_s=1)
    run.close("done")
    assert during == [True]
    assert json.loads(storage.read("lease.json"))["released"] is True


def test_a_run_that_cannot_be_opened_gives_the_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the lease was taken: no thread goes on renewing it."""

    def fail(_: Catalog) -> list[str]:
        raise ValueError("no sweep today")

    monkeypatch.setattr(Catalog, "sweep", fail)
    storage = Beating("beating-fails")
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no sweep"):
        Run.open(storage, owner={"start_id": "aaaaaaaa"}, keep=None, wait_s=1)
    assert json.loads(storage.read("lease.json"))["released"] is True
    assert set(threading.enumerate()) <= before


def test_who_knows_that_the_run_is_lost_commits_nothing() -> None:
    """Not even a manifest that would count for nothing: another process works there by now."""
    storage = MemoryStorage("run-lost")
    with WriterClient.start(storage) as client:
        opened = client.open_run(storage, owner={"start_id": "aaaaaaaa"}).result(60)
        other = {**json.loads(storage.read("lease.json")), "start_id": "bbbbbbbb", "host": "elsewhere"}
        storage.put("lease.json", json.dumps(other).encode())
        with pytest.raises(RunBusyError, match="was lost to"):
            client.run_op("confirm", names=[]).result(60)
        with pytest.raises(RunBusyError, match="was lost to"):
            save(client, storage, opened, 1)  # type: ignore[arg-type]
        assert [info.path for info in storage.list() if info.path.startswith("step_")] == []


def test_a_foreign_error_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in raises what it likes, once: the lease is renewed again afterwards, or another process would take it."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.01)
    storage = Beating("beating-foreign")
    run, _ = Run.open(storage, owner={"start_id": "aaaaaaaa"}, keep=None, wait_s=1)
    storage.fail = ValueError("the plug-in's own")
    assert wait_until(lambda: storage.fail is None, 20)
    beats = storage.beats
    assert wait_until(lambda: storage.beats > beats, 20)
    run.close("done")
