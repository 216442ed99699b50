"""Save folders of the loop trainer that are elsewhere: nothing is kept here, retries, retention, pointers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from loop_kit import Crash, CrashAt, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.storage import LibcloudObjectStore, MemoryStorage, resolve
from holdfast.testing import assert_state_equal


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_remote_folder(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URI as save_folder: nothing is written here.

    A pointer leads to the newest, two restarts in one working directory go on from the newest, retention leaves
    the remote alone.
    """
    monkeypatch.chdir(tmp_path)
    uri = f"memory://loop{suffix}-{os.getpid()}/runs"
    options = {"save_filename": "ba{batch}" + suffix, "save_interval": "2ba", "save_num_checkpoints_to_keep": 1}
    whole = plain("whole")
    whole.fit()
    for crash in (5, 9):
        with pytest.raises(Crash):
            plain(uri, callbacks=CrashAt(crash), autoresume=True, **options).fit()
    last = plain(uri, autoresume=True, **options)
    assert int(last.state.timestamp.batch) == 8
    last.fit()
    assert_state_equal(last.state.model, whole.state.model)
    assert last.saved_checkpoints[-1] == f"{uri}/ba12{suffix}"
    assert resolve(uri).read("latest-rank0.symlink") == f"runs/ba12{suffix}".encode()
    assert len(last.saved_checkpoints) == 6
    again = plain(None, load_path=f"{uri}/latest-rank0")
    assert int(again.state.timestamp.batch) == 12
    assert sorted(os.listdir(tmp_path)) == ["whole"]


def test_libcloud_object_store(tmp_path: Path) -> None:
    """load_path within a LibcloudObjectStore."""
    pytest.importorskip("libcloud")
    plain(tmp_path / "container" / "runs", max_duration="1ep").fit()
    store = LibcloudObjectStore("local", "container", {"key": str(tmp_path)})
    trainer = plain(None, load_path="runs/ep1-ba6", load_object_store=store)
    assert int(trainer.state.timestamp.batch) == 6


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_remote_folders(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a remote folder too a later checkpoint refuses a fresh start; nothing is left in the temporary folder."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    uri = f"memory://again{suffix}-{os.getpid()}/runs"
    options: dict[str, Any] = {"save_filename": "deep/ba{batch}" + suffix, "save_interval": "2ba"}
    plain(uri, **options).fit()
    fresh = plain(uri, **options)
    with pytest.raises(hf.CheckpointExistsError, match="nothing was trained"):
        fresh.fit()
    assert int(fresh.state.timestamp.batch) == 0
    assert int(plain(uri, autoresume=True, **options).state.timestamp.batch) == 12
    plain(None, load_path=f"{uri}/latest-rank0")
    assert [path for path in scratch.iterdir() if not path.name.startswith("torch")] == []


def test_a_remote_folder_is_cleaned_when_asked(tmp_path: Path) -> None:
    """A number to keep is about local folders; a Keep cleans a remote one too, and what goes there is gone."""
    uri = f"memory://cleaned-{os.getpid()}"
    savers = [
        CheckpointSaver(f"{uri}/a", "ba{batch}", save_interval="3ba", keep=hf.Keep(last=2)),
        CheckpointSaver(f"{uri}/b", "ba{batch}.pt", save_interval="3ba", num_checkpoints_to_keep=2),
    ]
    plain(None, callbacks=savers).fit()
    stored = {info.path.split("/")[0] for info in resolve(f"{uri}/a").list() if info.path.startswith("ba")}
    assert stored == {"ba9", "ba12"}
    assert [info.path for info in resolve(f"{uri}/b").list() if info.path.startswith("ba")] == [
        "ba12.pt", "ba3.pt", "ba6.pt", "ba9.pt",
    ]  # fmt: skip


def test_nothing_is_kept_here_with_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """save_num_checkpoints_to_keep=0 with a URI, as the guide has it: everything is there, nothing here."""
    monkeypatch.chdir(tmp_path)
    bucket = f"composer-{os.getpid()}"
    options: dict[str, Any] = {"save_filename": "ep{epoch}.pt", "save_num_checkpoints_to_keep": 0}
    plain(f"memory://{bucket}/checkpoints", save_overwrite=True, **options).fit()
    store = MemoryStorage(bucket)
    assert {"checkpoints/ep1.pt", "checkpoints/ep2.pt"} <= {info.path for info in store.list("")}
    assert os.listdir(tmp_path) == []
    more = plain(f"memory://{bucket}/checkpoints", max_duration="3ep", autoresume=True, **options)
    assert int(more.state.timestamp.epoch) == 2
    more.fit()
    assert int(plain(None, load_path=f"memory://{bucket}/checkpoints/ep3.pt").state.timestamp.epoch) == 3
