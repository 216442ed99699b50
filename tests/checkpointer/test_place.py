"""Where a save without a run goes: bounds of its waits."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpointer import save_target
from holdfast.checkpointer.save_target import SaveTarget


def test_the_arena_of_a_save_that_is_stuck_is_not_waited_for_without_end(tmp_path, monkeypatch) -> None:
    """One of several ranks whose writer stands still raises; the others hear of it, as of any error of a save."""
    monkeypatch.setattr(save_target, "ANSWER_MARGIN_S", 0.01)
    team: Any = SimpleNamespace(rank=1, timeout_s=0.02)
    client: Any = None
    stuck: Any = SimpleNamespace(future=Future())
    one = SaveTarget(target=hf.Checkpoint(tmp_path / "a"), client=client, save_id="s-1", team=team)
    with pytest.raises(hf.HoldfastError, match="rank 1: the save before this one, whose memory is needed, is not dura"):
        one.wait_for_arena(stuck)
    stuck.future.set_exception(OSError("its own handle tells of it"))
    one.wait_for_arena(stuck)
