"""Functions hear of committed checkpoints, and can neither hold nor fail a training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.checkpointer.announce import Announcer


def test_told_of_each_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every listener hears of every checkpoint in order, with its digest, though another one fails each time."""
    told: list[tuple[int | None, str | None]] = []

    def fails(checkpoint: hf.Checkpoint) -> None:
        raise OSError("the server is away")

    listeners = [fails, lambda one: told.append((one.step, one.digest))]
    with hf.Checkpointer(tmp_path, {"w": torch.ones(1)}, every=2, on_commit=listeners) as ck:
        for _ in range(5):
            ck.step()
    assert [step for step, _ in told] == [2, 4, 5]
    assert told[-1][1] == ck.checkpoints()[0].digest
    assert str(told[-1][1]).startswith("xxh3:")
    assert caplog.text.count("OSError: the server is away") == 3


def test_a_listener_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps and saves go on while a listener does not come back; leaving waits for it no longer than the bound."""
    release = threading.Event()
    announcer = Announcer([lambda checkpoint: release.wait(60)])
    checkpoint = hf.save(tmp_path / "one", {"w": torch.ones(1)})
    announcer.tell(checkpoint)
    announcer.close(timeout_s=0.05)
    release.set()
    assert "did not take note of all checkpoints" in caplog.text


def test_removed_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that retention removed before its turn came is no error."""
    announcer = Announcer([lambda checkpoint: checkpoint.step])
    announcer.tell(hf.Checkpoint(tmp_path / "gone"))
    announcer.close(timeout_s=10)
    assert not caplog.records


def test_what_cannot_be_called(tmp_path: Path) -> None:
    """A wrong argument is said at once."""
    with pytest.raises(hf.ConfigError, match="on_commit"):
        hf.Checkpointer(tmp_path, {}, on_commit=[1])  # type: ignore[list-item]


def test_digest_of_foreign_files(tmp_path: Path) -> None:
    """What is not Holdfast's has no digest."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x").write_text("x")
    assert hf.Checkpoint(tmp_path / "foreign").digest is None
