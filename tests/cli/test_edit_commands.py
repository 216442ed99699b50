"""`pin`, `unpin`, `rm`, `prune`: nothing goes that nobody named, nothing in use goes, a live run is left alone."""

from __future__ import annotations

import pytest
from catalog_kit import begin, catalog_of, hold, names, save, steps_of
from test_cli import _arguments, as_json, invoke, run  # noqa: F401

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.storage import LocalStorage


@pytest.fixture
def storage(tmp_path) -> LocalStorage:
    """Six checkpoints; the second is the best."""
    storage = LocalStorage(tmp_path / "gpt")
    catalog = begin(storage)
    for step in range(1, 7):
        save(catalog, step, metrics={"val": abs(step - 2)})
    return storage


def test_prune_says_first_and_deletes_by_the_rules_of_a_run(storage) -> None:
    """The same verdicts as retention; pinned and held ones stay; the run's own rules are not replaced."""
    keep = ("--keep", "last=1, best=1, metric=val")
    invoke("pin", storage.uri, "--step", "4")
    with Checkpoint.at(storage, "step_0003").hold():
        rows = {row["step"]: (row["state"], row["why"]) for row in as_json("prune", storage.uri, *keep)["checkpoints"]}
        assert steps_of(storage) == [1, 2, 3, 4, 5, 6]
        assert [step for step, (state, _) in rows.items() if state == "would go"] == [5, 1]
        assert rows[2][1] == "best 1 by val (rank 1: 0)"
        assert rows[3][1].startswith("held by process")
        done = as_json("prune", storage.uri, *keep, "--yes")
        assert {row["step"] for row in done["checkpoints"] if row["state"] == "in the trash"} == {1, 5}
    assert steps_of(storage) == [2, 3, 4, 6]
    assert catalog_of(storage).index.keep == Keep().to_json()
    assert "1 of 4 checkpoints" in invoke("prune", storage.uri, *keep).stdout


def test_a_live_run_is_left_alone(storage) -> None:
    """Its owner deletes by itself; the message names it."""
    lease = hold(storage)
    for command in (("prune", storage.uri, "--keep", "last=1"), ("rm", f"{storage.uri}/step_0001")):
        assert "in use by process" in invoke(*command, "--yes", code=1).stderr
    assert steps_of(storage) == [1, 2, 3, 4, 5, 6]
    invoke("pin", f"{storage.uri}/step_0001")  # that works beside it
    lease.release()


def test_rm_deletes_what_is_named_and_refuses_what_is_needed(storage) -> None:
    """Only with --yes; not the newest, a pinned or a held one; never a directory that is not ours."""
    one, newest = f"{storage.uri}/step_0001", f"{storage.uri}/step_0006"
    assert "nothing is, without --yes" in invoke("rm", one).stdout
    refused = invoke("rm", one, newest, "--yes", code=1).stdout
    assert "the newest of its run (--force deletes" in refused
    assert "nothing is, where one is refused" in refused
    assert steps_of(storage) == [1, 2, 3, 4, 5, 6]
    assert [row["state"] for row in as_json("rm", one, "--yes")["checkpoints"]] == [
        "in the trash" if storage.local_root else "deleted"
    ]
    invoke("rm", newest, "--yes", "--force")
    assert steps_of(storage) == [2, 3, 4, 5]
    assert not list(storage.list("step_0001"))
    storage.put("notes/a.txt", b"x")
    foreign = invoke("rm", f"{storage.uri}/notes", "--yes", "--force", code=1).stdout
    assert "no checkpoint of Holdfast  " in foreign  # and not that --force would help
    assert storage.exists("notes/a.txt")
    assert "rm deletes checkpoints" in invoke("rm", storage.uri, code=2).stderr


def test_rm_deletes_what_is_no_good(run) -> None:  # noqa: F811
    """Quarantined ones and what a killed save left take room, too."""
    invoke("rm", run / "step_30", run / "step_40", "--yes")
    assert not (run / "step_30").exists()
    assert not (run / "step_40").exists()
    assert names(catalog_of(run)) == ["step_20", "step_10"]


def test_pins_are_seen_and_taken_back(storage) -> None:
    """`pin` takes a run and picks of it; `ls` shows it."""
    assert as_json("pin", storage.uri, "--best", "val") == {
        "checkpoint": f"{storage.uri}/step_0002",
        "name": "step_0002",
        "pinned": True,
    }
    marks = {row["step"]: row["marks"] for row in as_json("ls", storage.uri)["checkpoints"]}
    assert "pinned" in marks[2]
    assert "not pinned" in invoke("unpin", storage.uri, "--step", "2").stdout
    assert not Checkpoint.at(storage, "step_0002").is_pinned


def test_rules_that_cannot_be_read_are_refused(storage) -> None:
    """Status 2, with an example of how to write them."""
    for rules in ("last", "last=x", "best=2", "metric=val", "first=3", "last=1,last=2"):
        assert "Keep(" in (said := invoke("prune", storage.uri, "--keep", rules, code=2).stderr) or "last=3" in said
