"""Lease and fence with a second actor between any two lines, and with an answer that is lost at any request."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from actors_kit import at_every_line
from catalog_kit import begin, save

from holdfast.errors import RunBusyError, StorageError, StorageUnavailableError
from holdfast.run import lease as lease_module
from holdfast.run import record as record_module
from holdfast.run.catalog import Catalog
from holdfast.run.fence import Fence
from holdfast.run.index import RunIndex
from holdfast.run.lease import LEASE_FILE, LOCK_FILE, Lease, make_owner
from holdfast.run.record import change_sidecar, read_sidecar
from holdfast.storage import LocalStorage, MemoryStorage, StorageTraits
from holdfast.storage.local import local_tree
from holdfast.storage.local.beneath import Ops

_numbers = count()


class Quick(Ops):
    """A disk that is not waited for: no power fails here."""

    def fsync(self, fd: int) -> None:
        """Do nothing."""

    def fsync_dir(self, path: str) -> None:
        """Do nothing."""


def taken(storage: Any, start_id: str) -> Lease | None:
    """Return a lease, None if another process has it."""
    try:
        return Lease.acquire(storage, make_owner(start_id), wait_s=0)
    except RunBusyError:
        return None


@pytest.mark.parametrize("had_one", [False, True])
def test_a_late_metric_and_a_pin_do_not_take_each_other_back(had_one: bool) -> None:
    """The owner of a run writes metrics where an evaluation elsewhere sets the pin, at any line: both are kept."""

    def world() -> MemoryStorage:
        storage = MemoryStorage(f"sidecar-{next(_numbers)}")
        if had_one:
            change_sidecar(storage, "step_0001", lambda sidecar: sidecar.with_metrics({"acc": 0.5}))
        return storage

    for storage, _ in at_every_line(
        (record_module,), world,
        lambda made: change_sidecar(made, "step_0001", lambda sidecar: sidecar.with_metrics({"val": 0.25})),
        lambda made: change_sidecar(made, "step_0001", lambda sidecar: sidecar.with_pin(True)),
    ):  # fmt: skip
        found = read_sidecar(storage, "step_0001")
        assert (found.metrics["val"], found.pinned, "acc" in found.metrics) == (0.25, True, had_one)


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path: Path) -> None:
    """Who takes a lease while its owner gives it back has a lock in place, or no lease: at any line."""

    def world() -> tuple[LocalStorage, Lease]:
        storage = LocalStorage(tmp_path / str(next(_numbers)), ops=Quick())
        return storage, Lease.acquire(storage, make_owner("00000001"), wait_s=0)

    won = 0
    for (storage, _), lease in at_every_line(
        (lease_module, local_tree), world, lambda made: taken(made[0], "00000002"), lambda made: made[1].release()
    ):
        if lease is None:
            after = taken(storage, "00000003")
            assert after is not None
            after.release()
            continue
        won += 1
        assert lease._lock is not None
        assert lease._lock.is_in_place()
        lease.verify()
        assert taken(storage, "00000003") is None
        lease.release()
        assert not (Path(storage.uri) / LOCK_FILE).exists()
    assert won


class Plain(MemoryStorage):
    """A store without conditional writes, which tells what was asked of it."""

    traits = StorageTraits(conditional=False)

    def __init__(self) -> None:
        super().__init__(f"plain-{next(_numbers)}")
        self.log: list[str] = []

    def put(self, path: str, data: Any, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        self.log.append(f"put {json.loads(bytes(data))['start_id']}")
        return super().put(path, data)

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        self.log.append("look")
        return super().read_tagged(path)


def test_a_late_write_at_a_store_without_conditions_is_seen() -> None:
    """A write of another process that was on its way while we wrote: whoever holds the lease has looked once more."""
    body = json.dumps({**make_owner("00000002"), "host": "elsewhere", "beat": 0}).encode()
    seen = 0
    for storage, lease in at_every_line(
        (lease_module,), Plain, lambda made: taken(made, "00000001"), lambda made: made.put(LEASE_FILE, body)
    ):
        owner = json.loads(storage.read(LEASE_FILE))["start_id"]
        if lease is None or owner == "00000001" or "put 00000001" not in storage.log:
            continue
        ours, theirs = storage.log.index("put 00000001"), storage.log.index("put 00000002")
        assert "look" in storage.log[ours:theirs], storage.log
        seen += 1
    assert seen  # only what comes after the last look is left to the next heartbeat


class Losing(MemoryStorage):
    """A store that does what is asked and whose answer is lost, once."""

    lose = False

    def put(self, path: str, data: Any, **conditions: Any) -> str | None:
        etag = super().put(path, data, **conditions)
        if self.lose:
            self.lose = False
            raise StorageUnavailableError("no answer")
        return etag


def test_names_of_an_announcement_without_an_answer_stay() -> None:
    """Both what was announced before and what may have been written stand in the lease until the next announcement."""
    storage = Losing(f"losing-{next(_numbers)}")
    held = Lease.acquire(storage, make_owner("00000001"), wait_s=0)
    held.announce(["a"])
    storage.lose = True
    with pytest.raises(StorageUnavailableError):
        held.announce(["b"])
    held.heartbeat()
    assert json.loads(storage.read(LEASE_FILE))["doomed"] == ["a", "b"]
    held.announce(["c"])
    assert json.loads(storage.read(LEASE_FILE))["doomed"] == ["c"]


@pytest.mark.parametrize("kind", ["store", "disk"])
def test_requests_of_a_dead_owner_are_still_on_their_way_to_a_store(tmp_path: Path, kind: str) -> None:
    """An owner of this machine that is dead may still change a run at a store, and none on a disk."""
    storage: Any = LocalStorage(tmp_path) if kind == "disk" else MemoryStorage(f"dead-{next(_numbers)}")
    gone = {**make_owner("00000001"), "pid": 2**22 - 3, "pid_birth": "1", "trainer_pid": 2**22 - 3}
    storage.put(LEASE_FILE, json.dumps({**gone, "beat": 3, "doomed": ["x"], "locked": True}).encode())
    lease = Lease.acquire(storage, make_owner("00000002"), wait_s=0)
    assert lease.predecessor.may_act == (kind == "store")
    assert lease.predecessor.doomed == (("x",) if kind == "store" else ())


def test_a_fence_hides_names_that_a_sleeper_may_still_delete() -> None:
    """A known checkpoint of a doomed name does not count; of the fence's own attempt it does."""
    fence = Fence(below=3, known={"a": "1", "b": "2"}, dead=frozenset({"a"}))
    assert not fence.admits("a", 2, "1")
    assert fence.admits("b", 2, "2")
    assert not fence.admits("b", 2, "3")
    assert fence.admits("a", 3, "9")


