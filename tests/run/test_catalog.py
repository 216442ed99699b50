"""The catalog: what is in a run, cached or not, damaged or not, and what retention does to it."""

from __future__ import annotations

import json
import math

import pytest
from catalog_kit import begin, names, save, storage_of
from checkpoint_kit import small

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from holdfast.run.candidates import newest_good
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.record import Sidecar, write_sidecar
from holdfast.storage import LocalStorage, Storage


@pytest.fixture(params=["local", "memory", "far"])
def storage(request, tmp_path) -> Storage:
    return storage_of(request.param, tmp_path)


class Counting(LocalStorage):
    """Counts what is opened, to show which manifests were read."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open(self, path: str):
        self.opened.append(path)
        return super().open(path)


def test_newest_is_by_attempt_and_step_not_by_time(storage) -> None:
    """A branch resumed from an older step is newer than everything of the attempts before."""
    catalog = begin(storage)
    save(catalog, 10, created="2030-01-01T00:00:00+00:00")
    save(catalog, 20, created="2030-01-02T00:00:00+00:00")
    again = begin(storage)
    again.index.resumed("step_0010", step=10)
    save(again, 15, created="2001-01-01T00:00:00+00:00")
    seen = Catalog(storage)
    assert names(seen) == ["step_0015", "step_0020", "step_0010"]
    assert seen.latest().name == "step_0015"
    assert [r.name for r in seen.records() if r.resumed_from] == ["step_0010"]


def test_an_empty_and_an_absent_run_have_nothing(storage) -> None:
    """Looking at nothing finds nothing, writes nothing and warns of nothing."""
    catalog = Catalog(storage)
    assert (catalog.records(), catalog.latest(), catalog.bad()) == ([], None, {})
    assert list(storage.list()) == []
    assert not catalog.rebuilt


def test_opening_reads_no_manifest_of_a_known_name(tmp_path) -> None:
    """With rows in run.json, `latest` reads the manifest it returns and no other; a new name is read."""
    catalog = begin(LocalStorage(tmp_path))
    for step in range(1, 6):
        save(catalog, step)
    storage = Counting(tmp_path)
    assert Catalog(storage).latest().name == "step_0005"
    assert [path for path in storage.opened if path.endswith("manifest.json")] == ["step_0005/manifest.json"]
    small(storage, "step_0009", run_id=catalog.index.run_id, attempt=1, step=9)
    storage.opened.clear()
    assert Catalog(storage).latest().name == "step_0009"
    assert {path for path in storage.opened if path.endswith("manifest.json")} == {"step_0009/manifest.json"}


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"format": "holdfast-run", "version": 99}',
                                    b'{"format":"holdfast-run","version":1,"columns":3,"rows":[]}'])  # fmt: skip
def test_a_lost_or_damaged_index_is_rebuilt(storage, damage, caplog) -> None:
    """Rows, run id, attempts, pins and late metrics come back by a scan, and that is said."""
    catalog = begin(storage)
    save(catalog, 1, metrics={"loss": math.nan})
    save(catalog, 2)
    catalog.set_metrics("step_0002", {"val": 0.5})
    catalog.pin("step_0001")
    before = catalog.records()
    if damage is None:
        storage.delete(RUN_FILE)
    else:
        storage.put(RUN_FILE, damage)
    again = Catalog(storage)
    assert again.rebuilt
    assert "rebuilt from 2 checkpoints" in caplog.text
    assert str(again.records()) == str(before)
    assert again.index.run_id == catalog.index.run_id
    assert again.index.register_attempt("feed0001", host="h", pid=2).attempt == 2
    assert Catalog(storage).rebuilt is False


def test_attempts_go_on_counting_when_all_else_is_lost(storage) -> None:
    """Without run.json and without a single checkpoint the next attempt still is a new number."""
    for start_id in ("aaaaaaaa", "bbbbbbbb"):
        begin(storage, start_id)
    storage.delete(RUN_FILE)
    assert begin(storage, "cccccccc").index.current.attempt == 3


def test_foreign_directories_are_never_picked_or_deleted(storage) -> None:
    """Directories of the user, of another run and of plain saves survive the strictest retention untouched."""
    catalog = begin(storage)
    storage.put("mine/notes.txt", b"do not touch")
    storage.put("looks_like_step_0099/model.bin", b"x")
    small(storage, "other", run_id="another-run", attempt=99, step=99)
    small(storage, "alone", step=1000)
    before = {info.path for info in storage.list()}
    for step in range(1, 5):
        save(catalog, step, keep=Keep(last=1))
    assert before <= {info.path for info in storage.list()}
    seen = Catalog(storage)
    assert names(seen) == ["step_0004"]
    assert sorted(seen.foreign) == ["looks_like_step_0099", "mine"]
    assert sorted(seen.others) == ["alone", "other"]
    storage.delete(RUN_FILE)
    rebuilt = Catalog(storage)
    assert rebuilt.index.run_id == catalog.index.run_id
    assert names(rebuilt) == ["step_0004"]


def test_plain_saves_never_become_part_of_a_run(storage) -> None:
    """A run that starts in a directory with checkpoints saved on their own does not adopt them."""
    small(storage, "alone", step=5)
    catalog = begin(storage)
    save(catalog, 1, keep=Keep(last=1))
    save(catalog, 2, keep=Keep(last=1))
    assert names(Catalog(storage)) == ["step_0002"]
    assert storage.exists("alone/manifest.json")


def test_candidates_skip_what_is_damaged_and_say_so(storage) -> None:
    """A rotten manifest is noted and set aside, a vanished directory forgotten, the next older one offered."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    body = bytearray(storage.read("step_0003/manifest.json"))
    body[len(body) // 2] ^= 1
    storage.put("step_0003/manifest.json", bytes(body))
    storage.delete_tree("step_0002")
    seen = Catalog(storage)
    assert [candidate.record.name for candidate in seen.candidates()] == ["step_0001"]
    assert list(seen.bad()) == ["step_0003"]
    assert "digest" in seen.bad()["step_0003"]


def test_a_row_at_the_wrong_place_and_one_of_a_checkpoint_that_is_gone(storage) -> None:
    """The index is a cache: manifests give the order, and what was removed since is no damage."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    row = catalog.index.rows["step_0001"]
    catalog.index.rows["step_0001"] = [row[0], row[1], 99, row[3]]
    catalog.index.save()
    seen = Catalog(storage)
    assert names(seen)[0] == "step_0001"
    storage.delete_tree("step_0002")
    assert [candidate.record.name for candidate in seen.candidates()] == ["step_0003", "step_0001"]
    assert seen.bad() == {}


def test_a_manifest_that_was_repaired_counts_again(storage) -> None:
    """It was set aside for its manifest alone: once that is sound, nothing is against the checkpoint."""
    catalog = begin(storage)
    save(catalog, 1)
    sound = storage.read("step_0001/manifest.json")
    storage.put("step_0001/manifest.json", b"rot")
    storage.delete(RUN_FILE)
    broken = begin(storage, "bbbbbbbb")
    assert list(broken.index.quarantined) == ["step_0001"]
    storage.put("step_0001/manifest.json", sound)
    assert names(Catalog(storage)) == ["step_0001"]


def test_a_damaged_manifest_without_a_row_counts_as_bad_too(storage) -> None:
    """After the loss of run.json a checkpoint with a rotten manifest is still listed as bad: no silent fresh start."""
    catalog = begin(storage)
    save(catalog, 1)
    storage.put("step_0001/manifest.json", b"rot")
    storage.delete(RUN_FILE)
    seen = Catalog(storage)
    assert seen.latest() is None
    assert list(seen.bad()) == ["step_0001"]
    assert list(seen.index.quarantined) == ["step_0001"]


def test_quarantine_lasts_until_the_name_is_saved_again_or_gone(storage) -> None:
    """A quarantined one is not offered, not ranked, not deleted; a new save of that name, or its removal, ends it."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step, metrics={"m": float(step)})
    catalog.index.quarantine("step_0003", "digest differs")
    catalog.index.quarantine("step_0001", "digest differs")
    seen = Catalog(storage)
    assert (names(seen), seen.latest().name, seen.best("m", "max").name) == (["step_0002"], "step_0002", "step_0002")
    assert set(seen.bad()) == {"step_0001", "step_0003"}
    seen.prune(Keep(last=1))
    assert storage.exists("step_0001/manifest.json")
    manifest = small(storage, "step_0003", run_id=seen.index.run_id, attempt=1, step=3, overwrite=True)
    seen.add("step_0003", manifest)
    storage.delete_tree("step_0001")
    seen.refresh()
    assert (names(seen), seen.bad()) == (["step_0003", "step_0002"], {})


def test_best_is_an_existing_one_with_a_number(storage) -> None:
    """`best` never gives a deleted checkpoint, and nothing when no checkpoint has the metric."""
    catalog = begin(storage)
    for step, value in ((1, 0.1), (2, 0.3), (3, math.nan)):
        save(catalog, step, metrics={"loss": value})
    assert catalog.best("loss").name == "step_0001"
    storage.delete_tree("step_0001")
    assert catalog.best("loss").name == "step_0002"
    assert catalog.best("unknown") is None


def test_late_metrics_win_and_decide(storage) -> None:
    """A metric set after the commit outranks the manifest's, for a reader that starts afresh too."""
    catalog = begin(storage)
    save(catalog, 1, metrics={"val": 5.0, "loss": 1.0})
    save(catalog, 2, metrics={"val": 4.0})
    catalog.set_metrics("step_0001", {"val": 1.0})
    seen = Catalog(storage)
    assert seen.best("val").name == "step_0001"
    assert dict(seen.record("step_0001").metrics) == {"val": 1.0, "loss": 1.0}
    with pytest.raises(CheckpointNotFoundError):
        seen.record("step_0042")


def test_a_pin_by_another_process_is_honoured(storage) -> None:
    """Retention looks at the pin on storage before it deletes, not at what it remembers."""
    catalog = begin(storage)
    save(catalog, 1)
    Checkpoint.at(storage, "step_0001").pin()
    save(catalog, 2, keep=Keep(last=1))
    save(catalog, 3, keep=Keep(last=1))
    assert names(catalog) == ["step_0003", "step_0001"]
    write_sidecar(storage, "step_0001", Sidecar())  # taken back by a version that leaves no note of it
    assert [verdict.name for verdict in catalog.prune(Keep(last=1))] == ["step_0001"]


def test_a_pin_that_is_taken_back_counts_no_more(storage) -> None:
    """Neither for the next owner."""
    catalog = begin(storage)
    save(catalog, 1)
    Checkpoint.at(storage, "step_0001").pin()
    save(catalog, 2)
    Checkpoint.at(storage, "step_0001").unpin()
    catalog = Catalog(storage)
    catalog.pin("step_0001", on=False)
    assert [verdict.name for verdict in catalog.prune(Keep(last=1))] == ["step_0001"]


def test_a_damaged_sidecar_protects(storage) -> None:
    """When it cannot be known whether a checkpoint is pinned, it is not deleted."""
    catalog = begin(storage)
    save(catalog, 1)
    storage.put("step_0001/.metrics.json", b"{")
    save(catalog, 2, keep=Keep(last=1))
    assert names(catalog) == ["step_0002", "step_0001"]


def test_a_pin_sets_a_damaged_sidecar_right(storage) -> None:
    """Somebody has decided: the metrics of the manifest count again, and it goes when its time has come."""
    catalog = begin(storage)
    save(catalog, 1, metrics={"loss": 1.0})
    storage.put("step_0001/.metrics.json", b"{")
    assert not catalog.set_metrics("step_0001", {}).metrics, "damaged: nobody knows which count"
    assert catalog.pin("step_0001", on=True).metrics == {"loss": 1.0}
    assert catalog.pin("step_0001", on=False).metrics == {"loss": 1.0}
    save(catalog, 2, keep=Keep(last=1))
    assert names(catalog) == ["step_0002"]


def test_checkpoints_removed_by_hand_take_no_place(storage) -> None:
    """With keep.last=2 and the newest but one deleted by hand, the one before it stays."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    storage.delete_tree("step_0003")
    save(catalog, 4, keep=Keep(last=2))
    assert names(catalog) == ["step_0004", "step_0002"]


def test_a_finished_run_is_unfinished_by_a_later_save(storage) -> None:
    """The finished mark lasts until a later attempt saves again."""
    catalog = begin(storage)
    save(catalog, 1)
    catalog.index.finish({"step": 1})
    save(catalog, 2)
    assert Catalog(storage).index.finished["step"] == 1
    again = begin(storage)
    assert again.index.finished is not None
    save(again, 3)
    assert Catalog(storage).index.finished is None


def test_run_json_is_strict_json_for_other_tools(tmp_path) -> None:
    """NaN metrics do not make run.json unreadable for strict parsers."""
    catalog = begin(LocalStorage(tmp_path))
    save(catalog, 1, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    body = json.loads((tmp_path / RUN_FILE).read_text(), parse_constant=refuse)
    assert body["run_id"] == catalog.index.run_id
    metrics = Catalog(LocalStorage(tmp_path)).record("step_0001").metrics
    assert str(metrics) == "{'a': nan, 'b': inf, 'c': -inf, 'd': 1}"


def test_no_permission_is_not_taken_for_damage(storage, monkeypatch) -> None:
    """A run.json that may not be read stops with a permission error instead of a rebuild."""
    from holdfast.errors import StoragePermissionError

    def refuse(path: str):
        raise StoragePermissionError(path)

    monkeypatch.setattr(storage, "open", refuse)
    with pytest.raises(StoragePermissionError):
        RunIndex.load(storage)


def test_a_commit_is_known_whatever_its_sidecar(storage, monkeypatch, caplog) -> None:
    """A committed checkpoint is entered even if what lies beside its manifest cannot be read just then."""
    catalog = begin(storage)
    save(catalog, 1)
    read = type(storage).open

    def fail(self, path: str):
        if path == "step_0002/.metrics.json":
            raise StorageError(f"cannot read {path}: out of reach")
        return read(self, path)

    monkeypatch.setattr(type(storage), "open", fail)
    save(catalog, 2, metrics={"loss": 1.0})
    monkeypatch.undo()
    assert "out of reach" in caplog.text
    assert [record.step for record in catalog.records()] == [2, 1]
    assert catalog.set_metrics("step_0002", {"late": 2.0}).metrics == {"loss": 1.0, "late": 2.0}


def test_what_was_set_aside_is_not_tried_again() -> None:
    """Of several candidates the first good one is taken; if there is none, all reasons are said."""
    tried = []

    def check(step):
        tried.append(step)
        return None if step == 1 else "it does not load"

    candidates = [("c", 3), ("b", 2), ("a", 1)]
    found = newest_good(candidates, check, bad={"c": "rot"}, where="run", advice="start anew")
    assert (found, tried) == ((1, [("b", "it does not load")]), [2, 1])
    with pytest.raises(CorruptCheckpointError, match=r"2 checkpoint\(s\)"):
        newest_good(candidates[:2], check, bad={"c": "rot"}, where="run", advice="start anew")


def test_a_checkpoint_that_was_moved_and_linked_costs_itself_alone(tmp_path) -> None:
    """Links are not followed, for they could lead anywhere: it is set aside and named, and the run goes on."""
    storage = LocalStorage(tmp_path / "run")
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    (tmp_path / "run" / "step_0001").rename(tmp_path / "old")
    (tmp_path / "run" / "step_0001").symlink_to(tmp_path / "old")
    again = Catalog(storage)
    assert [record.step for record in again.records()] == [3, 2]
    assert "a part of the path is a symbolic link" in again.bad()["step_0001"]
    assert again.latest().step == 3
