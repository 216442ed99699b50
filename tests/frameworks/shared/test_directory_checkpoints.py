"""Directories of frameworks are kept: whatever happens to them afterwards, and to the process that added them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from holdfast import Checkpoint, Keep
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StorageFullError,
    StorageUnavailableError,
)
from holdfast.frameworks.keepers import DirectoryCheckpoints
from holdfast.frameworks.reporting import STAGED
from holdfast.run.names import INCOMING
from holdfast.testing import FaultyStorage


def write(folder: Path, text: str = "first") -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_text(text)
    (folder / "inner" / "more.bin").write_text(f"more {text}")
    return folder


def test_deleted_at_once(tmp_path: Path) -> None:
    """The framework deletes its directory right after `add`: the checkpoint is complete, nothing else is left."""
    with_deleted = tmp_path / "work"
    keeper = DirectoryCheckpoints(tmp_path / "run")
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
    keeper = DirectoryCheckpoints(tmp_path / "run", keep=Keep(last=1, best=1, metric="loss"))
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
    keeper = DirectoryCheckpoints(tmp_path / "run")
    keeper.add(write(tmp_path / "c1"), step=1)
    keeper.begin()
    keeper.report(1, {"loss": 0.5})
    keeper.add(write(tmp_path / "c2"), step=2)
    keeper.report(2, {"loss": 0.3})
    keeper.close()
    assert [one.metrics for one in keeper.checkpoints()] == [{"loss": 0.3}, {}]


def test_another_training_is_another_attempt(tmp_path: Path) -> None:
    """A training that begins anew in the same process keeps its own checkpoints, not those of later steps before it.

    One that goes on from what `latest` gave has this as its start.
    """
    keeper = DirectoryCheckpoints(tmp_path / "run", keep=Keep(last=1))
    for step in (4, 8):
        keeper.add(write(tmp_path / f"first{step}"), step=step)
    keeper.begin()
    keeper.add(write(tmp_path / "second4", "second"), step=4)
    keeper.wait()
    assert [one.step for one in keeper.checkpoints()] == [4]
    newest = Path(keeper.latest() or "")
    assert (newest / "weights.bin").read_text() == "second"
    keeper.begin(step=4)
    keeper.add(write(tmp_path / "third6"), step=6)
    keeper.wait()
    parents = {one.step: one.manifest.parent for one in keeper.checkpoints() if one.manifest is not None}
    keeper.close()
    assert parents.keys() == {6, 4}, "what the run was resumed from stays until there are enough after it"
    manifest = Checkpoint(newest).manifest
    assert manifest is not None
    assert parents[6] == manifest.checkpoint_id


def test_damaged_newest_is_set_aside(tmp_path: Path) -> None:
    """`latest` checks every byte: a damaged checkpoint is set aside and the one before taken; with none it raises.

    So does `directory_of`, but for a step that has no sound one it gives nothing.
    """
    keeper = DirectoryCheckpoints(tmp_path / "run")
    for step in (1, 2):
        keeper.add(write(tmp_path / f"c{step}", f"{step}"), step=step)
    assert keeper.directory_of(2) == str(tmp_path / "run" / "step_00000002")
    assert keeper.directory_of(2, wanted=False) is None
    keeper.close()
    rot(tmp_path / "run" / "step_00000002")
    again = DirectoryCheckpoints(tmp_path / "run")
    assert [os.path.basename(again.directory_of(step) or "") for step in (1, 2, 3)] == ["step_00000001", "", ""]
    assert os.path.basename(again.latest() or "") == "step_00000001"
    again.close()
    rot(tmp_path / "run" / "step_00000001")
    last = DirectoryCheckpoints(tmp_path / "run")
    with pytest.raises(CorruptCheckpointError, match="none of them is good"):
        last.latest()
    last.close()


def rot(folder: Path) -> None:
    path = folder / "weights.bin"
    path.write_text("x" * len(path.read_text()))


def test_remote_is_downloaded_once(tmp_path: Path) -> None:
    """Of a remote run a local copy comes back, which stays until `close`."""
    keeper = DirectoryCheckpoints("memory://keeper/run")
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
    """A full storage is said and training goes on, or raised where that was asked for.

    What comes after a lost one is kept all the same, and its parent is the one before.
    """
    keeper = full_keeper(tmp_path / "run", on_full=on_full)
    keeper.add(write(tmp_path / "c1"), step=1)
    keeper.add(write(tmp_path / "c2", "x" * 100_000), step=2)
    # It waits for the one that was lost, or this is known already.
    with pytest.raises(StorageFullError) if on_full == "raise" else contextlib.nullcontext():
        keeper.add(write(tmp_path / "c3"), step=3)
        keeper.add(write(tmp_path / "c4"), step=4)
    last = write(tmp_path / "c5")
    keeper.add(last, step=5)
    keeper.wait()
    if on_full == "skip":
        told = "the checkpoint of step 2 was NOT kept, the storage is full"
        assert told in caplog.text
        assert f"its files are in {tmp_path / 'c2'}; training goes on" in caplog.text
    ids = {one.step: one.manifest for one in keeper.checkpoints()}
    assert {1, 3, 5} <= {*ids} <= {1, 3, 4, 5}
    assert ids[3].parent == ids[1].checkpoint_id
    keeper.close()


def full_keeper(run: Path, **options: Any) -> DirectoryCheckpoints:
    keeper = DirectoryCheckpoints(run, keep=None, **options)
    keeper.storage = FaultyStorage(run, disk_bytes=40_000)
    return keeper


def test_the_last_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits hears that the newest is lost; what was given away is where the message says, the run is free.

    An error that has ended the training is not replaced.
    """
    with pytest.raises(StorageFullError, match=r"step 2 was NOT kept.*start the same") as told:  # noqa: SIM117
        with full_keeper(tmp_path / "run") as keeper:
            keeper.add(write(tmp_path / "c1"), step=1)
            given = write(tmp_path / "run" / f"{INCOMING}{'0' * 16}" / "new-1")
            keeper.add(given, step=2, move=True, metrics={"what does not fit": "x" * 100_000})
            with pytest.raises(StorageFullError, match=f"its files are in {given}"):
                keeper.wait()
            assert sorted(os.listdir(given)) == ["inner", "weights.bin"]
    left = tmp_path / "run" / "_holdfast-lost-step_00000002"
    assert f"its files are in {left}:" in str(told.value)
    assert (left / "inner" / "more.bin").read_text() == "more first"
    with pytest.raises(ValueError, match="of its own"), full_keeper(tmp_path / "run") as again:
        assert os.path.basename(again.latest() or "") == "step_00000001"
        staged = write(tmp_path / "c3", "x" * 100_000)
        again.add(staged, step=3)
        shutil.rmtree(staged)
        raise ValueError("an end of its own")
    assert f"its files are in {tmp_path / '_holdfast-lost-step_00000003'}: free some space" in caplog.text
    assert (left / "weights.bin").exists()


