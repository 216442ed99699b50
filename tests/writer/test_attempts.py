"""Several attempts under one lease, and what a run remembers for whoever restarts its workers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import writer_kit as kit
from catalog_kit import index_of
from process_kit import wait_gone

from holdfast.config import Keep
from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened


@pytest.fixture(params=["process", "thread"])
def client(request: pytest.FixtureRequest) -> Iterator[WriterClient]:
    with WriterClient.start(thread=request.param == "thread") as client:
        yield client


def open_run(client: WriterClient, storage: LocalStorage, start_id: str = "aaaaaaaa", **options: Any) -> RunOpened:
    return client.open_run(storage, owner={"start_id": start_id}, **options).result(60)


def next_attempt(client: WriterClient, **args: Any) -> dict[str, Any]:
    return client.run_op("next_attempt", **{"reason": "worker died", **args}).result(20)


def report(client: WriterClient, *steps: int) -> None:
    client.run_op("report", rows=[{"step": step, "metrics": {"m": step}} for step in steps]).result(20)


def kill_writer(client: WriterClient) -> None:
    pid = client.process_id
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid)


def test_an_attempt_follows_under_the_same_lease(tmp_path: Path, client: WriterClient) -> None:
    """The old attempt gets its end, reason and details; the new one a number and a start id; rows go to theirs."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    lease = storage.read("lease.json")
    report(client, 1, 2, 3)
    told = next_attempt(client, details={"rank": 1, "error": "boom", "seconds": {"detect": 0.01}})
    assert told["attempt"] == 2
    assert re.fullmatch("[0-9a-f]{8}", told["start_id"])
    client.run_op("resumed", name="checkpoint_000001", step=2, attempt=1).result(20)
    report(client, 3, 4)
    client.run_op("close_run", reason="finished", details={"seconds": {"load": 1.5}}).result(20)
    index = index_of(storage)
    one, two = index.attempts
    assert (one.start_id, one.reason, one.ended is None) == ("aaaaaaaa", "worker died", False)
    assert one.details == {"rank": 1, "error": "boom", "seconds": {"detect": 0.01}}
    assert (two.start_id, two.reason, two.details) == (told["start_id"], "finished", {"seconds": {"load": 1.5}})
    assert [(row["attempt"], row["step"]) for row in index.history()] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert lease, "the lease was held all the time by the first start id"


