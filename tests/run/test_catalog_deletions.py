"""What retention and the sweep delete, in which order, and what becomes of what cannot go."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from catalog_kit import begin, names, save, storage_of
from checkpoint_kit import build

import holdfast as hf
from holdfast.config import Keep
from holdfast.errors import StorageError, StorageFullError
from holdfast.format.commit import remove
from holdfast.run import catalog as catalog_module
from holdfast.run.catalog import Catalog
from holdfast.run.index import RunIndex
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.writer import open_run


@pytest.fixture(params=["local", "memory", "far"])
def storage(request, tmp_path) -> Storage:
    return storage_of(request.param, tmp_path)


class Recording(LocalStorage):
    def __init__(self, root) -> None:
        super().__init__(root)
        self.log: list[str] = []
        self.refuse = ""

    def put(self, path, data, **conditions):
        self.log.append(f"put {path}")
        return super().put(path, data, **conditions)

    def delete_many(self, paths):
        for path in paths:
            self._delete(path)

    def _delete(self, path):
        self.log.append(f"delete {path}")
        if self.refuse and path.startswith(self.refuse):
            raise StorageError(f"cannot delete {path}: refused")
        super().delete_many([path])


def test_the_index_is_saved_before_anything_is_deleted_and_the_manifest_goes_first(tmp_path) -> None:
    """A crash in the middle of retention leaves no index that promises a checkpoint that is gone."""
    storage = Recording(tmp_path)
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    storage.log.clear()
    deleted = catalog.prune(Keep(last=1))
    assert [(verdict.name, verdict.why) for verdict in deleted] == [("step_0001", "not among last 1")]
    assert storage.log[0] == "put run.json"
    assert storage.log[1] == "delete step_0001/manifest.json"
    assert len(storage.log) > 3


def test_a_metric_that_no_checkpoint_has_is_said_once(tmp_path, caplog) -> None:
    """A misspelt metric lets checkpoints go by their age: that is said when the first one goes, with other names."""
    keep = Keep(best=1, metric="los", mode="min")
    catalog = begin(LocalStorage(tmp_path / "misspelt"))
    for step in range(1, 5):
        save(catalog, step, keep=keep, metrics={"val": {"loss": 1 / step}, "acc": 0.5})
    assert caplog.text.count("has a number for 'los', the metric that ranks them") == 1
    assert "(they have: acc, val/loss)" in caplog.text
    caplog.clear()
    catalog = begin(LocalStorage(tmp_path / "sometimes"))
    for step in range(1, 5):
        save(catalog, step, keep=keep, metrics={"los": 1.0} if step == 1 else {})
    catalog = begin(LocalStorage(tmp_path / "by age"))
    for step in range(1, 4):
        save(catalog, step, keep=Keep(last=1, metric="los"))  # only shown: it ranks nothing
    assert not caplog.text


def test_a_checkpoint_that_cannot_be_deleted_stays_known(tmp_path, caplog) -> None:
    """A failing delete is said, does not stop the run, and is tried again at the next save."""
    storage = Recording(tmp_path)
    catalog = begin(storage)
    save(catalog, 1)
    storage.refuse = "step_0001"
    save(catalog, 2, keep=Keep(last=1))
    assert "step_0001 could not be deleted" in caplog.text
    storage.refuse = ""
    save(catalog, 3, keep=Keep(last=1))
    assert names(catalog) == ["step_0003"]
    assert not (tmp_path / "step_0001").exists()


def test_a_deletion_that_fails_half_way_is_listed_no_more(tmp_path, caplog) -> None:
    """Its manifest is gone, so it is no checkpoint; its files, the user's ones too, go with the next save."""
    storage = Recording(tmp_path)
    catalog = begin(storage)
    save(catalog, 1, user={"weights.bin": b"123"})
    storage.refuse = "step_0001/weights.bin"
    save(catalog, 2, keep=Keep(last=1))
    assert "step_0001 could not be deleted" in caplog.text
    assert names(catalog) == ["step_0002"]
    assert [row[0] for row in RunIndex.load(storage).rows.values()] == ["step_0002"]
    storage.refuse = ""
    save(catalog, 3, keep=Keep(last=1))
    assert names(catalog) == ["step_0003"]
    assert not (tmp_path / "step_0001").exists()


