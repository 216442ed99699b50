"""Directories of frameworks are kept: whatever happens to them afterwards, and to the process that added them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast import Keep
from holdfast.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, StorageFullError
from holdfast.integrations import DirectoryKeeper
from holdfast.integrations.places import STAGED
from holdfast.testing.faults import FaultyStorage


def write(folder: Path, text: str = "first") -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_text(text)
    (folder / "inner" / "more.bin").write_text(f"more {text}")
    return folder


def test_deleted_at_once(tmp_path: Path) -> None:
    """The framework deletes its directory right after `add`: the checkpoint is complete, nothing else is left."""
    with_deleted = tmp_path / "work"
    keeper = DirectoryKeeper(tmp_path / "run")
    for step in range(1, 6):
        written = write(with_deleted / f"checkpoint-{step}", f"step {step}")
        keeper.add(written, step=step, metrics={"loss": 1 / step, "picture": object()})
        shutil.rmtree(written)
    keeper.wait()
    assert [(one.step, one.metrics) for one in keeper.checkpoints()] == [
        (5, {"loss": 0.2}), (4, {"loss": 0.25}), (3, {"loss": 1 / 3})
    ]  # fmt: skip
    found = Path(keeper.latest() or "")
    assert (found / "weights.bin").read_text() == "step 5"
    assert (found / "inner" / "more.bin").read_text() == "more step 5"
    assert os.listdir(with_deleted) == []
    keeper.close()


def test_best_and_late_metrics(tmp_path: Path) -> None:
    """Retention ranks by a metric, also by one that comes after the checkpoint."""
    keeper = DirectoryKeeper(tmp_path / "run", keep=Keep(last=1, best=1, metric="loss"))
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        keeper.add(write(tmp_path / f"c{step}"), step=step)
        keeper.report(step, {"loss": loss})
    keeper.close()
    best = keeper.best()
    assert best is not None
    assert best.step == 2
    assert [one.step for one in keeper.checkpoints()] == [3, 2]
    assert sorted(os.listdir(tmp_path)) == ["c1", "c2", "c3", "run"]


def test_metrics_of_another_training(tmp_path: Path) -> None:
    """An evaluation in a second training is not bound to what the first one saved at the same step."""
    keeper = DirectoryKeeper(tmp_path / "run")
    keeper.add(write(tmp_path / "c1"), step=1)
    keeper.begin()
    keeper.report(1, {"loss": 0.5})
    keeper.add(write(tmp_path / "c2"), step=2)
    keeper.report(2, {"loss": 0.3})
    keeper.close()
    assert [one.metrics for one in keeper.checkpoints()] == [{"loss": 0.3}, {}]


def test_damaged_newest_is_set_aside(tmp_path: Path) -> None:
    """`latest` checks every byte: a damaged checkpoint is set aside and the one before taken; with none it raises.

    So does `directory_of`, but for a step that has no sound one it gives nothing.
    """
    keeper = DirectoryKeeper(tmp_path / "run")
    for step in (1, 2):
        keeper.add(write(tmp_path / f"c{step}", f"{step}"), step=step)
    assert keeper.directory_of(2) == str(tmp_path / "run" / "step_00000002")
    assert keeper.directory_of(2, wanted=False) is None
    keeper.close()
    rot(tmp_path / "run" / "step_00000002")
    again = DirectoryKeeper(tmp_path / "run")
    assert [os.path.basename(again.directory_of(step) or "") for step in (1, 2, 3)] == ["step_00000001", "", ""]
    assert os.path.basename(again.latest() or "") == "step_00000001"
    again.close()
    rot(tmp_path / "run" / "step_00000001")
    last = DirectoryKeeper(tmp_path / "run")
    with pytest.raises(CorruptCheckpointError, match="none of them is good"):
        last.latest()
    last.close()


def rot(folder: Path) -> None:
    path = folder / "weights.bin"
    path.write_text("x" * len(path.read_text()))


def test_remote_is_downloaded_once(tmp_path: Path) -> None:
    """Of a remote run a local copy comes back, which stays until `close`."""
    keeper = DirectoryKeeper("memory://keeper/run")
    assert keeper.latest() is None
    keeper.add(write(tmp_path / "c1"), step=1)
    first, second = keeper.latest(), keeper.latest()
    assert first is not None
    assert first == second
    assert (Path(first) / "weights.bin").read_text() == "first"
    keeper.close()
    assert not os.path.exists(first)


@pytest.mark.parametrize("on_full", ["skip", "raise"])
def test_full_disk(tmp_path: Path, on_full: str, caplog: pytest.LogCaptureFixture) -> None:
    """A full storage is said and training goes on, or raised where that was asked for; another failure is raised."""
    keeper = DirectoryKeeper(tmp_path / "run", on_full=on_full)
    keeper.storage = FaultyStorage(tmp_path / "run", disk_bytes=40_000)
    keeper.add(write(tmp_path / "c1", "x" * 100_000), step=1)
    if on_full == "raise":
        with pytest.raises(StorageFullError):
            keeper.wait()
    else:
        keeper.wait()
        assert "c1 was NOT kept, the storage is full" in caplog.text
    keeper.add(write(tmp_path / "c2"), step=2)
    keeper.wait()
    assert [one.step for one in keeper.checkpoints()] == [2]
    keeper.close()


def test_the_tenth_in_a_row_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who keeps nothing ten times trains for nothing; one that was kept in between starts the count anew."""
    keeper = DirectoryKeeper(tmp_path / "run")
    keeper.storage = FaultyStorage(tmp_path / "run", disk_bytes=40_000)
    big = write(tmp_path / "big", "x" * 100_000)
    for step in (1, 2, *range(4, 13)):
        if step == 4:
            keeper.add(write(tmp_path / "small"), step=3)
        keeper.add(big, step=step)
        keeper.wait()
    assert caplog.text.count("was NOT kept, the storage is full") == 11
    keeper.add(big, step=13)
    with pytest.raises(StorageFullError):
        keeper.wait()
    keeper.close()
    assert [one.step for one in DirectoryKeeper(tmp_path / "run").checkpoints()] == [3]


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    """Nothing there, and a wrong argument, are said at once."""
    keeper = DirectoryKeeper(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="never written"):
        keeper.add(tmp_path / "nothing", step=1)
    keeper.close()
    for wrong in ({"on_full": "never"}, {"timeout_s": 0}, {"keep": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DirectoryKeeper(tmp_path / "run", **wrong)  # type: ignore[arg-type]


def test_killed_trainer(tmp_path: Path) -> None:
    """A trainer killed right after `add` has its checkpoint committed; the next start removes what it staged."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal
            from holdfast.integrations import DirectoryKeeper

            keeper = DirectoryKeeper("run")
            print(keeper.latest())
            for step in (1, 2):
                written = pathlib.Path(f"work/checkpoint-{step}")
                written.mkdir(parents=True)
                (written / "weights.bin").write_bytes(bytes([step]) * (8 << 20))
                keeper.add(written, step=step)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, check=False, timeout=60
    )
    assert done.returncode == -9
    keeper = DirectoryKeeper(tmp_path / "run")
    found = keeper.latest()
    assert found is not None
    assert (Path(found) / "weights.bin").read_bytes() == bytes([2]) * (8 << 20)
    shutil.rmtree(tmp_path / "work" / "checkpoint-2")
    keeper.add(write(tmp_path / "work" / "checkpoint-3"), step=3)
    keeper.close()
    assert not [name for name in os.listdir(tmp_path / "work") if name.startswith(STAGED)]
    assert [one.step for one in keeper.checkpoints()] == [3, 2, 1]
