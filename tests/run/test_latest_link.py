"""`RUN/latest`: the link to the newest committed checkpoint of a run on a disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from catalog_kit import Far, begin, names, save
from command_kit import invoke

import holdfast as hf
from holdfast.config import Keep
from holdfast.errors import RunBusyError
from holdfast.run import catalog as catalog_module
from holdfast.run.catalog import Catalog
from holdfast.run.names import is_checkpoint_name
from holdfast.storage import LocalStorage


def train(home: Path, steps: int, keep: Keep | None = None) -> None:
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}, every=1, keep=keep) as ck:
        while steps > 0:
            steps -= 1
            ck.step(loss=1.0)
            ck.wait()
            assert target(home) == f"step_{ck.global_step:08d}"


def target(home: Path) -> str | None:
    return os.readlink(home / "latest") if (home / "latest").is_symlink() else None


def run(*args: object) -> str:
    return invoke(*args).stdout


def test_the_link_follows_each_save_and_each_deletion(tmp_path: Path) -> None:
    """It names the newest there is, by whatever way checkpoints come and go; without one it is gone."""
    home = tmp_path / "run"
    train(home, 3, Keep(last=2))
    assert hf.load(home / "latest")
    one, two = home / "step_00000002", home / "step_00000003"
    run("rm", "--force", "--yes", two)
    assert target(home) == one.name
    run("rm", "--undo", two)
    assert target(home) == two.name
    run("prune", "--keep", "last=1", "--yes", home)
    assert target(home) == two.name
    assert not one.exists()
    train(home, 2)
    with open(home / "step_00000005" / "manifest.json", "r+b") as file:
        file.write(b"?")
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}) as ck:
        assert ck.global_step == 4
        assert target(home) == "step_00000004", "a damaged one is not what a tool should open"
    (home / "latest").unlink()
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}):
        assert target(home) == "step_00000004", "a start makes it again"
    hf.Checkpoint(home / "latest").delete()
    assert target(home) is None
    assert not (home / "step_00000004").exists()


def test_the_link_moves_before_anything_is_deleted_and_not_before_the_commit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it leads to a committed checkpoint at any moment at which a process may be killed."""
    catalog = begin(LocalStorage(tmp_path))
    catalog.links = True
    seen = []
    remove = catalog_module.remove

    def look(storage: LocalStorage, name: str) -> None:
        seen.append((name, target(tmp_path)))
        remove(storage, name)

    monkeypatch.setattr(catalog_module, "remove", look)
    for step in range(1, 5):
        before = target(tmp_path)
        catalog.confirm = catalog.announce = lambda *_, before=before: seen.append((target(tmp_path) == before,))
        save(catalog, step, keep=Keep(last=1))
    assert seen == [(True,), *[each for n in (2, 3, 4) for each in ((True,), (f"step_{n - 1:04d}", f"step_{n:04d}"))]]

    def lost(*_: object) -> None:
        raise RunBusyError("taken over")

    catalog.confirm = catalog.announce = lost
    with pytest.raises(RunBusyError):
        save(catalog, 5)
    assert target(tmp_path) == "step_0004", "what does not count is not named"
    catalog.confirm = catalog.announce = None
    catalog.discard(names(catalog), "all of them")
    assert target(tmp_path) is None
    assert seen[-2:] == [("step_0004", None), ("step_0005", None)]


@pytest.mark.parametrize("what", ["folder", "file", "link out", "link to a file"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, what: str) -> None:
    """A user's own "latest" stays as it is, and nothing fails for it."""
    (tmp_path / "model.pt").touch()
    link = tmp_path / "latest"
    if what == "folder":
        link.mkdir()
    elif what == "file":
        link.write_text("step_1")
    else:
        link.symlink_to("../elsewhere" if what == "link out" else "model.pt")
    before = os.lstat(link)
    train_quietly(tmp_path)
    assert os.lstat(link).st_ino == before.st_ino
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def train_quietly(home: Path) -> None:
    with hf.Checkpointer(home, {"model": torch.nn.Linear(2, 2)}, every=1) as ck:
        ck.step(loss=1.0)
    assert (home / "step_00000001" / "manifest.json").exists()


def test_a_file_system_without_links_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on FAT: saves go on without the link."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    catalog = begin(LocalStorage(tmp_path))
    catalog.links = True
    for step in (1, 2):
        save(catalog, step)
    assert [record.message for record in caplog.records if "could not be set: Operation not" in record.message] == [
        f"holdfast: {tmp_path}/latest, the link to the newest checkpoint, could not be set: Operation not permitted"
    ]


def test_a_store_has_no_link(tmp_path: Path) -> None:
    """There it would be one more object."""
    far = begin(Far(f"link-{tmp_path.name}"))
    far.links = True
    save(far, 1)
    assert [info.path for info in far.storage.list() if "latest" in info.path] == []


def test_nothing_that_lists_a_run_takes_the_link_for_a_checkpoint(tmp_path: Path) -> None:
    """The commands, copies between places, copies by hand that keep links, and those that follow them."""
    home = tmp_path / "run"
    train(home, 2)
    both = ["step_00000001", "step_00000002"]
    assert names(Catalog(LocalStorage(home))) == both[::-1]
    assert sorted(row["name"] for row in json.loads(run("ls", "--json", home))["checkpoints"]) == both
    assert json.loads(run("verify", "--json", home))["ok"]
    assert run("latest", home).strip() == str(home / both[1])
    assert f'"name": "{both[1]}"' in run("show", "--json", home / "latest")
    run("page", home, "--output", tmp_path / "page.html")
    run("cp", home, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir() if path.name.startswith("step")) == both
    assert not os.path.lexists(tmp_path / "copy" / "latest")
    shutil.copytree(home, tmp_path / "kept", symlinks=True)  # as `cp -r`, `rsync -a` and `tar` do
    train(tmp_path / "kept", 0)
    assert hf.load(tmp_path / "kept" / "latest")
    assert target(tmp_path / "kept") == both[1]
    shutil.copytree(home, tmp_path / "followed")  # as `cp -rL` and most clients of stores do
    states = {
        row["name"]: row["state"] for row in json.loads(run("ls", "--json", tmp_path / "followed"))["checkpoints"]
    }
    assert states["latest"] == f"copy of {both[1]}"
    assert names(Catalog(LocalStorage(tmp_path / "followed"))) == both[::-1]


def test_a_copy_where_the_link_should_be_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`scp -r` follows the link: tools that read `latest` of the copied run would read an old checkpoint for ever."""
    home, copied = tmp_path / "run", tmp_path / "copied"
    train(home, 1)
    shutil.copytree(home, copied)
    with hf.Checkpointer(copied, {"model": torch.nn.Linear(2, 2)}, every=1) as ck:
        ck.step(loss=1.0)
    assert capfd.readouterr().err.count("/latest is no link but a copy of step_00000001") == 1
    shutil.rmtree(copied / "latest")
    train(copied, 1)


def test_no_report_may_be_called_so() -> None:
    """The name of the link is refused for a checkpoint before anything is trained."""
    assert not is_checkpoint_name("latest")
    assert is_checkpoint_name("latest-1")
