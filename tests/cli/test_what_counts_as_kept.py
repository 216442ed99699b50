"""What is damaged, or gone, is none that stays: `prune`, `rm` and `latest` do not let the sound ones go for it."""

from __future__ import annotations

import shutil

import pytest
from catalog_kit import begin, catalog_of, steps_of
from checkpoint_kit import build
from test_cli import _arguments, as_json, flip, invoke  # noqa: F401

from holdfast.storage import LocalStorage


@pytest.fixture
def run(tmp_path):
    """Three checkpoints with tensors; `flip` damages one of them."""
    storage = LocalStorage(tmp_path / "run")
    catalog = begin(storage)
    for step in (1, 2, 3):
        name = f"step_{step}"
        manifest = build(storage, name, run_id=catalog.index.run_id, attempt=1, step=step, metrics={"val": 9 - step})
        catalog.add(name, manifest)
    catalog.index.save()
    return tmp_path / "run"


def states(document) -> dict[int, str]:
    return {row["step"]: row["state"] for row in document["checkpoints"]}


@pytest.fixture
def damaged(run):
    """The newest, which is also the best, is damaged, and that was found."""
    flip(run, "step_3")
    invoke("verify", "--deep", run, code=1)
    return run


def test_prune_keeps_the_newest_sound_one(damaged) -> None:
    """A damaged one takes no place among the last and the best, and is no newest; it stays, and is named."""
    for rules in ("last=1", "best=1,metric=val"):
        shown = as_json("prune", damaged, "--keep", rules)
        assert states(shown) == {3: "kept", 2: "kept", 1: "would go"}
        (why,) = (row["why"] for row in shown["checkpoints"] if row["step"] == 3)
        assert "damaged" in why
    said = invoke("prune", damaged, "--keep", "last=1", "--yes", "--now").stdout
    assert "step_3  kept, damaged" in said
    assert sorted(path.name for path in damaged.glob("step_*")) == ["step_2", "step_3"]


def test_rm_protects_what_a_start_would_take(damaged) -> None:
    """The newest sound one is refused; the damaged one may go."""
    assert "the newest of its run" in invoke("rm", damaged / "step_2", "--yes", code=1).stdout
    invoke("rm", damaged / "step_3", "--yes")
    assert steps_of(damaged) == [1, 2]


def test_latest_passes_over_what_is_damaged_and_names_it(damaged) -> None:
    """So do `best` and all that take the newest of a run, and `ls` marks another; its step brings it all the same."""
    found = invoke("latest", damaged)
    assert found.stdout.strip().endswith("step_2")
    assert "step_3" in found.stderr
    assert "damaged" in found.stderr
    assert invoke("best", damaged, "--metric", "val").stdout.strip().endswith("step_2")
    marks = {row["step"]: row.get("marks") for row in as_json("ls", damaged, "--metric", "val")["checkpoints"]}
    assert marks == {3: [], 2: ["newest", "best"], 1: []}
    assert invoke("verify", damaged, "--newest", code=1).stdout.startswith("step_3")
    assert as_json("show", damaged, "--step", "3")["step"] == 3


def test_what_was_repaired_counts_again(damaged) -> None:
    """Its files have changed since it was found damaged."""
    flip(damaged, "step_3")
    assert invoke("latest", damaged).stdout.strip().endswith("step_3")
    assert states(as_json("prune", damaged, "--keep", "last=1")) == {3: "kept", 2: "would go", 1: "would go"}


def test_of_damaged_ones_alone_none_is_given(damaged) -> None:
    """`latest` has status 1, and prune has nothing to delete."""
    for name in ("step_1", "step_2"):
        shutil.rmtree(damaged / name)
    assert "damaged" in invoke("latest", damaged, code=1).stderr
    assert states(as_json("prune", damaged, "--keep", "last=1", "--yes")) == {3: "kept"}


def test_a_copy_has_no_rows_of_what_it_could_not_bring(run, tmp_path) -> None:
    """The newest there is the newest that came, and prune leaves it."""
    flip(run, "step_3")
    copy = tmp_path / "copy"
    invoke("cp", run, copy, code=1)
    marks = {row.get("step"): row.get("marks") for row in as_json("ls", copy)["checkpoints"]}
    assert "newest" in marks[2]
    assert invoke("latest", copy).stdout.strip().endswith("step_2")
    invoke("prune", copy, "--keep", "last=1", "--yes", "--now")
    assert steps_of(copy) == [2]


@pytest.mark.parametrize("rules", ["last=1", "best=1,metric=val"])
def test_what_lost_its_manifest_keeps_no_place(run, rules) -> None:
    """Whatever the index of the run says: prune and rm look at what stays before they delete anything."""
    (run / "step_3" / "manifest.json").unlink()
    assert {row["name"]: row.get("marks") for row in as_json("ls", run)["checkpoints"]}["step_2"] == ["newest"]
    assert "the newest of its run" in invoke("rm", run / "step_2", "--yes", code=1).stdout
    assert states(as_json("prune", run, "--keep", rules)) == {3: "kept", 2: "kept", 1: "would go"}
    assert "step_3  kept, damaged" in invoke("prune", run, "--keep", rules, "--yes", "--now").stdout
    assert sorted(path.name for path in run.glob("step_*")) == ["step_2", "step_3"]
    assert invoke("latest", run).stdout.strip().endswith("step_2")


def test_verify_finds_what_lost_its_manifest(run) -> None:
    """The index lists it, so it is no deletion that has begun: a problem, with or without --deep."""
    (run / "step_2" / "manifest.json").unlink()
    for flag in ("--deep", "--no-deep"):
        found = as_json("verify", run, flag, code=1)
        assert [(row["name"], row["ok"]) for row in found["checkpoints"]] == [
            ("step_3", True), ("step_2", False), ("step_1", True),
        ]  # fmt: skip
    assert "manifest.json is gone" in invoke("verify", run, code=1).stdout


@pytest.mark.parametrize("options", [(), ("--verify",), ("--exec", "echo did {name}")])
def test_watch_leaves_out_what_lost_its_manifest_and_says_so(run, options, caplog, capfd) -> None:
    """It goes on with the next, and ends as the run has, with status 0."""
    catalog = catalog_of(run)
    catalog.index.finish({})
    (run / "step_2" / "manifest.json").unlink()
    said = invoke("watch", run, "--start", "first", *options).stdout + capfd.readouterr().out
    assert "step_1" in said
    assert "step_3" in said
    assert "step_2" not in said
    assert "step_2" in caplog.text
