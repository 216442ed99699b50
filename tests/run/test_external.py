"""Holds, pins and metrics of other processes against the owner's retention: what is in use stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
from catalog_kit import begin, names, save

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.errors import CheckpointNotFoundError, ConfigError
from holdfast.run import catalog as catalog_module
from holdfast.run import external
from holdfast.run.catalog import Catalog
from holdfast.run.external import EXTERNAL, External
from holdfast.run.fence import Fence, write_fence
from holdfast.run.index import RunIndex
from holdfast.run.lease import Lease, announced, make_owner
from holdfast.storage import LocalStorage, MemoryStorage, Storage

LAST = Keep(last=1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr(external, "_DECIDED_S", 0.0)
    monkeypatch.setattr(catalog_module, "_BITE_S", 60.0)  # on a busy machine a disk may take half a second to delete


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "local" else MemoryStorage(f"external-{tmp_path.name}")


def others(storage: Storage) -> list[str]:
    return [info.path for info in storage.list(EXTERNAL, recursive=False)]


def test_what_is_held_stays_until_it_is_given_back(storage) -> None:
    """Retention spares it, deletes the others, does not spin, and deletes it with the next save after the hold."""
    catalog = begin(storage)
    for step in range(1, 5):
        save(catalog, step)
    with Checkpoint.at(storage, "step_0002").hold() as checkpoint:
        assert [one.name for one in catalog.prune(LAST)] == ["step_0003", "step_0001"]
        assert not catalog.num_behind
        assert checkpoint.verify().ok
        save(catalog, 5, keep=LAST)
    save(catalog, 6, keep=LAST)
    assert names(catalog) == ["step_0006"]
    assert others(storage) == []


@pytest.mark.parametrize("act", ["hold", "pin", "report"])
def test_what_comes_before_the_announcement_is_spared(storage, act) -> None:
    """Even after retention has looked at it for the last time: it lists what others say once it has announced."""
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    first = Checkpoint.at(storage, "step_0001")
    held = first.hold()

    def announce(_: object) -> None:  # what happens here happens between the last look and the deletion
        catalog.announce = None
        {"hold": held.__enter__, "pin": first.pin, "report": lambda: first.report(val=1.0)}[act]()

    catalog.announce = announce
    assert catalog.prune(Keep(last=1, best=1, metric="val")) == []
    assert first.verify().ok
    save(catalog, 3, keep=Keep(last=1, best=1, metric="val"))
    assert names(catalog) == ["step_0003", "step_0001"]
    held.__exit__(None, None, None) if act == "hold" else None


@pytest.mark.parametrize("act", ["hold", "pin", "report"])
def test_who_comes_after_the_announcement_is_told(storage, act) -> None:
    """The owner has said in lease.json what goes: nobody counts on it any more, and nothing is left behind."""
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    lease = Lease.acquire(storage, make_owner("aaaaaaaa"))
    first = Checkpoint.at(storage, "step_0001")
    told = []

    def announce(names_: list[str]) -> None:
        lease.announce(names_)
        with pytest.raises(CheckpointNotFoundError, match="being deleted") as error:
            {"hold": lambda: first.hold().__enter__(), "pin": first.pin, "report": lambda: first.report(v=1.0)}[act]()
        told.append(error)

    catalog.announce = announce
    assert [one.name for one in catalog.prune(LAST)] == ["step_0001"]
    assert told
    assert others(storage) == []
    assert not list(storage.list("step_0001"))
    lease.release()


def test_an_announcement_that_meets_a_hold_is_taken_back(storage, monkeypatch) -> None:
    """Who asks for a hold in that very moment waits until the owner has decided, and gets it."""
    monkeypatch.setattr(external, "_DECIDED_S", 120.0)
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    lease = Lease.acquire(storage, make_owner("aaaaaaaa"))
    first = Checkpoint.at(storage, "step_0001")
    threads = []

    def report() -> None:
        with first.hold():
            first.report(val=1.0)

    def announce(names_: list[str]) -> None:
        lease.announce(names_)
        if not threads:
            threads.append(threading.Thread(target=report))
            threads[0].start()
            while not others(storage):
                time.sleep(0.01)

    catalog.announce = announce
    assert catalog.prune(LAST) == []
    threads[0].join(120)
    assert first.metrics["val"] == 1.0
    assert announced(storage) == frozenset()
    lease.release()


def test_what_a_sleeping_owner_may_delete_cannot_be_held(storage) -> None:
    """The fence of the one who took over names it dead: its deletion was announced before."""
    catalog = begin(storage)
    save(catalog, 1)
    write_fence(storage, Fence(below=2, known={}, dead=frozenset({"step_0001"})), "bbbbbbbb")
    with pytest.raises(CheckpointNotFoundError, match="being deleted"), Checkpoint.at(storage, "step_0001").hold():
        pass
    assert others(storage) == []


def test_a_hold_ends_with_its_process_or_its_time(tmp_path) -> None:
    """A holder that was killed holds no more; one of another machine holds for as long as it said, by our clock."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    save(catalog, 1)
    code = (
        "import sys; from holdfast.checkpoint.handle import Checkpoint\n"
        f"with Checkpoint({str(tmp_path / 'step_0001')!r}).hold(): print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    save(catalog, 2, keep=LAST)
    assert names(catalog) == ["step_0002", "step_0001"]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    save(catalog, 3, keep=LAST)
    assert names(catalog) == ["step_0003"]
    assert others(storage) == []

    storage.put(f"{EXTERNAL}/hold-step_0003-{'0' * 16}.json", b'{"host": "elsewhere", "pid": 1, "at_most_s": 1e-9}')
    storage.put(f"{EXTERNAL}/hold-step_0004-{'0' * 16}.json", b"torn")
    seen = External(storage)
    seen.look()
    assert "step_0004" in seen.held  # when we cannot know, nothing is deleted
    seen.look()
    assert "step_0003" not in seen.held


def test_metrics_of_another_process_reach_index_and_retention(storage) -> None:
    """Readers see them at once, the live owner before it deletes, and the next owner's index has them for good."""
    catalog = begin(storage)
    keep = Keep(last=1, best=1, metric="val", mode="max")
    for step in (1, 2, 3):
        save(catalog, step)
    Checkpoint.at(storage, "step_0002").report({"val": 0.9}, note="x")
    assert Catalog(storage).best("val", "max").name == "step_0002"
    save(catalog, 4, keep=keep)
    assert names(catalog) == ["step_0004", "step_0002"]
    Checkpoint.at(storage, "step_0004").report(val=0.95)
    assert len(others(storage)) == 1
    following = Catalog(storage)
    following.index.register_attempt("bbbbbbbb", host="here", pid=1)
    following.sweep()
    assert others(storage) == []
    assert '\\"val\\":0.95' in storage.read("run.json").decode()
    assert not RunIndex.load(storage).damage


def test_nobody_loses_what_another_one_reports(storage) -> None:
    """Eight evaluators and the owner write beside one checkpoint at once: every metric is there, and the pin."""
    catalog = begin(storage)
    save(catalog, 1)
    go = threading.Barrier(9)

    def report(number: int) -> None:
        go.wait(60)
        Checkpoint.at(storage, "step_0001").report({f"m{number}": number})

    threads = [threading.Thread(target=report, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    go.wait(60)
    catalog.set_metrics("step_0001", {"own": 1})
    catalog.pin("step_0001")
    for thread in threads:
        thread.join(60)
    checkpoint = Checkpoint.at(storage, "step_0001")
    assert set(checkpoint.metrics) >= {"own", *(f"m{number}" for number in range(8))}
    assert checkpoint.is_pinned


def test_what_cannot_be_said_is_refused(storage) -> None:
    """A metric that is no JSON, a hold for ever, a checkpoint of nobody."""
    catalog = begin(storage)
    save(catalog, 1)
    one = Checkpoint.at(storage, "step_0001")
    with pytest.raises(ConfigError, match="metric 'val' is"):
        one.report(val=object())
    with pytest.raises(ConfigError, match="at_most_s"), one.hold(at_most_s=float("inf")):
        pass
    storage.put("mine/a.txt", b"x")
    with pytest.raises(CheckpointNotFoundError, match="set_metadata"):
        Checkpoint.at(storage, "mine").report(val=1)
    with Checkpoint.at(storage, "mine").hold():
        assert others(storage) == []
