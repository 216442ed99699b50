"""Callbacks of frameworks report what the framework writes, from inside the function trainer."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.frameworks.reporting import claim, mark, reporting, scalars
from holdfast.run.process import machine
from holdfast.storage import MemoryStorage
from holdfast.torch import TorchTrainer
from holdfast.trainers.function.handoff import HandoffArea


def report_both_ways(config):
    rank = hf.get_context().get_world_rank()
    for epoch in range(2):
        metrics = {"epoch": epoch}
        with reporting(metrics, sharded=epoch == 1) as directory:
            if epoch == 1 or rank == 0:
                Path(directory, f"shard-{rank}").write_text(f"{epoch} {rank}")
            metrics["late"] = 1.5
    try:
        with reporting({"epoch": 2}, sharded=True) as directory:
            if rank == 1:
                raise OSError("no space on rank 1")
    except (OSError, hf.HoldfastError) as error:
        assert "no space on rank 1" in str(error)  # noqa: PT017
    # Nothing was reported for it, on no rank, so that the count is the same.
    if rank == 0:
        elsewhere = hf.Checkpoint("memory://elsewhere/a.ckpt")
        with pytest.raises(hf.ConfigError, match="went to the root"), reporting({}) as directory:
            mark(Path(directory, "a.ckpt"), elsewhere)
    hf.report({"epoch": 3})


@pytest.mark.usefixtures("forked")
def test_one_rank_or_all(tmp_path: Path) -> None:
    """Rank 0's files make a checkpoint, or with ``sharded`` those of all; a failure is heard by all ranks.

    What a plugin has taken to a root of its own is not reported as if it were there.
    """
    result = TorchTrainer(
        report_both_ways,
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(name="run", storage_path=tmp_path),
    ).fit()
    assert list(result.metrics_dataframe["epoch"]) == [0, 1, 3]
    first, second = (tmp_path / "run" / f"checkpoint_{number:06d}" for number in (0, 1))
    assert [path.name for path in first.glob("shard*")] == ["shard-0"]
    assert sorted(path.read_text() for path in second.glob("shard*")) == ["1 0", "1 1"]
    assert hf.Checkpoint(second).metrics == {"epoch": 1, "late": 1.5}
    assert not list((tmp_path / "run").glob(".incoming-*/*"))


def test_outside_of_a_worker(tmp_path: Path) -> None:
    """Without a function trainer the error says what to use."""
    with pytest.raises(hf.SessionError, match="TorchTrainer"), reporting({}):
        raise AssertionError


def test_remote_runs_write_to_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a local run the directory is a temporary one; those of dead processes go a day later."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    new = HandoffArea(root=MemoryStorage("reporting"), uri="memory://reporting", start_id="ab12cd34", rank=0).new(
        "new-0"
    )
    assert Path(new).is_relative_to(tmp_path)
    home = Path(new).parent
    other, living = home.with_name(".incoming-00000001"), home.with_name(".incoming-00000002")
    other.mkdir(parents=True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (other / "owner.json").write_text(json.dumps({**machine(), "pid": ended.pid}))
    claim(str(living))
    claim(str(home))
    assert sorted(os.listdir(home.parent)) == sorted([other.name, living.name, home.name])
    (home / "owner.json").unlink()
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (other / "owner.json", other, living):
        os.utime(path, (two_days_ago, two_days_ago))
    claim(str(home))
    assert sorted(os.listdir(home.parent)) == sorted([living.name, home.name])


def test_a_temporary_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that others may write to, or a link, is not used: they could feed us files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = HandoffArea(root=MemoryStorage("reporting"), uri="memory://reporting", start_id="ab12cd34", rank=0)
    Path(place.new("new-0")).parents[1].chmod(0o777)
    with pytest.raises(hf.errors.StoragePermissionError, match="others may write"):
        place.new("new-1")
    Path(tmp_path, f"holdfast-new-{os.getuid()}").rmdir()
    Path(tmp_path, f"holdfast-new-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(hf.errors.StoragePermissionError):
        place.new("new-2")


def test_scalars() -> None:
    """Numbers, strings and one-element tensors are metrics; the rest of what a framework logs is left out."""
    logged = {"loss": torch.tensor(0.5), "many": torch.ones(2), "name": "a", "flag": True, "none": None, "list": [1]}
    assert scalars(logged, None, {"name": "b"}) == {"loss": 0.5, "name": "b", "flag": True}
