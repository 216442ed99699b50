"""The fence: what of earlier attempts counts after a takeover, and what becomes of the rest."""

from __future__ import annotations

import json
import logging

import pytest
from catalog_kit import begin, names, save, storage_of
from checkpoint_kit import small

from holdfast.run.catalog import Catalog, draw_fence
from holdfast.run.fence import Fence, clear_fences, is_fence, newest_fence, write_fence
from holdfast.run.index import Attempt
from holdfast.run.lease import LEASE_FILE, Heartbeat, Lease, make_owner
from holdfast.storage import Storage


@pytest.fixture(params=["local", "memory", "far"])
def storage(request, tmp_path) -> Storage:
    return storage_of(request.param, tmp_path)


def late(storage: Storage, run_id: str, step: int) -> None:
    """Commit a checkpoint as the first attempt, which has been taken over."""
    small(storage, f"step_{step:04d}", run_id=run_id, attempt=1, step=step)


def taken_over(storage: Storage, *, doomed: tuple[str, ...] = ()) -> Catalog:
    """Two checkpoints of the first attempt, and a second one that has drawn its fence."""
    first = begin(storage, "aaaaaaaa")
    save(first, 1)
    save(first, 2)
    second = Catalog(storage, doomed=doomed)
    attempt = second.index.register_attempt("bbbbbbbb", host="b", pid=2)
    second.draw_fence(attempt.attempt, attempt.start_id)
    return second


def test_a_late_commit_does_not_count(storage: Storage, caplog) -> None:
    """Listed before it counts, afterwards it does not: for the index, without it, and for its own writer's name."""
    second = taken_over(storage)
    late(storage, second.index.run_id, 3)
    for look in (Catalog(storage), Catalog(storage)):
        assert names(look) == ["step_0002", "step_0001"]
        assert look.void == ["step_0003"]
        assert "step_0003" in look.taken()
        storage.delete("run.json")
    save(second, 4)
    assert names(Catalog(storage)) == ["step_0004", "step_0002", "step_0001"]
    with caplog.at_level(logging.WARNING):
        begin(storage, "cccccccc").sweep()
    assert "step_0003 do not count" in caplog.text
    assert storage.exists("step_0003/manifest.json"), "it is whole: perhaps somebody wants to look at it"


def test_a_late_commit_without_its_files_is_removed(storage: Storage) -> None:
    """Its files were swept by the one who took over: remains, like those of any save that failed."""
    second = taken_over(storage)
    late(storage, second.index.run_id, 3)
    data = next(info.path for info in storage.list("step_0003") if "state-" in info.path)
    storage.delete(data)
    third = begin(storage, "cccccccc")
    assert third.void == ["step_0003"]
    third.sweep()
    assert not [info.path for info in storage.list("step_0003")]


def test_a_manifest_that_comes_back_without_files_does_not_count(storage: Storage) -> None:
    """A request sent again may create the manifest of a checkpoint anew that was known and has been deleted since."""
    second = taken_over(storage)
    data = storage.read("step_0001/manifest.json")
    assert second.discard(["step_0001"], "test")
    storage.put("step_0001/manifest.json", data)
    again = Catalog(storage)
    assert (names(again), again.void) == (["step_0002"], ["step_0001"])


def test_what_was_being_deleted_goes_and_its_name_is_dead(storage: Storage) -> None:
    """A sleeping owner may still delete it: nobody counts on it, and nothing new gets its name, ever after."""
    second = taken_over(storage, doomed=("step_0001",))
    assert names(second) == ["step_0002"]
    assert second.sweep() == ["step_0001"]
    third = begin(storage, "cccccccc")
    assert third.taken() == ["step_0001"]
    third.draw_fence(3, "cccccccc")
    assert [info.path for info in storage.list("", recursive=False) if is_fence(info.path)] == [
        "fence-00003-cccccccc.json"
    ], "one fence covers those before it"
    assert Catalog(storage).dead == {"step_0001"}


def test_the_highest_fence_holds_and_a_damaged_one_hides_nothing(storage: Storage, caplog) -> None:
    """A fence that comes late is covered by that of a later attempt; one flipped character is noticed."""
    first = write_fence(storage, Fence(below=2, known={}), "aaaaaaaa")
    second = write_fence(storage, Fence(below=3, known={"step_1": "x"}, dead=frozenset({"step_0"})), "bbbbbbbb")
    found = newest_fence(storage, [first, second])
    assert found is not None
    assert found.admits("step_1", 1, "x")
    assert not found.admits("step_1", 1, "y")
    assert not found.admits("step_2", 2)
    assert found.admits("step_2", 3)
    storage.put(second, storage.read(second).replace(b"step_1", b"step_9"))
    found = newest_fence(storage, [first, second])
    assert found is not None
    assert found.below == 2
    assert "is damaged and passed over" in caplog.text
    assert newest_fence(storage, [second]) is None


def test_a_fence_that_is_removed_while_it_is_read(storage: Storage) -> None:
    """Whoever removes one has drawn a higher one: that one is found. Those of the same attempt stay."""
    listed = [write_fence(storage, Fence(below=number, known={"a": str(number)}), "aaaaaaaa") for number in (2, 3)]
    clear_fences(storage, listed, below=3)
    found = newest_fence(storage, listed[:1])
    assert found is not None
    assert found.known == {"a": "3"}


@pytest.mark.parametrize("ended", [None, "2024-01-01T00:00:00Z"])
def test_an_owner_that_may_wake_up_calls_for_a_fence(storage: Storage, ended: str | None) -> None:
    """Even one that has noted the end of its attempt, and did not come to give the lease back."""
    first = begin(storage, "aaaaaaaa")
    save(first, 1)
    if ended is not None:
        first.index.end_attempt("closed")
    gone = {**make_owner("aaaaaaaa"), "host": "elsewhere", "boot": "another", "beat": 3}
    storage.put(LEASE_FILE, json.dumps(gone).encode())
    heartbeat = Heartbeat(Lease.acquire(storage, make_owner("bbbbbbbb"), wait_s=30, stale_s=0.0))
    second = Catalog(storage)
    last = second.index.current
    assert isinstance(last, Attempt)
    attempt = second.index.register_attempt("bbbbbbbb", host="b", pid=2)
    draw_fence(heartbeat, second, attempt, last=last)
    heartbeat.close()
    assert second.fence is not None
    assert second.fence.known.keys() == {"step_0001"}
