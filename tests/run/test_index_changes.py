"""The index of a run with many checkpoints: what is changed is written beside run.json, and nothing is lost by that."""

from __future__ import annotations

import json

import pytest
from catalog_kit import begin, names, save

from holdfast.config import Keep
from holdfast.copying.run_transfer import copy_run, plan_run
from holdfast.errors import StorageError
from holdfast.run import index as runindex_module
from holdfast.run.catalog import Catalog
from holdfast.run.index import CHANGES_FILE, RUN_FILE, RunIndex
from holdfast.storage import MemoryStorage

_number = iter(range(1 << 20))


@pytest.fixture
def few(monkeypatch):
    """Two rows are many."""
    monkeypatch.setattr(runindex_module, "_FEW_BYTES", 100)
    monkeypatch.setattr(runindex_module, "_MANY_BYTES", 600)


class Counting(MemoryStorage):
    """Counts what is put."""

    def __init__(self):
        super().__init__(f"index-changes-{next(_number)}")
        self.puts: list[tuple[str, int]] = []

    def put(self, path, data, **conditions):
        self.puts.append((path, len(data)))
        return super().put(path, data, **conditions)


def told(storage) -> list[tuple]:
    return [(one.name, one.step, one.pinned, dict(one.metrics)) for one in Catalog(storage).records()]


def truth(storage) -> list[tuple]:
    """What a scan of the manifests says."""
    catalog = Catalog(storage)
    catalog.scan()
    return [(one.name, one.step, one.pinned, dict(one.metrics)) for one in catalog.records()]


def test_a_save_writes_as_much_in_a_run_of_any_size() -> None:
    """The index of 3 000 checkpoints has 300 KB; of the saves each writes 40 KB at most, on the average."""
    storage = Counting()
    catalog = begin(storage)
    for number in range(3000):
        name = f"made_{number:06d}"
        text = json.dumps([None, 0.0, 10, 0, False, {"loss": 0.123456 * number}, f"{number:016x}"])
        catalog.index.rows[name] = [name, 1, number, text]
    catalog.index.save()
    whole = len(storage.read(RUN_FILE))
    storage.puts.clear()
    for number in range(400):
        catalog.index.rows[f"made_{3000 + number:06d}"] = [f"made_{3000 + number:06d}", 1, 3000 + number, "[]"]
        catalog.index.rows.pop(f"made_{number:06d}")
        catalog.index.save()
    sizes = [size for _, size in storage.puts]
    assert len(sizes) == 400, "one object for each save"
    assert whole > 250_000
    assert sum(sizes) / len(sizes) < 40_000
    assert sum(path == RUN_FILE for path, _ in storage.puts) <= 2
    assert RunIndex.load(storage).rows == catalog.index.rows


def test_few_rows_are_in_run_json_alone() -> None:
    """A run of a usual size has no second file, and its run.json is as it always was."""
    storage = Counting()
    catalog = begin(storage)
    for step in range(20):
        save(catalog, step)
    assert {path for path, _ in storage.puts if "/" not in path} == {RUN_FILE}
    assert "changes" not in json.loads(storage.read(RUN_FILE))


def test_what_is_read_is_what_was_written(few) -> None:
    """Saves, deletions, late metrics, pins and changes of the head, over many replacements of run.json."""
    storage = Counting()
    keep = Keep(last=12, best=2, metric="loss")
    catalog = begin(storage)
    for step in range(60):
        save(catalog, step, keep=keep, metrics={"loss": (step * 7 % 11) / 10})
        if step % 5 == 0:
            catalog.set_metrics(f"step_{step:04d}", {"late": step})
        if step % 13 == 0:
            catalog.pin(f"step_{step:04d}", on=step % 2 == 0)
        if step % 17 == 0:
            catalog.index.note("at", step)
        if step % 20 == 19:
            catalog = begin(storage, f"{step:08x}")
        index = RunIndex.load(storage)
        assert index.damage is None
        assert index.rows == catalog.index.rows
        assert json.loads(storage.read(RUN_FILE))["notes"] == catalog.index.notes
        assert told(storage) == truth(storage)
    written = [path for path, _ in storage.puts if "/" not in path]
    assert written.count(CHANGES_FILE) > written.count(RUN_FILE) > 10


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "none"])
def test_damaged_changes(few, damage) -> None:
    """Whatever becomes of the changes, the checkpoints are those of the manifests, and the next start is whole."""
    storage = Counting()
    catalog = begin(storage)
    for step in range(12):
        save(catalog, step, keep=Keep(last=8), metrics={"loss": step})
    assert storage.exists(CHANGES_FILE)
    data = storage.read(CHANGES_FILE)
    if damage == "flip":
        states = [data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in range(0, len(data), 5)]
    elif damage == "cut":
        states = [data[:at] for at in range(0, len(data), 7)]
    else:
        states = [{"empty": b"", "other": b'{"of": 3}', "none": b""}[damage]]
    for state in states:
        storage.put(CHANGES_FILE, state)
        if damage == "none":
            storage.delete(CHANGES_FILE)
        assert told(storage) == truth(storage)
        assert Catalog(storage).latest().name == "step_0011"
    begin(storage, "00beef00")
    assert RunIndex.load(storage).damage is None
    assert told(storage) == truth(storage)


