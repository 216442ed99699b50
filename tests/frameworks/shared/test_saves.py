"""Dictionaries saved under the paths of a framework: the names are taken at once, and free again after a failure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError, StorageFullError, StorageUnavailableError, UnsupportedStateError
from holdfast.frameworks.lightning_plugins import Saves
from holdfast.storage import MemoryStorage
from holdfast.testing import FaultyStorage


def saves_to(root: Any = None) -> Saves:
    return Saves(root, unsupported="raise", timeout_s=60.0)


def test_a_bucket_that_does_not_take_the_marker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket that is down for a moment costs the marker, which is said, and not the training."""
    put = MemoryStorage.put

    def down(self: MemoryStorage, path: str, *rest: Any, **options: Any) -> str | None:
        if path.endswith("_holdfast-marker"):
            raise StorageUnavailableError("no answer")
        return put(self, path, *rest, **options)

    monkeypatch.setattr(MemoryStorage, "put", down)
    saves = saves_to()
    saves.save("memory://saves/run/a.ckpt", {"weight": torch.ones(2)}, step=1, metrics={})
    saves.wait()
    assert "a.ckpt looks free until its checkpoint is durable, the storage does not answer" in caplog.text
    assert saves.load("memory://saves/run/a.ckpt")["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("remote", [False, True])
def test_a_save_that_fails_leaves_no_marker(tmp_path: Path, remote: bool) -> None:
    """A name under which nothing was saved is free; one that has an older checkpoint stays taken."""
    saves = saves_to("memory://failing-names/run" if remote else None)
    for path in (tmp_path / "new.ckpt", "memory://failing-names/new.ckpt"):
        with pytest.raises(UnsupportedStateError):
            saves.save(path, {"live": object()}, step=1, metrics={})
    assert os.listdir(tmp_path) == []
    assert list(MemoryStorage("failing-names").list("")) == []


def test_a_save_that_fails_later(tmp_path: Path) -> None:
    """So is one whose save fails in the background."""
    saves = saves_to(tmp_path / "run")
    saves._root = FaultyStorage(tmp_path / "run", disk_bytes=40_000)
    names = [tmp_path / "names" / "old.ckpt", tmp_path / "names" / "new.ckpt"]
    saves.save(names[0], {"weight": torch.ones(2)}, step=1, metrics={})
    saves.wait()
    for name in names:
        saves.save(name, {"weight": torch.ones(100_000)}, step=2, metrics={})
        with pytest.raises(StorageFullError):
            saves.wait()
    assert os.listdir(tmp_path / "names") == ["old.ckpt"]


def test_two_paths_of_one_name(tmp_path: Path) -> None:
    """Under a root, which knows last parts alone, the second is refused until the first is removed or training ends."""
    saves = saves_to(tmp_path / "run")
    one, other = tmp_path / "by-loss" / "best.ckpt", tmp_path / "by-accuracy" / "best.ckpt"
    saves.save(one, {"weight": torch.ones(1)}, step=1, metrics={})
    with pytest.raises(ConfigError, match=r"by-accuracy/best.ckpt would replace .*by-loss/best.ckpt"):
        saves.save(other, {"weight": torch.zeros(1)}, step=1, metrics={})
    assert saves.load(one)["weight"] == 1
    saves.remove(one)
    saves.save(other, {"weight": torch.zeros(1)}, step=2, metrics={})
    saves.wait()
    saves.save(one, {"weight": torch.ones(1)}, step=3, metrics={})
    saves.wait()
    assert saves.load(one)["weight"] == 1


def test_a_lost_save_in_the_middle_costs_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said and training goes on; the last one, and the tenth in a row, are errors."""
    saves = saves_to(tmp_path / "run")
    saves._root = FaultyStorage(tmp_path / "run", disk_bytes=40_000)
    large, small = {"weight": torch.ones(100_000)}, {"weight": torch.ones(2)}

    def save(name: str, state: dict[str, Any]) -> None:
        saves.save(tmp_path / "names" / name, state, step=1, metrics={})
        for handle in saves._handles.values():
            with contextlib.suppress(StorageFullError):
                handle.result(60)

    save("a.ckpt", large)
    save("b.ckpt", small)
    saves.wait()
    assert "a.ckpt was NOT saved, the storage is full" in caplog.text
    for number in range(10):
        save(f"c{number}.ckpt", large)
    with pytest.raises(StorageFullError):
        save("d.ckpt", small)
    saves.wait()
    save("e.ckpt", large)
    with pytest.raises(StorageFullError):
        saves.wait()


def test_ranks_that_cannot_talk_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun without a process group every rank checks for itself, and all pass over the same damaged one."""
    saves = saves_to()
    for step in (1, 2):
        saves.save(tmp_path / f"{step}.ckpt", {"weight": torch.full((999,), float(step))}, step=step, metrics={})
        saves.wait()
    damaged = max((tmp_path / "2.ckpt").rglob("*.safetensors"), key=os.path.getsize)
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"rot!")
    for rank in ("0", "1"):
        told = {"PROCID": rank, "LOCALID": rank, "NTASKS": "2", "NTASKS_PER_NODE": "2", "STEP_ID": "0"}
        for name, value in told.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        assert os.path.basename(saves_to().latest(tmp_path) or "") == "1.ckpt"


LIFE = """
import sys
from datetime import datetime, timedelta
import torch
from holdfast.checkpointer import pending_saves
from holdfast.frameworks.lightning_plugins import Saves

folder, resumes, *rest = sys.argv[1:]


class Wrong(datetime):
    @classmethod
    def now(cls, zone=None):
        return super().now(zone) + timedelta(hours=hours)


pending_saves.datetime = Wrong
saves = Saves(unsupported="raise", timeout_s=60)
if resumes != "no":
    saves.load(saves.latest(folder) if resumes == "yes" else f"{folder}/{resumes}")
for name, step, late in zip(rest[::3], rest[1::3], rest[2::3]):
    hours = float(late)
    saves.save(f"{folder}/{name}", {"step": int(step)}, step=int(step), metrics={})
saves.wait()
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("lives", "newest"),
    [
        (["no a 5 1", "yes b 6 0"], "b"),  # the clock of the second machine is an hour behind
        (["no a 5 1 b 6 0"], "b"),  # the clock was set back
        (["no a 9 0", "no b 2 1"], "b"),  # begun anew: later by the clock, which is all that tells
        (["no a 3 0", "yes b 6 1", "a c 4 2"], "c"),  # two lives that have begun at one checkpoint
    ],
    ids=["behind", "set back", "anew", "twice"],
)
def test_the_newest_is_that_of_the_last_life_whatever_the_clocks_say(
    lives: list[str], newest: str, tmp_path: Path
) -> None:
    """Machines differ in their clocks: what a life saves comes after what it has loaded."""
    for life in lives:
        subprocess.run([sys.executable, "-c", LIFE, str(tmp_path), *life.split()], check=True, timeout=60)
    assert os.path.basename(saves_to().latest(tmp_path) or "") == newest
