"""How far a load is, for people: remote checkpoints only, unless somebody asks."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import torch

import holdfast as hf
from holdfast import _progress
from holdfast.checkpointer.load_bar import load_bar
from holdfast.state.load.restore import load_state
from holdfast.storage.resolve import resolve


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_slow_load_of_a_remote_checkpoint_is_shown(tmp_path, monkeypatch) -> None:
    """Bytes of all that is read; a local checkpoint stays silent, one asked for does not."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    times = iter(range(0, 1_000_000, 10))  # each look at the clock is ten seconds later
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    remote, local = f"memory://{tmp_path.name}/c", str(tmp_path / "c")
    for place, show, shown in ((local, None, False), (remote, None, True), (local, True, True), (remote, False, False)):
        hf.save(place, {"w": torch.zeros(3 << 20)}, overwrite=True, ranks="this")
        terminal.seek(0)
        terminal.truncate()
        with load_bar(resolve(place), show=show) as progress:
            loaded = load_state(resolve(place), progress=progress)
        assert loaded.bytes_read >= 12 << 20
        assert ("load c" in terminal.getvalue() and "12.0/12.0 MiB" in terminal.getvalue()) == shown


def test_a_resume_shows_it(tmp_path, monkeypatch) -> None:
    """The Checkpointer uses it for a run on a remote."""
    uri, model = f"memory://{tmp_path.name}/run", torch.nn.Linear(500, 500)
    with hf.Checkpointer(uri, {"model": model}, every=1) as ck:
        ck.step()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("holdfast.checkpointer.load_bar._AFTER_S", -1.0)
    with hf.Checkpointer(uri, {"model": model}, every=None) as ck:
        assert ck.resumed_from is not None
    assert "load step_00000001" in terminal.getvalue()