def test_changes_of_an_earlier_run_json_are_passed_over(few) -> None:
    """A crash between the new run.json and the removal of the changes, and an old owner's late write."""
    storage = Counting()
    catalog = begin(storage)
    for step in range(8):
        save(catalog, step)
    catalog.pin("step_0003")
    stale = storage.read(CHANGES_FILE)
    catalog.pin("step_0003", on=False)
    catalog.index.note("a", 1)
    assert not storage.exists(CHANGES_FILE)
    storage.put(CHANGES_FILE, stale)
    assert told(storage) == truth(storage)
    assert not Catalog(storage).record("step_0003").pinned
    begin(storage, "00beef00")
    assert not storage.exists(CHANGES_FILE), "the next start removes them"


def test_a_reader_meets_a_replacement(few, monkeypatch) -> None:
    """Read without the lease, between the two files both are replaced: the reader has the new ones."""
    storage = Counting()
    catalog = begin(storage)
    for step in range(8):
        save(catalog, step)
    real, reads = Counting.read, []

    def read(self, path, *args):
        data = real(self, path, *args)
        reads.append(path)
        if len(reads) == 1:
            catalog.set_metrics("step_0003", {"late": 1})
            catalog.index.note("a", 1)
        return data

    monkeypatch.setattr(Counting, "read", read)
    index = RunIndex.load(storage)
    assert index.rows == catalog.index.rows
    assert index.notes == {"a": 1}


def test_an_index_that_could_not_be_written(few, monkeypatch) -> None:
    """After an error nobody knows which run.json is stored: the next save writes all of it."""
    storage = Counting()
    catalog = begin(storage)
    for step in range(8):
        save(catalog, step)
    real = Counting.put

    def fail(self, path, data, **conditions):
        if path == RUN_FILE:
            raise StorageError("no")
        return real(self, path, data, **conditions)

    monkeypatch.setattr(Counting, "put", fail)
    with pytest.raises(StorageError):
        catalog.index.note("a", 1)
    monkeypatch.undo()
    storage.puts.clear()
    catalog.index.save()
    assert [path for path, _ in storage.puts] == [RUN_FILE]
    assert RunIndex.load(storage).notes == {"a": 1}


def test_a_copy_has_all_of_it_in_one_file(few) -> None:
    """Push and pull bring an index without changes beside it."""
    storage, target = Counting(), Counting()
    catalog = begin(storage)
    for step in range(12):
        save(catalog, step, keep=Keep(last=8))
    assert storage.exists(CHANGES_FILE)
    assert all(one.state == "ok" for one in copy_run(storage, plan_run(storage), target))
    assert not target.exists(CHANGES_FILE)
    assert RunIndex.load(target).rows == catalog.index.rows
    assert names(Catalog(target)) == names(catalog)


def test_an_event_that_waits_is_in_one_file_or_the_other(few) -> None:
    """The events that run.json holds are written again with the changes: together they count once."""
    storage = Counting()
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    catalog.index.journal.add("deleted", name="a", step=1)
    catalog.index.finish({})  # run.json
    catalog.index.journal.add("deleted", name="b", step=2)
    save(catalog, 4)
    assert storage.puts[-1][0] == CHANGES_FILE
    waiting = [event["name"] for event in RunIndex.load(storage).journal.waiting()]
    assert (waiting.count("a"), waiting.count("b")) == (1, 1)
