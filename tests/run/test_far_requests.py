"""How many requests the checkpoints of a run on a store cost: entered, deleted by the hundred, swept."""

from __future__ import annotations

import pytest
from catalog_kit import Far, begin, names
from checkpoint_kit import build, small

from holdfast.config import Keep
from holdfast.errors import StorageError
from holdfast.format.commit import read_manifest
from holdfast.run.catalog import Catalog
from holdfast.run.record import read_sidecar, write_sidecar
from holdfast.storage import MemoryStorage

NUM = 300


@pytest.fixture
def storage(tmp_path) -> Far:
    return Far(f"far-{tmp_path.name}")


def filled(storage: Far, num: int) -> Catalog:
    catalog = begin(storage, "aaaaaaaa")
    for step in range(1, num + 1):
        manifest = small(
            storage, f"step_{step:04d}", run_id=catalog.index.run_id, attempt=1, step=step, start="aaaaaaaa"
        )
        catalog.add(f"step_{step:04d}", manifest, is_new=True)
    catalog.index.save()
    storage.log.clear()
    return catalog


def prune_all(catalog: Catalog, keep: Keep) -> int:
    catalog.prune(keep)
    calls = 1
    while catalog.num_behind:
        catalog.prune(keep)
        calls += 1
    return calls


def left(storage: Far) -> set[str]:
    return {info.path for info in super(Far, storage).list()}


def test_hundreds_are_deleted_by_few_requests_and_the_manifests_first(storage: Far) -> None:
    """The number of requests does not grow with what goes; nothing of it stays, and nothing else goes."""
    catalog = filled(storage, NUM)
    kept = {path for path in left(storage) if not path.startswith("step_") or path[5:9] >= "0298"}
    assert prune_all(catalog, Keep(last=3)) == 1
    assert len(storage.log) <= 15, storage.log
    assert names(catalog) == ["step_0300", "step_0299", "step_0298"] == names(Catalog(storage))
    assert left(storage) == kept
    first, *others = [one for one in storage.log if one.startswith("delete ")]
    assert first.split()[1:] == [f"step_{step:04d}/manifest.json" for step in range(1, NUM - 2)]
    assert not any("manifest.json" in one for one in others)
    assert storage.log.index("put run.json") < storage.log.index(first)


def test_what_the_listing_shows_to_be_another_ones_is_read_before_it_goes(storage: Far) -> None:
    """Pinned meanwhile, replaced by a checkpoint of the user's own, with a file of the user's, damaged."""
    catalog = filled(storage, 6)
    write_sidecar(storage, "step_0001", read_sidecar(storage, "step_0001").with_pin(True))
    for info in list(storage.list("step_0002")):
        storage.delete(info.path)
    small(storage, "step_0002", run_id=None, start="cccccccc")
    storage.put("step_0003/notes.txt", b"mine")
    storage.delete("step_0004/manifest.json")
    prune_all(catalog, Keep(last=1))
    assert names(catalog) == ["step_0006", "step_0001"]
    assert read_manifest(storage, "step_0002", check_sizes=True).run_id is None
    assert [path for path in left(storage) if path.startswith("step_0003")] == ["step_0003/notes.txt"]
    assert not any(path.startswith("step_0005") for path in left(storage))


def test_one_object_that_cannot_go_keeps_no_other(storage: Far, monkeypatch, caplog) -> None:
    """A request for many that fails is followed by single ones."""
    catalog = filled(storage, 6)
    stuck = next(path for path in left(storage) if path.startswith("step_0002/index"))
    delete_many = Far.delete_many

    def refuse(self, paths):
        if stuck in (paths := [*paths]):
            raise StorageError("it is locked")
        delete_many(self, paths)

    monkeypatch.setattr(Far, "delete_many", refuse)
    catalog.prune(Keep(last=1))
    assert names(catalog) == ["step_0006"]
    assert "step_0002 could not be deleted" in caplog.text
    there = {path.partition("/")[0] for path in left(storage)}
    assert {"step_0002", "step_0006"} == {one for one in there if one.startswith("step_")}
    monkeypatch.setattr(Far, "delete_many", delete_many)
    catalog.prune(Keep(last=1))
    assert not any(path.startswith("step_0002") for path in left(storage))


def test_hundreds_that_were_being_deleted_are_swept_by_few_requests(storage: Far) -> None:
    """A life killed between the manifests and the rest of what it deleted: the next one lists once, and sweeps."""
    catalog = filled(storage, NUM)
    storage.delete_many([f"step_{step:04d}/manifest.json" for step in range(1, NUM - 2)])
    storage.put("step_0007/notes.txt", b"mine")
    for name in catalog.index.rows.keys() - {"step_0300", "step_0299", "step_0298"}:
        del catalog.index.rows[name]
    catalog.index.save()
    storage.log.clear()
    second = Catalog(storage, doomed=[f"step_{step:04d}" for step in range(1, NUM - 2)])  # its lease said so
    second.index.register_attempt("bbbbbbbb", host="here", pid=1)
    assert len(second.incomplete) == NUM - 3
    second.sweep()
    assert len(storage.log) <= 25, storage.log
    assert names(second) == ["step_0300", "step_0299", "step_0298"]
    assert {path for path in left(storage) if path.startswith("step_0") and path[5:9] < "0298"} == {
        "step_0007/notes.txt"
    }


@pytest.mark.parametrize("num", [3, NUM])
def test_entering_takes_as_many_requests_whatever_is_there(storage: Far, num: int) -> None:
    """Names are listed, rows believed: no request for each checkpoint."""
    filled(storage, num).index.end_attempt("finished")
    storage.log.clear()
    catalog = begin(storage, "bbbbbbbb")
    catalog.sweep()
    assert sorted(storage.log) == sorted(
        ["get run.json", "list ", "list reports", "put run.json", "put reports/00002-bbbbbbbb-000000.jsonl"]
    )
    assert len(names(catalog)) == num


def test_strangers_are_read_side_by_side(storage: Far) -> None:
    """Checkpoints of others under the same root cost one request each, at every start, and no wait for each other."""
    filled(storage, 2).index.end_attempt("finished")
    for number in range(5):
        build(storage, f"other_{number}", run_id=None, start="cccccccc")
    storage.log.clear()
    catalog = Catalog(storage)
    assert len(catalog.others) == 5
    assert sum(one.startswith("get other_") for one in storage.log) == 5
    assert len(storage.log) == 7


def test_a_root_that_others_share_is_not_listed_as_a_whole(storage: Far) -> None:
    """Many names that are not ours, and far more below them than they are: a few pages are looked at, no more."""
    catalog = filled(storage, 2)
    for number in range(20):
        for part in range(600):
            MemoryStorage.put(storage, f"data_{number}/more/{part}", b"")
    storage.log.clear()
    second = Catalog(storage)
    assert len(second.foreign) == 20
    assert names(second) == names(catalog)
    assert len(storage.log) <= 2 + 13 + 3 * 20