def test_a_candidate_behind_the_fence_is_void() -> None:
    """A cached row whose manifest a sleeping owner has replaced is looked at once more, and passed over."""
    storage = MemoryStorage(f"void-{next(_numbers)}")
    catalog = begin(storage)
    name = save(catalog, 1)
    manifest_id = next(iter(catalog.candidates())).manifest.checkpoint_id
    catalog.fence = Fence(below=99, known={name: manifest_id})
    assert [one.record.name for one in catalog.candidates()] == [name]
    catalog.fence = Fence(below=99, known={name: "another"})
    assert list(catalog.candidates()) == []
    assert catalog.void == [name]


class Silent(MemoryStorage):
    """A store that does not answer, or a disk that cannot read."""

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        raise StorageUnavailableError("silent")

    def read_tagged(self, path: str) -> tuple[bytes, str | None]:
        raise StorageUnavailableError("silent")

    def open(self, path: str) -> Any:
        raise StorageUnavailableError("silent")


def test_a_silent_store_has_lost_no_index() -> None:
    """An index that a store does not give is no damage: nobody goes on as if the run were new."""
    storage = Silent(f"silent-{next(_numbers)}")
    storage.put("run.json", b"{}")
    with pytest.raises(StorageError, match="silent"):
        RunIndex.load(storage)
    with pytest.raises(StorageError, match="silent"):
        Catalog(storage).records()


def test_a_lock_of_this_machine_proves_a_life(tmp_path: Path) -> None:
    """An owner here that holds its lock and whose counter stands still (it is stopped) is not taken over."""
    storage = LocalStorage(tmp_path, ops=Quick())
    held = Lease.acquire(storage, make_owner("00000001"), wait_s=0)
    with pytest.raises(RunBusyError):
        Lease.acquire(storage, make_owner("00000002"), wait_s=0.2, stale_s=0.0)
    held.verify()
    held.release()


def test_a_seized_lock_is_left_to_who_seized_it(tmp_path: Path) -> None:
    """An owner that was taken over gives up its own descriptor, and not the lock file of its successor."""
    storage = LocalStorage(tmp_path, ops=Quick())
    late = Lease.acquire(storage, make_owner("00000001"), wait_s=0)
    assert late._lock is not None
    successor = lease_module.tree.FileLock(*late._door, LOCK_FILE)  # type: ignore[misc]
    assert successor.take() is False
    assert successor.seize() is True
    late._lock.release()
    assert successor.is_in_place()
    successor.release()
    assert not (tmp_path / LOCK_FILE).exists()
