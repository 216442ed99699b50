"""One owner of a run: what every front door gets from it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_kit import catalog_of

import holdfast as hf
from holdfast.checkpointer.pending_saves import RunSave
from holdfast.checkpointer.run_session import RunSession
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage import Storage, resolve
from holdfast.testing import FaultyStorage
from holdfast.writer.messages import IngestSource


def opened(storage: Storage, **options: Any) -> RunSession:
    session = RunSession(storage, **{"timeout_s": 60.0, **options})
    session.open(keep=None)
    return session


def add(session: RunSession, directory: Path, step: int, nbytes: int = 4) -> RunSave:
    directory.mkdir()
    (directory / "weights.bin").write_bytes(b"x" * nbytes)
    save = RunSave(
        step=step, metrics={"loss": 1.0 / step},
        lost=lambda save, error: f"step {save.step} is lost ({error}); training goes on",
    )  # fmt: skip
    sources = [IngestSource(rank=0, path=str(directory))]
    session.save_directory(sources, save, save_id=session.next_save_id(), world_size=1)
    return save


def save(session: RunSession, snapshotter: Snapshotter, step: int) -> None:
    state = {"w": torch.full((3,), float(step))}
    session.save_state(lambda: state, snapshotter, RunSave(step=step, epoch=0))


def end(session: RunSession) -> None:
    session.end("finished")
    session.close("done")


def test_states_and_directories_are_one_line_of_checkpoints(tmp_path: Path) -> None:
    """Each is the parent of the next one, whatever it was made of, also over two lives."""
    storage, snapshotter = resolve(tmp_path / "run"), Snapshotter()
    session = opened(storage)
    save(session, snapshotter, 1)
    session.settle()
    add(session, tmp_path / "a", 2)
    assert (session.saves.last_step, session.saves.last_name, len(session.saves)) == (2, "step_00000002", 1)
    save(session, snapshotter, 3)  # waits for the directory
    session.settle()
    end(session)
    snapshotter.close()
    again = opened(storage)
    assert "step_00000003" in again.names
    again.saves.parent = hf.Checkpoint(tmp_path / "run" / "step_00000003").manifest.checkpoint_id  # type: ignore[union-attr]
    add(again, tmp_path / "b", 3)  # the name is taken
    again.settle()
    end(again)
    found = {one.name: one.manifest for one in hf.Checkpointer(tmp_path / "run").checkpoints()}
    line = ["step_00000001", "step_00000002", "step_00000003", "step_00000003-a2"]
    assert set(found) == set(line)
    for before, after in itertools.pairwise(line):
        assert found[after].parent == found[before].checkpoint_id  # type: ignore[union-attr]


def test_a_run_has_one_owner(tmp_path: Path) -> None:
    """A second session on the run is refused until the first has given it back."""
    storage = resolve(tmp_path / "run")
    first = opened(storage)
    second = RunSession(storage, timeout_s=1.0)
    with pytest.raises(hf.RunBusyError):
        second.open(keep=None)
    assert not second.is_open
    second.close("refused")
    end(first)
    end(opened(storage))


def test_a_lost_save_costs_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its name is free again, it is nobody's parent, what is about it is dropped, and the step before is the last."""
    session = opened(FaultyStorage(tmp_path / "run", disk_bytes=40_000))
    add(session, tmp_path / "a", 1)
    session.settle()
    lost = add(session, tmp_path / "b", 2, nbytes=100_000)
    session.note("metrics", about=lost.name, name=lost.name, metrics={"val": 1.0})
    assert session.saves.last_step == 2
    session.settle()
    session.wait_for_notes()
    assert (session.saves.last_step, session.saves.lost.in_a_row, session.stats.skipped) == (1, 1, 1)
    assert "training goes on (save 1 in a row)" in caplog.text
    assert "metrics were not bound, the save of their step was lost" in caplog.text
    add(session, tmp_path / "c", 2)
    session.settle()
    assert session.saves.lost.in_a_row == 0
    end(session)
    newest, before = catalog_of(tmp_path / "run").records()
    assert (newest.name, before.name) == ("step_00000002", "step_00000001")
    assert hf.Checkpoint(tmp_path / "run" / newest.name).manifest.parent == before.checkpoint_id  # type: ignore[union-attr]


@pytest.mark.parametrize(("on_full", "lost"), [("raise", 1), ("skip", 10)])
def test_lost_saves_in_a_row_end_the_training(tmp_path: Path, on_full: str, lost: int) -> None:
    """With "raise" the first, with "skip" the tenth."""
    session = opened(FaultyStorage(tmp_path / "run", disk_bytes=20_000), on_full=on_full)
    for step in range(1, lost):
        add(session, tmp_path / f"{step}", step, nbytes=100_000)
        session.settle()
    add(session, tmp_path / "last", lost, nbytes=100_000)
    with pytest.raises(hf.StorageFullError):
        session.settle()
    assert session.saves.lost.total == lost
    end(session)


def test_closing_twice_and_without_a_run(tmp_path: Path) -> None:
    """A session that never opened its run can be closed, and one that was closed can be closed again."""
    session = RunSession(resolve(tmp_path / "run"), timeout_s=60.0)
    session.end("nothing was opened")
    session.close("done")
    session.close("done")
    assert session.client.closed
    assert not (tmp_path / "run" / "lease.json").exists()
