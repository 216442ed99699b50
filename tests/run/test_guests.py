"""Copies that somebody makes inside a run are his: never counted, never deleted, never taken for the newest."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
from catalog_kit import begin, names, save
from command_kit import invoke

import holdfast as hf
from holdfast.config import Keep
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE
from holdfast.storage import LocalStorage


def train(home, steps, **options):
    """One life: so many more steps, each saved; returns the step it began with."""
    state = {"model": torch.nn.Linear(2, 2)}
    with hf.Checkpointer(home, state, every=1, **options) as ck:
        begun = ck.global_step
        for _ in range(steps):
            ck.step(loss=1.0)
            ck.wait()
    return begun


def kept(home):
    return sorted(path.name for path in home.iterdir() if path.name != "latest" and (path / MANIFEST_NAME).exists())


def forget_name(home):
    """Make a manifest what a version before this one wrote."""
    data = (home / MANIFEST_NAME).read_bytes()
    fields = Manifest.from_bytes(data)
    assert fields.name
    object.__setattr__(fields, "name", "")
    (home / MANIFEST_NAME).write_bytes(fields.to_bytes())


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_is_left_alone(tmp_path, capfd, early):
    """`cp -r run/step_3 run/backup`: it takes no place of `last=2`, outlives the run, and is said at each start."""
    home = tmp_path / "run"
    train(home, 3, keep=Keep(last=2))
    shutil.copytree(home / "step_00000003", home / "backup-before-lr-change")
    if early:
        for name in kept(home):
            forget_name(home / name)
    assert train(home, 4, keep=Keep(last=2)) == 3
    assert kept(home) == ["backup-before-lr-change", "step_00000003", "step_00000006", "step_00000007"]
    assert "backup-before-lr-change (of step_00000003)" in capfd.readouterr().err
    assert train(home, 1, keep=Keep(last=1)) == 7
    assert "backup-before-lr-change" in kept(home)
    assert hf.load(home / "backup-before-lr-change")
    listed = json.loads(invoke("ls", "--json", home).stdout)
    states = {row["name"]: row["state"] for row in listed["checkpoints"]}
    assert states["backup-before-lr-change"] == "copy of step_00000003"


def test_a_copy_does_not_count_beside_a_lost_index(tmp_path):
    """run.json is lost: of two directories with one id the one that has its own name is the checkpoint."""
    home = tmp_path / "run"
    train(home, 2)
    shutil.copytree(home / "step_00000002", home / "a")
    shutil.copytree(home / "step_00000001", home / "step_00000009")
    for early in (False, True):
        if early:
            for name in kept(home):
                forget_name(home / name)
        (home / RUN_FILE).unlink(missing_ok=True)
        catalog = Catalog(LocalStorage(home))
        assert names(catalog) == ["step_00000002", "step_00000001"]
        assert catalog.guests == {"a": "step_00000002", "step_00000009": "step_00000001"}


def test_a_run_of_renamed_checkpoints_is_no_empty_run(tmp_path):
    """All were renamed: nothing starts from zero beside them, and the error says what to do."""
    home = tmp_path / "run"
    train(home, 1)
    os.rename(home / "step_00000001", home / "mine")
    with pytest.raises(hf.CorruptCheckpointError, match="mine: it was saved as step_00000001: rename it back"):
        train(home, 1)
    os.rename(home / "mine", home / "step_00000001")
    assert train(home, 1) == 1


def test_one_that_comes_back_under_its_own_name_counts(tmp_path):
    """A checkpoint that was moved away and copied back is what it was; so is a whole run that was copied."""
    home = tmp_path / "run"
    train(home, 2)
    shutil.move(home / "step_00000002", tmp_path / "elsewhere")
    assert names(Catalog(LocalStorage(home))) == ["step_00000001"]
    shutil.copytree(tmp_path / "elsewhere", home / "step_00000002")
    assert names(Catalog(LocalStorage(home))) == ["step_00000002", "step_00000001"]
    shutil.copytree(home, tmp_path / "fork")
    assert train(tmp_path / "fork", 1) == 2


def test_a_copy_from_another_run(tmp_path):
    """It is listed as of that run, as ever."""
    train(tmp_path / "a", 1)
    train(tmp_path / "b", 1)
    shutil.copytree(tmp_path / "b" / "step_00000001", tmp_path / "a" / "step_00000005")
    catalog = Catalog(LocalStorage(tmp_path / "a"))
    assert (names(catalog), list(catalog.others), catalog.guests) == (["step_00000001"], ["step_00000005"], {})


def test_names_that_the_user_gives_are_no_copies(tmp_path, caplog):
    """Names of any form, as `checkpoint_dir_name` and the loop trainer give: each is the checkpoint it says."""
    caplog.set_level(logging.WARNING)
    storage = LocalStorage(tmp_path)
    catalog = begin(storage)
    for step, name in enumerate(("ep1-ba10-rank0", "my best", "checkpoint_last", "final"), start=1):
        save(catalog, step, name=name)
    catalog = Catalog(storage)
    catalog.scan()
    assert names(catalog) == ["final", "checkpoint_last", "my best", "ep1-ba10-rank0"]
    assert catalog.others == {}


def test_the_block_names_a_renamed_newest(tmp_path, capfd):
    """Who renames the newest checkpoint goes on from the one before: the account of the start says why."""
    home = tmp_path / "run"
    train(home, 3)
    (home / "step_00000003").rename(home / "my-favourite")
    capfd.readouterr()
    assert train(home, 1) == 2
    said = capfd.readouterr().err
    assert "left alone, as copied or renamed: my-favourite" in said
    assert "resume=PATH" in said
