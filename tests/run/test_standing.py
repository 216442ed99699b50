"""Retention that looks at little decides as retention that looks at everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from catalog_kit import begin, names, save

from holdfast.config import Keep
from holdfast.run import catalog as catalog_module
from holdfast.run import record as record_module
from holdfast.run import retention as retention_module
from holdfast.run import rollbacks as rollbacks_module
from holdfast.run.catalog import Catalog
from holdfast.run.record import Record, Sidecar, write_sidecar
from holdfast.run.retention import RetentionIndex, decide
from holdfast.run.rollbacks import ROLLBACKS, WATCHED, Rollback
from holdfast.storage import LocalStorage, MemoryStorage

KEEPS = [
    Keep(last=1),
    Keep(last=5),
    Keep(best=3, metric="m"),
    Keep(best=2, metric="m", mode="max", last=2),
    Keep(every="4ba", best=1, metric="m"),
    Keep(every="1ep", last=2),
    Keep(every="20s"),
    Keep(),
]


def a_record(chance: random.Random, attempt: int, step: int) -> Record:
    value = chance.choice([None, float("nan"), 1.0, chance.random(), chance.randrange(3)])
    return Record(
        name=f"a{attempt}s{step}-{chance.randrange(3)}",
        attempt=attempt,
        step=step,
        epoch=chance.choice([None, step / 5]),
        created=100.0 + step * 3 + chance.randrange(9),
        metrics={} if value is None else {"m": value},
        pinned=chance.random() < 0.1,
    )


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_the_same_goes(keep: Keep) -> None:
    """Saves, resumes, late metrics, pins, removals by hand and deletions cut short, in any order."""
    for seed in range(40):
        chance = random.Random(seed)
        there: dict[str, Record] = {}
        for _ in range(chance.choice([0, 20])):
            one = a_record(chance, 1, chance.randrange(30))
            there[one.name] = one
        standing = RetentionIndex(keep, there.values())
        attempt, step = 1, 30
        for _ in range(60):
            what = chance.random()
            if what < 0.55 or not there:
                attempt, step = (attempt + 1, chance.randrange(step + 1)) if chance.random() < 0.1 else (attempt, step)
                step += chance.randrange(1, 3)
                one = a_record(chance, attempt, step)
                there[one.name] = one
                standing.put(one)
            elif what < 0.8:
                one = chance.choice(list(there.values()))
                changed = [
                    {"pinned": not one.pinned},
                    {"metrics": {"m": chance.random() * 2}},
                    {"resumed_from": not one.resumed_from},
                    {"step": one.step + 1},
                ]
                there[one.name] = replace(one, **chance.choice(changed))
                standing.put(there[one.name])
            else:
                name = chance.choice(list(there))
                del there[name]
                standing.drop(name)
            protect = frozenset(chance.sample(list(there), 1)) if there and chance.random() < 0.3 else frozenset()
            expected = [one for one in decide(keep, there.values(), protect) if not one.keep]
            assert standing.doomed(protect) == expected, (seed, keep)
            assert set(standing.pinned) == {one.name for one in there.values() if one.pinned}
            for verdict in expected[chance.randrange(3) :]:  # not all of them, each time
                del there[verdict.name]
                standing.drop(verdict.name)


def test_a_save_among_many_looks_at_few(monkeypatch) -> None:
    """With a hundred times as many checkpoints, a save ranks and reads as many records as before."""
    looks, real = [], retention_module.rank_key

    def count(record: Record, metric: str, mode: str):
        looks.append(record.name)
        return real(record, metric, mode)

    counts = []
    for size in (20, 2000):
        keep = Keep(last=size, best=size, metric="m")
        records = [
            Record(name=f"s{step:05d}", attempt=1, step=step, metrics={"m": float(step)}) for step in range(size)
        ]
        standing = RetentionIndex(keep, records)
        assert standing.doomed() == []
        monkeypatch.setattr(retention_module, "rank_key", count)
        looks.clear()
        standing.put(Record(name="new", attempt=1, step=size, metrics={"m": -1.0}))
        # The oldest is among the best still, and the worst among the last.
        assert standing.doomed() == []
        standing.put(Record(name="newer", attempt=1, step=size + 1, metrics={"m": -2.0}))
        standing.put(Record(name="worst", attempt=1, step=0, metrics={"m": 1e9}))
        assert [one.name for one in standing.doomed()] == ["worst"]
        counts.append(len(looks))
        monkeypatch.undo()
    assert counts[0] == counts[1] <= 12


def test_a_save_of_a_guarded_run_judges_few(monkeypatch) -> None:
    """Whether a checkpoint holds a bad step is asked of the new one alone, however many there are."""
    looks, real = [], rollbacks_module.metric_value
    counts = []
    for size in (5, 50):
        catalog = begin(MemoryStorage(f"standing-guarded-{size}"))
        catalog.index.note(WATCHED, "m")
        keep = Keep(last=size, best=size, metric="m")
        for step in range(size):
            save(catalog, step, keep=keep, metrics={"m": float(step)})
        monkeypatch.setattr(rollbacks_module, "metric_value", lambda *given: looks.append(1) or real(*given))
        looks.clear()
        save(catalog, size, keep=keep, metrics={"m": float("nan")})
        counts.append(len(looks))
        monkeypatch.undo()
    assert counts[0] == counts[1] > 0


def test_the_link_to_the_newest_is_set_without_a_look_at_all(tmp_path, monkeypatch) -> None:
    """A save in a run on a disk asks for the newest checkpoint alone, however many there are."""
    looks, real = [], record_module.RecordTable.newest_first

    def counted(self):
        for name in real(self):
            looks.append(name)
            yield name

    monkeypatch.setattr(record_module.RecordTable, "newest_first", counted)
    counts = []
    for size in (5, 30):
        catalog = begin(LocalStorage(tmp_path / str(size)))
        catalog.links = True
        for step in range(size):
            save(catalog, step)
        looks.clear()
        save(catalog, size)
        assert (tmp_path / str(size) / "latest").readlink().name == f"step_{size:04d}"
        counts.append(len(looks))
    assert counts[0] == counts[1] > 0


def test_a_bad_step_that_is_found_later_takes_the_place_away() -> None:
    """What was the best until the guard of the next life noted a bad step is not the best any more."""
    catalog = begin(MemoryStorage("standing-bad"))
    keep = Keep(best=1, metric="m")
    save(catalog, 1, keep=keep, metrics={"m": 0.1})
    save(catalog, 2, keep=keep, metrics={"m": 0.5})
    assert names(catalog) == ["step_0002", "step_0001"]
    catalog.index.register_attempt("22222222", host="here", pid=1)
    catalog.index.note(ROLLBACKS, [Rollback(attempt=1, step=1, why="loss is nan", after=0).to_json()])
    save(catalog, 3, keep=keep, metrics={"m": 0.7})
    assert names(catalog) == ["step_0003"]


def test_what_other_processes_do_is_seen(tmp_path) -> None:
    """A pin that is taken back, late metrics in a sidecar, a checkpoint removed by hand."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    keep = Keep(last=1, best=1, metric="m")
    save(catalog, 1, keep=keep, metrics={"m": 0.1})
    save(catalog, 2, keep=keep, metrics={"m": 0.5})
    catalog.pin("step_0002")
    save(catalog, 3, keep=keep, metrics={"m": 0.6})
    assert names(catalog) == ["step_0003", "step_0002", "step_0001"]
    write_sidecar(storage, "step_0002", Sidecar(pinned=False))
    save(catalog, 4, keep=keep, metrics={"m": 0.7})
    assert names(catalog) == ["step_0004", "step_0001"]
    storage.delete_tree("step_0001")
    save(catalog, 5, keep=keep, metrics={"m": 0.9})
    assert names(catalog) == ["step_0005", "step_0004"], "the best was removed by hand: its place is free"


