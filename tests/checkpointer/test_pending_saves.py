"""How saves are followed at every front door: what a good end, a lost save and a wait without end mean."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.checkpointer.pending_saves import PendingSaves, RunSave, failed
from holdfast.errors import HoldfastError, StorageFullError, StorageUnavailableError


def begin(saves: PendingSaves, step: int, future: Future[Any] | None = None) -> RunSave:
    save = RunSave(
        name=f"s{step}", step=step, checkpoint_id=f"id{step}", future=future or Future(), begun=time.perf_counter(),
        committed=lambda save, result: None, lost=lambda save, error: f"{save.name} is lost",
    )  # fmt: skip
    saves.add(save)
    return save


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def following(**options: Any) -> PendingSaves:
    return PendingSaves("memory://x", **{"timeout_s": 30.0, **options})


def test_a_lost_save_is_nobodys_parent(caplog: pytest.LogCaptureFixture) -> None:
    saves = following()
    saves.parent = "before"
    first = begin(saves, 1)
    begin(saves, 2, failed(StorageFullError("full")))
    assert (saves.last_step, saves.last_name, len(saves), saves.busy) == (2, "s2", 2, True)
    first.future.set_result(None)
    saves.settle()
    assert (saves.parent, saves.last_step, saves.last_name, saves.busy) == ("id1", 1, "s1", False)
    assert saves.is_lost("s2")
    assert not saves.is_lost("s1")
    assert "s2 is lost; training goes on (save 1 in a row)" in caplog.text


def test_a_file_is_no_parent() -> None:
    """It has no id, so the next checkpoint has the parent that it would have had without it."""
    saves = following()
    saves.parent = "before"
    saves.add(replace(begin(following(), 3), checkpoint_id=None, future=done(None)))
    saves.settle()
    assert (saves.parent, saves.last_step) == ("before", 3)


def test_as_many_as_may_be_on_their_way_are_not_waited_for() -> None:
    """What has ended before them is taken in."""
    saves = following(timeout_s=0.0)
    begin(saves, 1, done(None))
    begin(saves, 2)
    begin(saves, 3)
    saves.settle(leave=2)
    assert [len(saves), saves.parent] == [2, "id1"]
    with pytest.raises(HoldfastError, match="step 2 is not durable"):
        saves.settle(leave=1)


def test_the_tenth_lost_save_in_a_row_raises() -> None:
    saves = following()
    for step in range(9):
        begin(saves, step, failed(StorageUnavailableError("down")))
    saves.settle()
    begin(saves, 9).future.set_result(None)
    for step in range(10, 19):
        begin(saves, step, failed(StorageUnavailableError("down")))
    saves.settle()
    assert (saves.lost.total, saves.lost.in_a_row) == (18, 9)
    begin(saves, 19, failed(StorageUnavailableError("down for ever")))
    with pytest.raises(StorageUnavailableError, match="for ever"):
        saves.settle()


def test_other_failures_raise_at_once() -> None:
    saves = following()
    begin(saves, 1, failed(HoldfastError("the writer failed")))
    with pytest.raises(HoldfastError, match="the writer failed"):
        saves.glance()
    assert len(saves) == 0


def test_waits_are_bounded_and_not_repeated() -> None:
    waited: list[float] = []
    saves = following(timeout_s=0.3, bound=" (timeout_s)", held=waited.append)
    save = begin(saves, 7)
    for _ in range(3):
        with pytest.raises(
            HoldfastError, match=r"the save of step 7 is not durable after 0 s \(timeout_s\): memory://x"
        ):
            saves.settle()
    assert waited[0] >= 0.3
    assert sum(waited[1:]) < 0.3  # who closes after that does not wait as long again
    save.future.set_result(None)
    saves.settle()
    assert saves.last_step == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_take_a_failure_in_together(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Between saves a rank takes in good ends alone; the lost save is said once, by rank 0."""
    saves = following(rank=rank)
    begin(saves, 1).future.set_result(None)
    begin(saves, 2, failed(StorageFullError("full")))
    begin(saves, 3).future.set_result(None)
    saves.glance()
    assert (saves.parent, len(saves), saves.lost.total) == ("id1", 2, 0)
    saves.settle(leave=len(saves))
    assert (saves.parent, len(saves), saves.lost.total) == ("id3", 0, 1)
    assert ("s2 is lost" in caplog.text) is (rank == 0)


@pytest.mark.parametrize("on_full", ["skip", "raise"])
def test_a_save_that_is_refused_before_the_writer_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_full: str
) -> None:
    """It costs what any lost save costs."""

    def train() -> hf.Checkpointer:
        with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(4)}, every=1, keep=None, on_full=on_full) as ck:
            ck.step()
            ck.wait()
            with monkeypatch.context() as patched:
                patched.setattr(ck._boundary._snapshotter, "submit", refuse)
                ck.step()
            ck.step()
        return ck

    def refuse(*arguments: Any, **options: Any) -> None:
        raise StorageFullError("no memory is left for the copy")

    if on_full == "raise":
        with pytest.raises(StorageFullError, match="no memory is left"):
            train()
        return
    ck = train()
    assert (ck.stats.skipped, ck.stats.saves) == (1, 2)
    made = {one.name: one.manifest for one in ck.checkpoints()}
    assert list(made) == ["step_00000003", "step_00000001"]
    assert made["step_00000003"].parent == made["step_00000001"].checkpoint_id  # type: ignore[union-attr]
