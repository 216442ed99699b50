"""What the next start removes from a run, and what it must not touch."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalog_kit import storage_of
from checkpoint_kit import build, save_id, small

from holdfast.format.parts import part_name, plan_name, put_plan
from holdfast.run.catalog import Catalog
from holdfast.run.index import RunIndex
from holdfast.run.remains import sweep_hidden
from holdfast.storage import LocalStorage, Storage

DEAD, LIVE, STRANGER = "0badc0de", "11111111", "feedbeef"


@pytest.fixture(params=["disk", "memory", "far"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return storage_of(request.param, tmp_path)


def started(storage: Storage) -> tuple[Catalog, list[str]]:
    """Two starts: the first is dead, the second sweeps."""
    index = RunIndex.load(storage)
    if not index.attempts:
        index.register_attempt(DEAD, host="h", pid=1)
    catalog = Catalog(storage)
    catalog.index.register_attempt(LIVE, host="h", pid=2)
    return catalog, catalog.sweep()


def begin(storage: Storage) -> str:
    """The id of a run whose first life is under way."""
    index = RunIndex(storage)
    index.register_attempt(DEAD, host="h", pid=1)
    return index.run_id


def paths(storage: Storage, name: str) -> set[str]:
    return {info.path[len(name) + 1 :] for info in storage.list(name)}


def test_logs_and_hidden_names_are_no_checkpoints(storage: Storage) -> None:
    """They are not even foreign: nobody looks into them."""
    for name in ("logs/attempt-00001", ".incoming-00c0ffee/1-0", ".holdfast-x", "reports"):
        build(storage, name)
    build(storage, "logs")
    catalog = Catalog(storage)
    assert (catalog.records(), catalog.foreign, list(catalog.others), catalog.incomplete) == ([], [], [], [])
    assert catalog.taken() == []


def test_what_somebody_put_beside_remains_stays(storage: Storage) -> None:
    """A late metric beside files of ours goes with them; files of others keep it company."""
    run_id = begin(storage)
    for name, others in (("step_00000001", ()), ("step_00000002", ("notes.txt",))):
        build(storage, name, run_id=run_id, start=DEAD, finish=False)
        for path in (".metrics.json", *others):
            storage.put(f"{name}/{path}", b"{}")
    started(storage)
    assert paths(storage, "step_00000001") == set()
    assert paths(storage, "step_00000002") == {".metrics.json", "notes.txt"}


def test_files_of_a_commit_that_just_came_about(storage: Storage) -> None:
    """Killed between the manifest and cleaning up: part and plan files go, the checkpoint stays whole."""
    run_id = begin(storage)
    small(storage, "checkpoint_000001", run_id=run_id, user={"model.pt": b"1"})
    before = paths(storage, "checkpoint_000001")
    put_plan(storage, "checkpoint_000001", f"{DEAD}-1", ["model.pt", ".metadata.json", "nested/gone.pt"], {})
    for name in (part_name(0, f"{DEAD}-1"), ".metadata.json", ".removing.json", part_name(0, f"{STRANGER}-1")):
        storage.put(f"checkpoint_000001/{name}", b"{}")
    catalog, swept = started(storage)
    assert [record.name for record in catalog.records()] == ["checkpoint_000001"]
    left = before | {".metadata.json", part_name(0, f"{STRANGER}-1")}
    assert paths(storage, "checkpoint_000001") == left
    assert f"checkpoint_000001/{plan_name(f'{DEAD}-1')}" in swept


def test_an_intake_that_never_committed(storage: Storage) -> None:
    """Planned files of a dead life go with its plan; those of a stranger, and files nobody planned, stay."""
    begin(storage)
    for start in (DEAD, STRANGER):
        put_plan(storage, f"of-{start}", f"{start}-1", ["model.pt", "deep/x.pt"], {})
        for name in ("model.pt", "deep/x.pt", "mine.txt", f"digests-00000-{start}-1.bin"):
            storage.put(f"of-{start}/{name}", b"1")
    catalog, _ = started(storage)
    assert paths(storage, f"of-{DEAD}") == {"mine.txt"}
    assert len(paths(storage, f"of-{STRANGER}")) == 5
    assert catalog.taken() == [f"of-{DEAD}", f"of-{STRANGER}"]


def test_somebody_elses_checkpoint_stays_as_it_is(storage: Storage) -> None:
    """One that was to join the run where it lies, and did not: only what we had put there goes."""
    begin(storage)
    build(storage, "placed", start="aaaaaaaa", user={"notes.txt": b"mine"})
    before = paths(storage, "placed")
    digests = f"digests-00000-{DEAD}-7.bin"
    put_plan(storage, "placed", f"{DEAD}-7", [digests], {})
    storage.put(f"placed/{digests}", b"1")
    catalog, _ = started(storage)
    assert paths(storage, "placed") == before
    assert catalog.taken() == ["placed"]


def test_names_are_free_again_after_the_sweep(tmp_path: Path) -> None:
    """What is gone is not taken; empty directories with names such as ours go, others stay."""
    storage = LocalStorage(tmp_path)
    begin(storage)
    build(storage, "best", start=DEAD, finish=False)
    for name in ("checkpoint_000007", "step_00000007", "empty"):
        (tmp_path / name).mkdir()
    catalog, _ = started(storage)
    assert catalog.taken() == ["empty"]
    assert not (tmp_path / "checkpoint_000007").exists()


def copied_by_hand(storage: Storage, name: str, to: str) -> set[str]:
    """Copy the files of a checkpoint, but not its manifest, into a directory of the user."""
    for path in paths(storage, name) - {"manifest.json"}:
        storage.put(f"{to}/{path}", storage.read(f"{name}/{path}"))
    return paths(storage, to)


def test_weights_that_somebody_copied_into_the_run_stay(storage: Storage) -> None:
    """Without the manifest they look like a save that died; but none died before the last commit, at any start."""
    run_id = begin(storage)
    for step in (1, 2):
        small(storage, f"step_{step:08d}", run_id=run_id, attempt=1, step=step, start=DEAD)
    kept = copied_by_hand(storage, "step_00000001", "for-the-paper")
    storage.delete_tree("step_00000001")
    also = copied_by_hand(storage, "step_00000002", "newest-kept")
    for name in ("best", "step_00000003"):
        build(storage, name, run_id=run_id, start=DEAD, finish=False)
    build(storage, "step_00000001", run_id=run_id, start=DEAD, finish=False)
    catalog, _ = started(storage)
    assert (paths(storage, "for-the-paper"), paths(storage, "newest-kept")) == (kept, also)
    assert catalog.incomplete == ["for-the-paper", "newest-kept"]
    assert paths(storage, "best") | paths(storage, "step_00000001") | paths(storage, "step_00000003") == set()
    small(storage, "step_00000004", run_id=run_id, attempt=2, step=4, start=LIVE)
    storage.delete_tree("step_00000002")
    catalog = Catalog(storage)
    catalog.index.register_attempt("22222222", host="h", pid=3)
    catalog.sweep()
    assert (paths(storage, "for-the-paper"), paths(storage, "newest-kept")) == (kept, also)


def test_weights_that_are_all_that_is_left_of_a_run_stay(storage: Storage) -> None:
    """Its checkpoints were removed by hand: the run still knows that this attempt had saved some."""
    run_id = begin(storage)
    small(storage, "step_00000001", run_id=run_id, attempt=1, step=1, start=DEAD)
    index = RunIndex.load(storage)
    index.journal.add("saved", attempt=1, name="step_00000001", step=1)
    index.save()
    kept = copied_by_hand(storage, "step_00000001", "for-the-paper")
    storage.delete_tree("step_00000001")
    started(storage)
    assert paths(storage, "for-the-paper") == kept


def test_a_deletion_that_died_is_finished_whatever_its_name(storage: Storage) -> None:
    """The lease of the dead owner names it, so it is nobody's copy."""
    run_id = begin(storage)
    small(storage, "best-so-far", run_id=run_id, attempt=1, step=1, start=DEAD)
    small(storage, "step_00000002", run_id=run_id, attempt=1, step=2, start=DEAD)
    storage.delete("best-so-far/manifest.json")
    catalog = Catalog(storage, doomed=["best-so-far"])
    catalog.index.register_attempt(LIVE, host="h", pid=2)
    catalog.sweep()
    assert paths(storage, "best-so-far") == set()


def test_hidden_directories(storage: Storage) -> None:
    """Probes and intakes of other start ids go; what only looks like one stays."""
    keep = {f".incoming-{LIVE}/1-0/x", ".incoming-mine/x", ".probe-x/y", ".incoming-0badc0deX/x", ".other/x"}
    gone = {f".incoming-{DEAD}/1-0/deep/x", f".probe-{DEAD}/state-{save_id(DEAD)}.json"}
    for path in keep | gone:
        storage.put(path, b"1")
    assert sorted(sweep_hidden(storage, {LIVE})) == [f".incoming-{DEAD}", f".probe-{DEAD}"]
    assert {info.path for info in storage.list()} == keep