def test_a_listing_for_many_deletions(monkeypatch) -> None:
    """In a run with very many checkpoints not every deletion lists them all."""
    monkeypatch.setattr(catalog_module, "_NAMES_A_DELETION", 4)
    storage = MemoryStorage("standing-lists")
    catalog = begin(storage)
    listings = []
    monkeypatch.setattr(Catalog, "_names", lambda self, real=Catalog._names: listings.append(1) or real(self))
    for step in range(40):
        save(catalog, step, keep=Keep(last=20))
    assert len(listings) == 3, "one for six of the 20 deletions"


def test_a_row_that_is_quarantined_and_comes_back() -> None:
    """Retention neither counts nor deletes what is set aside."""
    catalog = begin(MemoryStorage("standing-quarantine"))
    for step in range(1, 5):
        save(catalog, step, keep=Keep(last=3))
    catalog.index.quarantine("step_0003", "it does not load")
    save(catalog, 5, keep=Keep(last=3))
    assert names(catalog) == ["step_0005", "step_0004", "step_0002"]
    catalog.index.quarantined.clear()
    save(catalog, 6, keep=Keep(last=3))
    assert names(catalog) == ["step_0006", "step_0005", "step_0004"]
    assert not catalog.storage.exists("step_0003/manifest.json")


def test_the_catalog_agrees_with_all_of_it() -> None:
    """Many saves under one set of rules and then another leave what looking at all of it leaves."""
    chance = random.Random(7)
    catalog = begin(MemoryStorage("standing-catalog"))
    model: dict[str, Record] = {}
    for step in range(60):
        keep = Keep(last=3, best=2, metric="m") if step < 40 else Keep(every="10ba", best=1, metric="m", mode="max")
        metrics = {"m": chance.random()}
        manifest_name = save(catalog, step, keep=keep, metrics=metrics)
        record = Record(name=manifest_name, attempt=1, step=step, metrics=metrics)
        model[record.name] = record
        model = {one.name: model[one.name] for one in decide(keep, model.values()) if one.keep}
        assert names(catalog) == sorted(model, reverse=True)
