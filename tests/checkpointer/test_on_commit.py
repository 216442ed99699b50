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
    """A file that retention removed before a listener read it is said in a sentence, without a traceback."""
    announcer = Announcer([lambda checkpoint: checkpoint.step])
    announcer.tell(hf.Checkpoint(tmp_path / "gone"))
    announcer.close(timeout_s=10)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "was removed before test_removed_meanwhile" in record.getMessage()


def test_known_without_reading(tmp_path: Path) -> None:
    """Under Keep(last=1) all checkpoints are told with step, metrics and digest, though two are gone by then."""
    go, told, digests = threading.Event(), [], []

    def listener(checkpoint: hf.Checkpoint) -> None:
        assert go.wait(60)
        told.append((checkpoint.step, checkpoint.metrics, checkpoint.digest, Path(checkpoint.uri).exists()))

    with hf.Checkpointer(tmp_path, {"w": torch.ones(1)}, every=1, keep=hf.Keep(last=1), on_commit=listener) as ck:
        for step in range(1, 4):
            ck.step(loss=torch.tensor(1 / step))
            ck.wait()
            digests.append(ck.checkpoints()[0].digest)
        go.set()
    expected = [(s, {"loss": pytest.approx(1 / s)}, digests[s - 1], s == 3) for s in (1, 2, 3)]
    assert told == expected


def test_what_cannot_be_called(tmp_path: Path) -> None:
    """A wrong argument is said at once."""
    with pytest.raises(hf.ConfigError, match="on_commit"):
        hf.Checkpointer(tmp_path, {}, on_commit=[1])  # type: ignore[list-item]
    with pytest.raises(hf.ConfigError, match=r"on_commit=5: give a function"):
        hf.Checkpointer(tmp_path, {}, on_commit=5)  # type: ignore[arg-type]


def test_digest_of_foreign_files(tmp_path: Path) -> None:
    """What is not Holdfast's has no digest."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x").write_text("x")
    assert hf.Checkpoint(tmp_path / "foreign").digest is None
