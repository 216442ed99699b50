"""A disk without room: refused before training, and followed by policy when it fills up later."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast.run.reports import read_history
from holdfast.storage import resolve
from holdfast.testing import FaultyStorage


def test_five_megabytes_free_are_too_few_before_training(tmp_path: Path) -> None:
    """A disk without room for one checkpoint is StorageFullError on entering, with both numbers."""
    storage = FaultyStorage(tmp_path, disk_bytes=5 << 20)
    with (
        pytest.raises(hf.StorageFullError, match=r"has (5\.0|4\.\d) MiB free.*nothing was trained"),
        hf.Checkpointer(storage),
    ):
        raise AssertionError("entered")


def test_the_optimizer_state_to_come_counts_as_needed_space(tmp_path: Path) -> None:
    """Adam will hold two more copies of the parameters: space for the model alone is not enough."""
    model = torch.nn.Linear(1000, 1000)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    with (
        pytest.raises(hf.StorageFullError, match=r"takes about 11\.5 MiB"),
        hf.Checkpointer(FaultyStorage(tmp_path, disk_bytes=22 << 20), state),
    ):
        raise AssertionError("entered")


def test_too_little_room_for_keep_is_a_line_of_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The block that a start prints says it in a line of its own."""
    state = {"w": torch.zeros(1 << 21)}
    with hf.Checkpointer(FaultyStorage(tmp_path, disk_bytes=30 << 20), state, every=None, keep=hf.Keep(last=3)):
        pass
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("  NOT enough for keep=Keep(last=3")], said


def _fill(storage: FaultyStorage, room: int) -> None:
    storage.ops.used_bytes = storage.ops._disk_bytes - room


@pytest.mark.parametrize("policy", ["skip", "wait", "raise"])
def test_a_disk_full_later_follows_the_policy(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Skip trains on, wait holds until there is space, raise raises; the checkpoint before stays whole in all cases."""
    from holdfast.checkpointer import boundaries

    storage = FaultyStorage(tmp_path, ops=_disk(64 << 20))
    state = {"weights": torch.zeros(1 << 18)}
    waits: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # a thread that another test has left: the module is that of all
            return
        waits.append(seconds)
        _fill(storage, 32 << 20)

    monkeypatch.setattr(boundaries.time, "sleep", pause)
    raised = None
    try:
        with hf.Checkpointer(storage, state, every=1, keep=None, on_full=policy) as ck:
            ck.step()
            ck.wait()
            _fill(storage, 1 << 16)
            for _ in range(3):
                state["weights"] += 1
                ck.step()
                if not ck._session.saves.busy:
                    continue
                ck._session.saves._pending[0].future.exception()
            if policy == "skip":
                _fill(storage, 32 << 20)
    except hf.StorageFullError as error:
        raised = error
    assert (raised is not None) == (policy == "raise")
    assert hf.Checkpoint(tmp_path / "step_00000001").verify().ok
    assert bool(waits) == (policy == "wait")
    if policy != "raise":
        assert kit.steps(tmp_path)[-1] == 4
        assert ck.stats.skipped >= 1
        assert "was NOT saved, the storage is full" in caplog.text
        assert ("training is held until it can be saved" in caplog.text) == (policy == "wait")
        assert ("training goes on" in caplog.text) == (policy == "skip")
        assert "were lost, the storage was full" in caplog.text


def test_a_final_step_that_finds_no_space_is_an_error(tmp_path: Path) -> None:
    """With on_full="skip" too: a run whose last step is not safe does not end as if all were well."""
    storage = FaultyStorage(tmp_path, ops=_disk(64 << 20))
    with (
        pytest.raises(hf.StorageFullError, match=r"the final step 2 was NOT saved.*that of step 1"),
        hf.Checkpointer(storage, {"weights": torch.zeros(1 << 18)}, every=None) as ck,
    ):
        ck.step()
        ck.save()
        ck.wait()
        _fill(storage, 1 << 14)
        ck.step()
    assert kit.steps(tmp_path) == [1]


def test_ten_lost_saves_in_a_row_are_an_error(tmp_path: Path) -> None:
    """Who trains on without a place to save to trains for nothing: also with on_full="skip" there is an end."""
    storage = FaultyStorage(tmp_path, ops=_disk(64 << 20))
    with (
        pytest.raises(hf.StorageFullError, match=r"^10 saves in a row were lost, the storage is full.*command again"),
        hf.Checkpointer(storage, {"weights": torch.zeros(1 << 18)}, every=1, keep=None) as ck,
    ):
        ck.step()
        ck.wait()
        _fill(storage, 1 << 14)
        for _ in range(20):
            ck.step()
            ck.wait()
    assert ck.global_step == 11
    assert kit.steps(tmp_path) == [1]


def test_metrics_of_a_full_disk_are_written_later_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full for hours neither fills the log nor costs a metric, also if nothing is reported after it."""
    storage = FaultyStorage(tmp_path, ops=_disk(64 << 20))
    with hf.Checkpointer(storage, {"weights": torch.zeros(1 << 18)}, every=None, keep=None) as ck:
        _fill(storage, 0)
        for step in range(4):
            ck.step(loss=float(step))
            ck.wait()
        _fill(storage, 32 << 20)
    said = [record.message for record in caplog.records if "metrics" in record.message]
    assert len(said) == 1
    assert "metrics wait in the memory of the writer until they can be written, the storage is full" in said[0]
    assert [row["metrics"]["loss"] for row in read_history(resolve(str(tmp_path))).rows] == [0.0, 1.0, 2.0, 3.0]


def test_stricter_rules_make_room_for_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who follows the advice to keep fewer may start: what the new rules do not keep goes before the check."""
    state = {"weights": torch.zeros(1 << 20)}
    with hf.Checkpointer(FaultyStorage(tmp_path), state, every=1, keep=None) as ck:
        for _ in range(6):
            state["weights"] += 1
            ck.step()
    storage = FaultyStorage(tmp_path, ops=_disk(64 << 20))
    _fill(storage, 8 << 20)
    with (
        pytest.raises(hf.StorageFullError, match=r"holdfast prune .* --keep last=1 --yes --now` leaves the newest one"),
        hf.Checkpointer(storage, state, every=1, keep=None),
    ):
        raise AssertionError("entered")
    assert kit.steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    with hf.Checkpointer(storage, state, every=1, keep=hf.Keep(last=2)) as ck:
        assert kit.steps(tmp_path) == [5, 6]
        assert [checkpoint.step for checkpoint in ck.checkpoints()] == [6, 5]
        ck.step()
    assert kit.steps(tmp_path) == [6, 7]
    assert "what keep= does not keep was deleted before the first save" in caplog.text


def _disk(size: int) -> Any:
    from holdfast.testing import FaultyOps

    return FaultyOps(disk_bytes=size)