def test_details_gather(tmp_path: Path, client: WriterClient) -> None:
    """Details of the current attempt can be told as they become known; the end adds its own."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    client.run_op("details", details={"find": 1}).result(20)
    client.run_op("details", details={"start": 2}).result(20)
    assert index_of(storage).attempts[0].details == {"find": 1, "start": 2}
    next_attempt(client, details={"why": "x", "find": 3})
    assert index_of(storage).attempts[0].details == {"find": 3, "start": 2, "why": "x"}


def test_notes_stay_with_the_run(tmp_path: Path, client: WriterClient) -> None:
    """Noted values are given to the next start; None forgets one."""
    storage = LocalStorage(tmp_path)
    assert open_run(client, storage).notes == {}
    client.run_op("note", key="trainer", value={"workers": 2}).result(20)
    client.run_op("note", key="gone", value=[1]).result(20)
    client.run_op("note", key="gone", value=None).result(20)
    client.run_op("close_run").result(20)
    assert open_run(client, storage, "bbbbbbbb").notes == {"trainer": {"workers": 2}}


def test_attempts_and_notes_survive_the_loss_of_the_index(tmp_path: Path, client: WriterClient) -> None:
    """run.json is lost: the report segments know all attempts but the end of the last, and the notes."""
    storage = LocalStorage(tmp_path)
    opened = open_run(client, storage)
    client.run_op("note", key="trainer", value={"workers": 2}).result(20)
    client.run_op("note", key="gone", value=1).result(20)
    client.run_op("note", key="gone", value=None).result(20)
    next_attempt(client, details={"why": "first"})
    next_attempt(client, details={"why": "second"})
    client.run_op("close_run").result(20)
    (tmp_path / "run.json").unlink()
    index = index_of(storage)
    index.rebuild_attempts()
    assert index.run_id == opened.run_id
    assert [(one.attempt, one.reason, one.details) for one in index.attempts] == [
        (1, "worker died", {"why": "first"}),
        (2, "worker died", {"why": "second"}),
        (3, None, None),
    ]
    assert index.notes == {"trainer": {"workers": 2}}


def test_what_is_left_of_an_attempt_goes_with_it(tmp_path: Path, client: WriterClient) -> None:
    """Directories nobody took in and unfinished parts of the old attempt are removed; those of others stay."""
    storage = LocalStorage(tmp_path)
    open_run(client, storage)
    kit.make_files(tmp_path, {
        ".incoming-aaaaaaaa/1-0/x": b"1",
        ".incoming-mine/x": b"1",
        "checkpoint_000001/model-00000-aaaaaaaa-1.safetensors": b"1",
        "checkpoint_000002/model-00000-0badc0de-1.safetensors": b"1",
    })  # fmt: skip
    told = next_attempt(client)
    kit.make_files(tmp_path, {f".incoming-{told['start_id']}/2-0/x": b"1"})
    assert {name for name in kit.tree(tmp_path) if name.startswith((".incoming", "checkpoint"))} == {
        ".incoming-mine/x",
        f".incoming-{told['start_id']}/2-0/x",
        "checkpoint_000002/model-00000-0badc0de-1.safetensors",
    }
    client.run_op("close_run").result(20)
    assert not (tmp_path / f".incoming-{told['start_id']}").exists(), "the end of a life leaves none either"
    assert (tmp_path / ".incoming-mine/x").exists()


def test_incoming_directories_of_dead_lives_are_swept(tmp_path: Path, client: WriterClient) -> None:
    """The next start removes what a dead driver's workers had handed over."""
    storage = LocalStorage(tmp_path)
    kit.make_files(tmp_path, {".incoming-0badc0de/7-1/model.pt": b"1", ".incoming-bbbbbbbb/1-0/mine": b"1"})
    opened = open_run(client, storage, "bbbbbbbb")
    assert opened.swept == (".incoming-0badc0de",)
    assert not (tmp_path / ".incoming-0badc0de").exists()
    assert (tmp_path / ".incoming-bbbbbbbb/1-0/mine").exists()


def take(client: WriterClient, tmp_path: Path, opened: RunOpened, step: int, **metrics: float) -> list[str]:
    """One checkpoint of the run; the names that retention deleted."""
    source = kit.make_files(tmp_path / f"source{step}", {"x": b"1"})
    job = kit.make_intake({0: source}, run=True, run_id=opened.run_id, step=step, metrics=metrics,
                          directory=f"checkpoint_{step:06d}")  # fmt: skip
    return [name for name, _ in client.ingest(LocalStorage(tmp_path / "run"), job).result(60).deleted]


def test_late_metrics_rank_anew_at_once(tmp_path: Path, client: WriterClient) -> None:
    """A validation result decides what stays: the names that go are the answer."""
    keep = Keep(best=1, metric="val/acc", mode="max").to_json()
    opened = open_run(client, LocalStorage(tmp_path / "run"), keep=keep)
    client.run_op("protect", names=["checkpoint_000001"]).result(20)
    assert take(client, tmp_path, opened, 1) == []
    assert take(client, tmp_path, opened, 2) == []
    assert client.run_op("metrics", name="checkpoint_000002", metrics={"val": {"acc": 0.5}}).result(20) == []
    client.run_op("protect", names=[]).result(20)
    late = client.run_op("metrics", name="checkpoint_000001", metrics={"val": {"acc": 0.1}}).result(20)
    assert late == ["checkpoint_000001"]


def test_protected_checkpoints_stay(tmp_path: Path, client: WriterClient) -> None:
    """Retention leaves the named ones alone until they are no longer named."""
    opened = open_run(client, LocalStorage(tmp_path / "run"), keep=Keep(last=1).to_json())
    client.run_op("protect", names=["checkpoint_000001", "checkpoint_000002"]).result(20)
    assert [take(client, tmp_path, opened, step) for step in (1, 2, 3)] == [[], [], []]
    client.run_op("protect", names=["checkpoint_000002"]).result(20)
    assert take(client, tmp_path, opened, 4) == ["checkpoint_000003", "checkpoint_000001"]


