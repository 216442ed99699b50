"""The folder of a saver that is busy, lost or closed: nothing in it is deleted, and no other folder stays taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.errors import HoldfastError, RunBusyError
from holdfast.run.catalog import Catalog
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.loop.saving.finder import FolderEntry
from holdfast.trainers.loop.saving.folder import SaveFolder


def test_a_sleeper_deletes_no_directory(tmp_path: Path) -> None:
    """Also of one whose name has a slash, which the index of the run does not know."""
    folder = SaveFolder(str(tmp_path))
    folder.open(claim=None)
    saved = hf.save(tmp_path / "ep1/ba3", {"w": torch.ones(3)})
    told = tmp_path / "lease.json"
    one = FolderEntry(name="ep1/ba3", container="directory")
    folder.confirm(one.name)
    assert json.loads(told.read_text())["doomed"] == [one.name]
    told.write_text(json.dumps({**json.loads(told.read_text()), "start_id": "ffff", "host": "elsewhere"}))
    with pytest.raises(RunBusyError, match="lost to"):
        folder.delete(one)
    assert saved.verify().ok
    folder.close("test")


def test_what_a_sleeper_has_committed_does_not_count(tmp_path: Path) -> None:
    """An owner was taken over in its sleep and has committed since: the next start goes on from before that."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    options = {"save_filename": "ba{batch}", "save_interval": "1ba", "autoresume": True}
    with plain(run, max_duration="3ba", **options) as first:
        first.fit()
    shutil.move(run / "ba3", aside)
    Catalog(LocalStorage(run)).draw_fence(2, "cccccccc")  # as the start does that takes the run over
    shutil.move(aside, run / "ba3")
    with plain(run, max_duration="4ba", **options) as second:
        assert int(second.state.timestamp.batch) == 2
        second.fit()
    assert [row.name for row in Catalog(LocalStorage(run)).records()] == ["ba4", "ba3", "ba2", "ba1"]
    manifest = hf.Checkpoint(run / "ba3").manifest
    assert manifest is not None
    assert manifest.attempt > 2, "written anew under its name"


def test_a_closed_folder_deletes_nothing(tmp_path: Path) -> None:
    """An upload may end after the training has: by then the folder may be another trainer's."""
    folder = SaveFolder(str(tmp_path))
    folder.open(claim=None)
    saved = hf.save(tmp_path / "ep1", {"w": torch.ones(3)})
    assert folder.is_held(None)
    folder.close("test", patient=False)
    assert not folder.is_held(None)
    with pytest.raises(HoldfastError, match="was closed"):
        folder.delete(FolderEntry(name="ep1", container="directory"))
    assert saved.verify().ok


def test_a_busy_folder_leaves_no_other_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of two folders is busy the first is given back at once: another trainer can have it."""
    monkeypatch.setattr("holdfast.checkpointer.run_session._LEASE_S", 0.3)
    with plain(tmp_path / "second") as holder:
        holder.save_checkpoint_to_save_folder()
        refused = plain(tmp_path / "first", callbacks=CheckpointSaver(tmp_path / "second", "b{batch}"))
        with pytest.raises(hf.RunBusyError):
            refused.fit()
        with plain(tmp_path / "first") as free:
            free.save_checkpoint_to_save_folder()
    assert names(tmp_path / "first") == ["ep0-ba0"]


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_running_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    """A folder that a live trainer saves to is busy, even for another trainer of the same process."""
    first = plain(tmp_path, save_filename="ep{epoch}" + suffix)
    first._group.open()
    try:
        with pytest.raises(hf.RunBusyError, match=r"in use by process .* by this very process: close\(\)"):
            plain(tmp_path, save_filename="ep{epoch}" + suffix, autoresume=True)
    finally:
        first.close()
