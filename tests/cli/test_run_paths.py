"""Where a checkpoint is expected, a run will do: newest, best, or of a step; and one line for scripts."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from catalog_kit import begin, catalog_of, save
from checkpoint_kit import small
from test_cli import _arguments, as_json, invoke, run  # noqa: F401

from holdfast.storage import LocalStorage


@pytest.mark.parametrize(
    ("options", "name"),
    [((), "step_20"), (("--best", "val"), "step_10"), (("--step", "10"), "step_10")],
)
def test_a_run_stands_for_one_of_its_checkpoints(run, options, name) -> None:  # noqa: F811
    """The newest one by default, else the best or that of a step; which one was taken by itself is said."""
    assert as_json("show", run, *options)["name"] == name
    said = invoke("show", run, *options).stderr
    assert ("its newest checkpoint, step_20, is taken" in said) == (not options)


def test_one_checkpoint_of_a_run_is_copied_and_verified(run, tmp_path) -> None:  # noqa: F811
    """Commands that take whole runs take one checkpoint of them when asked for it."""
    assert [row["name"] for row in as_json("verify", run, "--newest")["checkpoints"]] == ["step_20"]
    assert as_json("cp", run, tmp_path / "copy", "--best", "val")["kind"] == "checkpoint"
    assert as_json("show", tmp_path / "copy")["step"] == 10


def test_latest_and_best_print_one_line(run) -> None:  # noqa: F811
    """Scripts get a path on stdout and nothing else; the metric and its mode come from the run's Keep."""
    assert invoke("latest", run).stdout == f"{run}/step_20\n"
    assert invoke("best", run).stdout == f"{run}/step_10\n"
    assert as_json("best", run, "--metric", "val")["checkpoint"] == f"{run}/step_10"


def test_the_mode_of_the_runs_keep_holds_when_its_metric_is_named(tmp_path) -> None:
    """`ls --metric acc` marks the same one as `ls`: a larger accuracy is better."""
    from holdfast.config import Keep

    storage = LocalStorage(tmp_path / "run")
    catalog = catalog_of(storage)
    catalog.index.register_attempt("aaaaaaaa", host="h", pid=1)
    for step, acc in ((1, 0.9), (2, 0.5)):
        fields = {"run_id": catalog.index.run_id, "attempt": 1, "step": step}
        catalog.add(f"step_{step}", small(storage, f"step_{step}", metrics={"acc": acc}, **fields))
    catalog.prune(Keep(best=2, metric="acc", mode="max"))
    assert invoke("best", tmp_path / "run", "--metric", "acc").stdout.endswith("/step_1\n")
    marks = {row["name"]: row["marks"] for row in as_json("ls", tmp_path / "run", "--metric", "acc")["checkpoints"]}
    assert "best" in marks["step_1"]


def test_what_there_is_not_says_what_there_is(run, tmp_path) -> None:  # noqa: F811
    """Status 1: the run has no such checkpoint. Status 2: no run, no such metric, or two choices at once."""
    assert "the nearest are 10, 20" in invoke("show", run, "--step", "11", code=1).stderr
    assert "quarantined (step_30): bytes differ" in invoke("show", run, "--step", "30", code=1).stderr
    assert "they have: val" in invoke("best", run, "--metric", "acc", code=2).stderr
    assert "it has run" in invoke("latest", run.parent, code=2).stderr
    assert "one of them" in invoke("show", run, "--step", "1", "--best", "val", code=2).stderr
    assert "is one checkpoint" in invoke("show", run / "step_10", "--step", "10", code=2).stderr
    catalog_of(tmp_path / "empty").index.register_attempt("aaaaaaaa", host="h", pid=1)
    assert "none has been committed yet" in invoke("latest", tmp_path / "empty", code=1).stderr
    save(catalog := begin(LocalStorage(tmp_path / "nan")), 1, metrics={"loss": math.nan, "acc": 0.5, "note": "x"})
    assert invoke("best", catalog.storage.uri, "--metric", "loss", code=2).stderr.endswith("; they have: acc\n")


def test_a_relative_path_gives_a_path_that_can_be_used(run, monkeypatch) -> None:  # noqa: F811
    """What is printed does not depend on where the script goes on."""
    monkeypatch.chdir(run.parent)
    assert os.path.isabs(invoke("latest", Path("run")).stdout)


@pytest.mark.parametrize("command", ["log", "stats", "page", "prune"])
def test_a_checkpoint_is_no_run(run, command) -> None:  # noqa: F811
    """Who names a checkpoint where a run is expected is told what it is, and to go up."""
    said = invoke(command, f"{run}/step_20", code=2).stderr
    assert "step_20 is a checkpoint: give its run, the directory above it" in said


def test_rules_of_another_version(run) -> None:  # noqa: F811
    """`prune` does not guess what a rule means that it does not know, and names the way out."""
    catalog = catalog_of(run)
    catalog.index.keep = {"last": 1, "newer_rule": 3}
    catalog.index.save()
    said = invoke("prune", run, code=2).stderr
    assert "another version of holdfast (newer_rule)" in said
    assert "--keep" in said
    assert len(as_json("prune", run, "--keep", "last=1")["checkpoints"]) > 1


@pytest.mark.parametrize(
    "command", ["ls", "log", "stats", "verify", "show", "latest", "best --metric x", "prune --keep last=1"]
)
def test_a_path_with_nothing_is_said_to_have_nothing(tmp_path, command) -> None:
    """A typo is called one by every command, not a run without an index."""
    assert "there is nothing at" in invoke(*command.split(), tmp_path / "typo", code=2).stderr


def test_who_waits_for_a_run_says_so(tmp_path, run) -> None:  # noqa: F811
    """A run need not have begun; a typo looks like one that has not, so it is said what is waited for."""
    soon = ("--timeout", "0.01s")
    for command in (("watch", "--poll", "0.01s"), ("latest", "--wait")):
        typo = invoke(*command, tmp_path / "typo", *soon, code=1).stderr
        assert f"there is no run at {tmp_path}/typo yet: waiting for it" in typo
        assert "waiting" not in invoke(*command, run, *soon, code=None).stderr
        assert "is a checkpoint: give its run" in invoke(*command, run / "step_20", *soon, code=2).stderr


def test_verify_of_nothing_is_no_success(tmp_path) -> None:
    """Where there is no checkpoint and no run the status is 1; a run that has none yet is whole."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "notes").mkdir(parents=True)
    (tmp_path / "other" / "notes" / "a.txt").write_text("x")
    for folder in ("empty", "other"):
        assert as_json("verify", tmp_path / folder, code=1)["ok"] is False
        assert "no checkpoints" in invoke("verify", tmp_path / folder, code=1).stdout
    catalog_of(tmp_path / "new").index.register_attempt("aaaaaaaa", host="h", pid=1)
    assert as_json("verify", tmp_path / "new")["ok"] is True


def test_a_file_is_no_place_of_a_run_that_may_come(tmp_path) -> None:
    """What waits for a run, or probes where one could be, takes no file for a directory that is not there yet."""
    (tmp_path / "train.py").write_text("")
    for command in (["watch"], ["latest", "--wait", "--timeout", "1s"], ["doctor", "--bytes", "0"]):
        assert "is a file: give a directory" in invoke(*command, tmp_path / "train.py", code=2).stderr