def test_taken_names_are_told(tmp_path: Path, client: WriterClient) -> None:
    """Whoever opens a run learns which names are in use beside its checkpoints."""
    storage = LocalStorage(tmp_path / "run")
    kit.make_files(tmp_path / "run", {"mine/x": b"1", "logs/attempt-00001/rank-0.log": b"", ".hidden/x": b"",
                                      "checkpoint_000009/model-00000-0badc0de-1.safetensors": b"1"})  # fmt: skip
    (tmp_path / "run/checkpoint_000008").mkdir()
    opened = open_run(client, storage)
    assert opened.taken == ("checkpoint_000009", "mine")
    take(client, tmp_path, opened, 1)
    take(client, tmp_path, opened, 2)
    client.run_op("quarantine", name="checkpoint_000002", reason="NaN").result(20)
    client.run_op("close_run").result(20)
    again = open_run(client, storage, "bbbbbbbb")
    assert [row[0] for row in again.records] == ["checkpoint_000001"]
    assert again.taken == ("checkpoint_000002", "checkpoint_000009", "mine")


def test_a_new_writer_goes_on_with_the_newest_attempt(tmp_path: Path) -> None:
    """The writer dies after next_attempt and protect: the one that follows knows both, and loses no row."""
    storage = LocalStorage(tmp_path / "run")
    with WriterClient.start(storage) as client:
        opened = open_run(client, storage, keep=Keep(last=1).to_json())
        report(client, 1)
        told = next_attempt(client)
        report(client, 2)
        client.run_op("protect", names=["checkpoint_000001"]).result(20)
        kill_writer(client)
        assert [take(client, tmp_path, opened, step) for step in (1, 2)] == [[], []]
        report(client, 3)
        client._conversation._restarted = -1e9  # as if ten minutes had passed
        kill_writer(client)
        report(client, 4)
        index = index_of(storage)
        assert [(row["attempt"], row["step"]) for row in index.history()] == [(2, 2), (2, 3), (2, 4)]
        assert [(one.attempt, one.start_id) for one in index.attempts] == [(1, "aaaaaaaa"), (2, told["start_id"])]
        index.rebuild_attempts()
        assert [one.start_id for one in index.attempts] == ["aaaaaaaa", told["start_id"]]


def test_next_attempt_is_repeated_once(tmp_path: Path) -> None:
    """The writer dies at any operation while it registers attempts: each is there once in the end."""
    deaths = 0
    for at in range(14, 46, 4):
        root, marker = tmp_path / f"run{at}", tmp_path / f"marker{at}"
        storage = FaultyStorage(root, crash_at=at, crash_once=str(marker))
        with WriterClient.start(storage) as client:
            open_run(client, storage)
            told = next_attempt(client, details={"at": at})
            report(client, 7)
            client.run_op("close_run", reason="done").result(20)
        attempts = index_of(root).attempts
        assert [(one.attempt, one.start_id) for one in attempts] == [(1, "aaaaaaaa"), (2, told["start_id"])], at
        assert [one.reason for one in attempts] == ["worker died", "done"], at
        assert attempts[0].details == {"at": at}
        assert index_of(root).history()[0]["attempt"] == 2
        deaths += marker.exists()
    assert deaths >= 7


def test_a_failed_next_attempt_changes_nothing(tmp_path: Path) -> None:
    """The index cannot be written: the error reaches the caller, and the attempt goes on."""
    storage = FaultyStorage(tmp_path, disk_bytes=20_000)
    with WriterClient.start(storage) as client:
        open_run(client, storage)
        with pytest.raises(StorageError):
            next_attempt(client, details={"long": "x" * 30_000})
        report(client, 1)
        assert next_attempt(client)["attempt"] == 2
    assert [(row["attempt"], row["step"]) for row in index_of(storage).history()] == [(1, 1)]