def test_many_are_deleted_in_bites(tmp_path, monkeypatch) -> None:
    """The oldest go first, for a bounded time; the others are still listed, and the next call goes on."""
    catalog = begin(LocalStorage(tmp_path))
    for step in range(1, 9):
        save(catalog, step)
    monkeypatch.setattr(catalog_module, "_BITE", 3)
    told = []
    catalog.announce = lambda doomed: told.append(sorted(doomed))
    assert [one.name for one in catalog.prune(Keep(last=1))] == ["step_0003", "step_0002", "step_0001"]
    assert catalog.num_behind
    assert names(catalog) == [f"step_000{step}" for step in (8, 7, 6, 5, 4)] == names(Catalog(LocalStorage(tmp_path)))
    monkeypatch.setattr(catalog_module, "_BITE_S", 0.0)
    assert [one.name for one in catalog.prune(Keep(last=1))] == ["step_0004"], "one at least"
    monkeypatch.setattr(catalog_module, "_BITE_S", 60.0)
    catalog.prune(Keep(last=1))
    assert not catalog.num_behind
    assert names(catalog) == ["step_0008"]
    assert told == [[f"step_000{step}" for step in bite] for bite in ((1, 2, 3), (4, 5, 6), (5, 6, 7))]


@pytest.mark.parametrize("error", [StorageFullError, StorageError])
def test_retention_goes_on_when_the_index_finds_no_space(tmp_path, monkeypatch, error) -> None:
    """Only deleting makes room on a full storage; after any other error nothing is deleted or forgotten."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    put, failures = LocalStorage.put, iter([True])

    def refuse_once(self, path, data, **conditions):
        if path == "run.json" and next(failures, False):
            raise error("no")
        return put(self, path, data, **conditions)

    monkeypatch.setattr(LocalStorage, "put", refuse_once)
    if error is StorageFullError:
        assert [verdict.name for verdict in catalog.prune(Keep(last=1))] == ["step_0001"]
        assert names(Catalog(storage)) == ["step_0002"]
    else:
        with pytest.raises(StorageError):
            catalog.prune(Keep(last=1))
        assert names(catalog) == ["step_0002", "step_0001"]


def test_remains_of_dead_lives_are_swept_and_nothing_else(storage) -> None:
    """Uncommitted files of earlier attempts go; those of a stranger's save in progress and of the user stay."""
    catalog = begin(storage, "aaaaaaaa")
    save(catalog, 1, start="aaaaaaaa")
    build(storage, "step_0002", start="aaaaaaaa", finish=False)
    build(storage, "step_0003", start="dddddddd", finish=False)
    build(storage, "step_0004", start="aaaaaaaa", finish=False)
    storage.put("step_0004/notes.txt", b"mine")
    again = begin(storage, "bbbbbbbb")
    assert sorted(again.incomplete) == ["step_0002", "step_0003", "step_0004"]
    again.sweep()
    left = {info.path for info in storage.list()}
    assert not any(path.startswith("step_0002") for path in left)
    assert sum(path.startswith("step_0003/") for path in left) == 5
    assert [path for path in left if path.startswith("step_0004/")] == ["step_0004/notes.txt"]
    assert storage.exists("step_0001/manifest.json")


def test_a_deletion_cut_short_is_finished(storage) -> None:
    """A checkpoint whose manifest went, but not its user files, is removed by the next start."""
    catalog = begin(storage)
    save(catalog, 1, user={"weights.bin": b"123"})
    body = storage.read("step_0001/manifest.json")
    storage.put("step_0001/.removing.json", body)
    storage.delete("step_0001/manifest.json")
    del catalog.index.rows["step_0001"]
    catalog.index.save()
    again = begin(storage)
    assert (again.incomplete, again.records()) == (["step_0001"], [])
    again.sweep()
    assert not any(info.path.startswith("step_0001/") for info in storage.list())


def test_a_backlog_at_the_end_is_said(monkeypatch, caplog):
    """The process ends before all that keep= does not keep is deleted: how many are left, and who goes on with them."""
    storage = MemoryStorage("backlog")
    catalog = begin(storage)
    for step in range(60):
        save(catalog, step)
    monkeypatch.setattr(open_run, "_END_S", 0.0)
    monkeypatch.setattr(catalog_module, "_BITE", 1)
    monkeypatch.setattr(catalog_module, "remove", lambda *given: (time.sleep(0.05), remove(*given)))  # a slow disk
    caplog.set_level(logging.WARNING, "holdfast")
    with hf.Checkpointer("memory://backlog", {"w": torch.ones(1)}, every=1, keep=Keep(last=3), resume="never") as ck:
        ck.step()
    left = len(Catalog(storage).records()) - 3
    assert left > 0
    assert f"{left} checkpoints that keep= does not keep are still to be deleted" in caplog.text
    monkeypatch.undo()
    with hf.Checkpointer("memory://backlog", {"w": torch.ones(1)}, every=1, keep=Keep(last=3), resume="never") as ck:
        ck.step()
    assert len(Catalog(storage).records()) <= 4, "the next start goes on; what it did not resume from goes too"
