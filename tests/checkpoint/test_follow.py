"""`follow`: what it yields in which order, when it ends, and what it outlasts."""

from __future__ import annotations

import itertools
import threading

import pytest
from catalog_kit import begin, save

import holdfast
from holdfast.checkpoint.follow import follow
from holdfast.config import Keep
from holdfast.errors import ConfigError, StorageError, StoragePermissionError
from holdfast.run.external import EXTERNAL
from holdfast.storage import LocalStorage, MemoryStorage, Storage


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "local" else MemoryStorage(f"follow-{tmp_path.name}")


def steps(storage: Storage, **options: object) -> list[int | None]:
    return [one.step for one in follow(storage.uri, poll_s=0.01, timeout_s=120, **options)]  # type: ignore[arg-type]


def end(catalog) -> None:
    catalog.index.finish({})
    catalog.index.end_attempt("finished")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8]),
        ({"start": "first"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"start": "next"}, []),
        ({"start": 5}, [6, 7, 8]),
        ({"start": "first", "every": 3}, [3, 6]),
        ({"start": "first", "every": "2ep"}, [4, 8]),
        ({"start": "first", "only_newest": True}, [8]),
        ({"start": "first", "verify": True, "hold_s": 60.0}, [1, 2, 4, 5, 6, 7, 8]),
    ],
)
def test_of_a_finished_run_it_yields_what_is_asked_for_and_ends(storage, options, expected) -> None:
    """In the order of saving; verify leaves the damaged one out; nothing of ours stays behind."""
    catalog = begin(storage)
    for step in range(1, 9):
        save(catalog, step, epoch=step / 2)
    end(catalog)
    if "verify" in options:
        path = next(info.path for info in storage.list("step_0003") if not info.path.endswith("manifest.json"))
        storage.put(path, bytes(len(storage.read(path)) + 1))
    assert steps(storage, **options) == expected
    assert not list(storage.list(EXTERNAL))


def test_it_goes_on_through_a_restart_that_repeats_steps(storage) -> None:
    """A follower that comes before the run waits; what the second life saves again comes again, with its own id."""
    seen = []
    done = threading.Thread(target=lambda: seen.extend((one.step, one.digest) for one in _all(storage)))
    done.start()
    catalog = begin(storage)
    save(catalog, 1)
    save(catalog, 2)
    catalog.index.end_attempt("killed")
    again = begin(storage, "bbbbbbbb")
    again.index.resumed("step_0001", step=1)
    for step in (2, 3):
        save(again, step, name=f"step_{step:04d}_b")
    end(again)
    done.join(120)
    found = [step for step, _ in seen]
    assert [step for step, _ in itertools.groupby(sorted(found))] == [1, 2, 3]
    assert found[-2:] == [2, 3]


def _all(storage: Storage):
    return follow(storage.uri, start="first", poll_s=0.01, timeout_s=120)


def test_a_run_taken_up_again_after_its_end_is_followed_on(storage) -> None:
    """Finished, then started again for more: it is over only once that attempt has ended, too."""
    catalog = begin(storage)
    save(catalog, 1)
    end(catalog)
    more = begin(storage, "bbbbbbbb")
    found = _all(storage)
    assert next(found).step == 1
    save(more, 2)
    assert next(found).step == 2
    end(more)
    assert list(found) == []


def test_those_that_retention_deleted_before_their_turn_are_left_out(storage) -> None:
    """A slow follower gets the next that is there; the one it holds stays until it asks for the next."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    found = follow(storage.uri, start="first", hold_s=60, poll_s=0.01, timeout_s=120)
    first = next(found)
    save(catalog, 4, keep=Keep(last=1))
    end(catalog)
    assert first.verify().ok
    assert [one.step for one in found] == [4]


def test_what_followers_report_is_in_the_index_of_a_finished_run(storage) -> None:
    """The last one settles it, so that later readers read nothing beside each checkpoint."""
    catalog = begin(storage)
    save(catalog, 1)
    end(catalog)
    for one in follow(storage.uri, poll_s=0.01):
        one.report(val=0.5)
    assert not list(storage.list(EXTERNAL))
    assert '\\"val\\":0.5' in storage.read("run.json").decode()


def test_a_storage_that_is_away_is_asked_again(tmp_path, monkeypatch) -> None:
    """An outage is waited for; a refusal is raised at once."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    save(catalog, 1)
    end(catalog)
    true = LocalStorage.stat
    errors = iter([StorageError("away"), StorageError("away")])

    def stat(self, path):
        for error in errors:
            raise error
        return true(self, path)

    monkeypatch.setattr(LocalStorage, "stat", stat)
    assert steps(storage) == [1]
    errors = iter([StoragePermissionError("no")])
    with pytest.raises(StoragePermissionError):
        steps(storage)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("/manifest.json", {}),
        ("/state-", {"verify": True}),
        ("/state-", {"verify": True, "hold_s": 60.0}),
    ],
)
def test_an_outage_while_one_is_looked_at_loses_none(tmp_path, monkeypatch, where, options) -> None:
    """Neither is a checkpoint that could not be read for a moment called damaged, nor does the follower end."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    end(catalog)
    real, errors = LocalStorage.open, iter([StorageError("503 SlowDown")] * 2)

    def open_(self, path):
        if f"step_0002{where}" in path:
            for error in errors:
                raise error
        return real(self, path)

    monkeypatch.setattr(LocalStorage, "open", open_)
    monkeypatch.setattr(LocalStorage, "read", Storage.read)
    assert steps(storage, start="first", **options) == [1, 2, 3]
    assert next(errors, None) is None
    assert not list(storage.list(EXTERNAL))


def test_a_damaged_manifest_is_left_out(tmp_path, caplog) -> None:
    """Also where nothing is verified: those that come after it come."""
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    end(catalog)
    manifest = tmp_path / "step_0002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert steps(storage, start="first") == [1, 3]
    assert "step_0002 is damaged" in caplog.text


def test_every_by_time_outlasts_a_clock_that_was_ahead(storage) -> None:
    """One checkpoint that says tomorrow: the next multiple of the true time comes again."""
    catalog = begin(storage)
    for step, hour in enumerate([0, 1.01, 24, 2.02, 3.03, 3.5, 4.04], 1):
        day, hours = divmod(hour, 24)
        minutes, hours = round(hours % 1 * 60), int(hours)
        save(catalog, step, created=f"2026-01-{1 + int(day):02d}T{hours:02d}:{minutes:02d}:00Z")
    end(catalog)
    assert steps(storage, start="first", every="1h") == [1, 2, 3, 5, 7]


def test_arguments_are_checked_before_anything_is_waited_for(tmp_path) -> None:
    """Also that nothing comes is said after the time-out, and `hf.follow` is this function."""
    assert holdfast.follow is follow
    for wrong in ({"start": "last"}, {"start": True}, {"every": "5sp"}, {"poll_s": 0}, {"hold_s": -1}):
        with pytest.raises(ConfigError):
            follow(tmp_path, **wrong)
    with pytest.raises(TimeoutError, match="has not finished"):
        next(follow(tmp_path, poll_s=0.01, timeout_s=0.05))
