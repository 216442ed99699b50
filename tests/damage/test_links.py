"""Links planted in a run or a checkpoint: nothing outside is written, deleted, or read into what comes of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from catalog_kit import catalog_of

import holdfast as hf
from holdfast.format.digest import bytes_digest
from holdfast.storage.local.local_storage import LocalStorage, door_of
from holdfast.storage.local.local_tree import FileLock
from holdfast.trainers.function.engines.supervisor import LogFile


@pytest.fixture
def outside(tmp_path):
    """A directory that must stay as it is."""
    home = tmp_path / "outside"
    home.mkdir()
    (home / "precious").write_text("precious")
    yield home
    assert [(path.name, path.read_text()) for path in home.iterdir()] == [("precious", "precious")]


def list_in_manifest(home: Path, path: str) -> None:
    """Let a checkpoint's manifest list one more file, under a right digest."""
    body = json.loads((home / "manifest.json").read_bytes())
    body["files"].append({**body["files"][0], "path": path, "size": 8, "role": "user"})
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items() if key != "body_digest"]
    text = ("{\n" + ",\n".join(lines)).encode()
    (home / "manifest.json").write_bytes(text + f',\n"body_digest": "{bytes_digest(text)}"\n}}\n'.encode())


def test_an_overwrite_does_not_delete_through_a_link(tmp_path, outside):
    """The old checkpoint lists `d/precious`, and `d` leads out: its files go, that one stays."""
    home = tmp_path / "ck"
    hf.save(home, {"a": torch.ones(3)})
    (home / "d").symlink_to(outside)
    list_in_manifest(home, "d/precious")
    try:
        hf.save(home, {"a": torch.zeros(3)}, overwrite=True)
    except hf.HoldfastError:
        return
    assert hf.load(home)["a"].tolist() == [0, 0, 0]


def test_a_planted_list_of_what_is_to_be_removed(tmp_path, outside):
    """`.removing.json` is finished by the next start or save: not through a link."""
    home = tmp_path / "ck"
    hf.save(home, {"a": torch.ones(3)})
    (home / "d").symlink_to(outside)
    list_in_manifest(home, "d/precious")
    (home / "manifest.json").rename(home / ".removing.json")
    try:
        hf.save(home, {"a": torch.zeros(3)}, overwrite=True)
    except hf.HoldfastError:
        return
    assert hf.load(home)["a"].tolist() == [0, 0, 0]


def train(run: Path) -> None:
    with hf.Checkpointer(run, {"w": torch.nn.Linear(2, 2)}, every=1) as ck:
        for step in range(3):
            ck.step(loss=float(step))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of three steps."""
    run = tmp_path_factory.mktemp("made") / "run"
    train(run)
    return run


@pytest.mark.parametrize(
    "what", ["reports", ".lease.lock", "lease.json", "run.json", "newest/.metrics.json", "newest", "logs"]
)
def test_a_run_with_a_planted_link(tmp_path, outside, made, what):
    """A run goes on without it, or stops with an error that names the link; nothing is written where it leads."""
    run = tmp_path / "run"
    shutil.copytree(made, run, symlinks=True)
    newest = max(path.name for path in run.iterdir() if path.name.startswith("step_"))
    victim = run / what.replace("newest", newest)
    if victim.is_dir():
        shutil.rmtree(victim)
    victim.unlink(missing_ok=True)
    victim.symlink_to(outside if what in ("reports", "newest", "logs") else outside / "new")
    try:
        train(run)
    except hf.HoldfastError as error:
        assert "symbolic link" in str(error), error  # noqa: PT017 - either outcome is right
    assert not (outside / "new").exists()


def test_metadata_that_is_a_link_is_not_read(tmp_path, outside):
    """Not by the handle, not by a copy, not from another process's view of it."""
    home = tmp_path / "ck"
    hf.save(home, {"a": torch.ones(3)})
    (tmp_path / "secret").write_text('{"key": "secret"}')
    (home / ".metadata.json").symlink_to(tmp_path / "secret")
    with pytest.raises(hf.HoldfastError, match="link"):
        hf.Checkpoint(home).get_metadata()
    with pytest.raises(hf.CorruptCheckpointError, match="link"):
        hf.Checkpoint(home).to_directory(tmp_path / "copy")
    assert not (tmp_path / "copy/.metadata.json").exists()


def test_a_foreign_folder_is_copied_without_what_it_links_to(tmp_path, outside):
    """A folder that is no checkpoint of ours, too."""
    home = tmp_path / "folder"
    home.mkdir()
    (home / "weights.bin").write_bytes(b"1")
    for target in (outside / "precious", outside):
        (home / "link").symlink_to(target)
        try:
            hf.Checkpoint(home).to_directory(tmp_path / f"copy-{target.name}")
        except hf.CorruptCheckpointError as error:
            assert "symlink" in str(error)  # noqa: PT017 - either outcome is right
        assert not (tmp_path / f"copy-{target.name}/link").exists()
        os.unlink(home / "link")


@pytest.mark.parametrize("what", ["logs", "logs/attempt-00001", "logs/attempt-00001/rank-0.log"])
def test_logs_of_workers_are_not_written_through_a_link(tmp_path, outside, caplog, what):
    """Their output is shown, and said not to be kept."""
    link = tmp_path / "run" / what
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "precious" if what.endswith(".log") else outside)
    file = LogFile(tmp_path / "run/logs/attempt-00001/rank-0.log")
    file.write(b"line\n")
    file.release()
    file.release()
    assert "not kept" in caplog.text


def test_a_run_below_a_storage_that_is_a_link(tmp_path, outside):
    """Its lock is not made where the link leads, and what lies there is no checkpoint of it."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/one").symlink_to(outside)
    storage = LocalStorage(tmp_path / "runs").child("one")
    door = door_of(storage)
    assert door is not None
    for use in (FileLock(*door, ".lease.lock").take, lambda: catalog_of(storage)):
        with pytest.raises(hf.StorageError, match="symbolic link"):
            use()
    assert [path.name for path in outside.iterdir()] == ["precious"]
