"""Saves that stream through windows (``max_staging_bytes``), and a writer that is killed during them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.state.save import windows
from holdfast.writer.client import WriterClient

WINDOWS = 2 << 20  # two of 1 MiB


class Killer:
    """Kills the writer of a run with SIGKILL, once or several times."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.ck: Any = None
        self._killed = 0

    def kill(self) -> None:
        pid = self.ck._session.client.process_id
        if self.times and pid != self._killed:
            self.times, self._killed = self.times - 1, pid
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.ck._session.client.process_id, signal.SIGSTOP)


def train(root: Path, killer: Killer, *, steps: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train ``steps`` steps and save each; returns the states that were saved, by name, and the statistics."""
    state = {"weights": torch.arange(1536 << 10, dtype=torch.float32), "more": torch.zeros(5000), "notes": [0]}
    saved = {}
    with hf.Checkpointer(root, state, every=1, keep=None, max_staging_bytes=WINDOWS) as ck:
        killer.ck = ck
        for step in range(1, steps + 1):
            saved[f"step_{step:08d}"] = {"weights": state["weights"].clone(), "notes": [*state["notes"]]}
            ck.step(loss=float(step))
            if step < steps:  # what comes after the last save would be saved once more
                state["weights"] += 1
                state["notes"].append(step)
    return saved, {"skipped": ck.stats.skipped, "saves": ck.stats.saves}


def check(root: Path, saved: dict[str, Any], *, lost: tuple[str, ...] = ()) -> None:
    for name, expected in saved.items():
        if name in lost:
            assert not (root / name).exists()
            continue
        assert hf.Checkpoint(root / name).verify().ok
        found = hf.load(root / name)
        assert torch.equal(found["weights"], expected["weights"])
        assert found["notes"] == expected["notes"]


@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_a_writer_killed_between_two_windows(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is sent to the next writer from its first window: every step is saved, nothing is lost, none ends."""
    killer, count, copy = Killer(), 0, windows.copy_window

    def copy_window(*args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            killer.kill()
        copy(*args, **options)

    monkeypatch.setattr(windows, "copy_window", copy_window)
    saved, stats = train(tmp_path, killer)
    assert not killer.times
    assert stats == {"skipped": 0, "saves": 3}
    check(tmp_path, saved)


def test_a_writer_killed_before_it_has_read_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state has changed since, so this save is dropped, which is said; the next step is saved, training goes on."""
    killer, seal = Killer(), WriterClient.seal

    def sealed(client: WriterClient, *args: Any, **options: Any) -> None:
        if killer.times:
            killer.stop()
        seal(client, *args, **options)
        killer.kill()

    monkeypatch.setattr(WriterClient, "seal", sealed)
    saved, stats = train(tmp_path, killer)
    assert stats == {"skipped": 1, "saves": 2}
    assert "step 1 was NOT saved: the writer process died" in caplog.text
    check(tmp_path, saved, lost=("step_00000001",))


def test_the_step_that_hears_of_a_dropped_save_is_saved_although_none_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``every`` is far away: what was dropped is made good where that is known, not at the next interval."""
    killer, seal = Killer(), WriterClient.seal

    def sealed(client: WriterClient, *args: Any, **options: Any) -> None:
        if killer.times:
            killer.stop()
        seal(client, *args, **options)
        killer.kill()

    monkeypatch.setattr(WriterClient, "seal", sealed)
    state = {"weights": torch.zeros(1 << 20)}
    with hf.Checkpointer(tmp_path, state, every=5, keep=None, max_staging_bytes=WINDOWS) as ck:
        killer.ck = ck
        for _ in range(5):
            ck.step()
        assert "died" in str(ck._session.saves._pending[0].future.exception())
        ck.step()  # takes it in
        assert ck._session.saves.last_step == 6
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000006"]


def test_a_save_that_was_committed_before_the_writer_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the commit and before the answer: the save counts as what it is, a checkpoint."""
    killer = Killer()
    number: list[int] = []
    submit = WriterClient.submit

    def submitted(client: WriterClient, *args: Any, **options: Any) -> Any:
        future = submit(client, *args, **options)
        number.append(future.number)
        return future

    monkeypatch.setattr(WriterClient, "submit", submitted)
    resolve = hf.writer.conversation.Conversation._resolve

    def resolved(self: Any, answer: Any) -> None:
        if killer.times and number and number[0] in answer.header["calls"]:
            killer.kill()  # and its answer was never sent
            return
        resolve(self, answer)

    monkeypatch.setattr(hf.writer.conversation.Conversation, "_resolve", resolved)
    saved, stats = train(tmp_path, killer)
    assert not killer.times
    assert stats == {"skipped": 0, "saves": 3}
    check(tmp_path, saved)


def test_a_writer_that_dies_twice_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without windows: the second death within ten minutes is no accident, and the first cause is what is raised."""
    killer, copy = Killer(times=2), windows.copy_window

    def copy_window(*args: Any, **options: Any) -> None:
        copy(*args, **options)
        killer.kill()

    monkeypatch.setattr(windows, "copy_window", copy_window)
    with pytest.raises(HoldfastError, match="for the second time in short"):
        train(tmp_path, killer)


def test_the_start_after_two_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sweeps what was half-written and goes on from the newest committed checkpoint."""
    killer, copy = Killer(times=2), windows.copy_window

    def copy_window(*args: Any, **options: Any) -> None:
        copy(*args, **options)
        if killer.ck.global_step == 2:
            killer.kill()

    monkeypatch.setattr(windows, "copy_window", copy_window)
    with pytest.raises(HoldfastError, match="for the second time in short"):
        train(tmp_path, killer)
    fresh = {"weights": torch.zeros(1536 << 10), "more": torch.zeros(5000), "notes": [9]}
    with hf.Checkpointer(tmp_path, fresh, every=None, keep=None) as ck:
        assert ck.resumed_from is not None
        assert ck.global_step == 1
        assert fresh["notes"] == [0]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001"]