def test_metrics_of_a_lost_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation of what was lost, or one that a storage does not take, costs itself alone."""
    keeper = full_keeper(tmp_path / "run")
    keeper.add(write(tmp_path / "c1", "x" * 100_000), step=1)
    keeper.report(1, {"loss": 0.5})
    assert "metrics were not bound, the save of their step was lost" in caplog.text
    keeper.add(write(tmp_path / "c2"), step=2)
    keeper.wait()
    keeper._of_step[3] = "step_00000003"  # deleted by somebody
    with pytest.raises(CheckpointNotFoundError):
        keeper.report(3, {"loss": 0.5})
    down: Future[Any] = Future()
    down.set_exception(StorageUnavailableError("no answer"))
    keeper._session.client.run_op = lambda *_, **__: down  # type: ignore[union-attr,method-assign]
    keeper.report(2, {"loss": 0.5})
    assert "metrics of step 2 were not bound, the storage does not answer: no answer" in caplog.text
    keeper._session.saves.on_full = "raise"  # type: ignore[union-attr]
    with pytest.raises(StorageUnavailableError):
        keeper.report(2, {"loss": 0.5})
    del keeper._session.client.run_op  # type: ignore[union-attr]
    keeper.close()


def test_the_tenth_in_a_row_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who keeps nothing ten times trains for nothing; one that was kept in between starts the count anew."""
    keeper = full_keeper(tmp_path / "run")
    big = write(tmp_path / "big", "x" * 100_000)
    for step in range(1, 13):
        keeper.add(write(tmp_path / "small") if step == 3 else big, step=step)
    with pytest.raises(StorageFullError, match=r"step 12 .*start the same"):
        keeper.wait()
    assert caplog.text.count("was NOT kept, the storage is full") == 11
    keeper.add(big, step=13)
    with pytest.raises(StorageFullError, match="10 saves in a row were lost"):
        keeper.wait()
    with pytest.raises(StorageFullError, match="step 13"):
        keeper.close()
    keeper.close()
    assert [one.step for one in DirectoryCheckpoints(tmp_path / "run").checkpoints()] == [3]


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    """Nothing there, and a wrong argument, are said at once."""
    keeper = DirectoryCheckpoints(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="never written"):
        keeper.add(tmp_path / "nothing", step=1)
    keeper.close()
    for wrong in ({"on_full": "never"}, {"timeout_s": 0}, {"keep": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DirectoryCheckpoints(tmp_path / "run", **wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked")
def test_killed_trainer(tmp_path: Path) -> None:
    """A trainer killed right after `add` has its checkpoint committed; the next start removes what it staged."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal
            from holdfast.frameworks.keepers import DirectoryCheckpoints

            keeper = DirectoryCheckpoints("run")
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
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, check=False, timeout=60
    )
    assert done.returncode == -9
    keeper = DirectoryCheckpoints(tmp_path / "run")
    found = keeper.latest()
    assert found is not None
    assert (Path(found) / "weights.bin").read_bytes() == bytes([2]) * (8 << 20)
    shutil.rmtree(tmp_path / "work" / "checkpoint-2")
    keeper.add(write(tmp_path / "work" / "checkpoint-3"), step=3)
    keeper.close()
    assert not [name for name in os.listdir(tmp_path / "work") if name.startswith(STAGED)]
    assert [one.step for one in keeper.checkpoints()] == [3, 2, 1]
