"""The block a start prints: one headline, what was restored and what was not, what to expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_kit as kit

from holdfast.checkpointer.block import ResumeBlock


def test_the_block_of_a_resume_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, once: headline, restored entries in words, size and space; nothing on stdout."""
    kit.train(tmp_path, 4)
    capsys.readouterr()
    kit.train(tmp_path, 6)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[:3] == [
        f"holdfast: resumed from {tmp_path}/step_00000004 at step 4, epoch 0 (attempt 2)",
        "  restored      model, optimizer, step, epoch and data position, random generators",
        "  this run had finished (step 4): nothing to do unless more is asked for",
    ]
    assert lines[3].startswith("  one checkpoint takes about 5.2 KiB; ")
    assert lines[3].endswith(" are free")
    assert len(lines) == 4


def test_the_block_of_a_fresh_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate holds the optimizer state that the first step will create."""
    kit.train(tmp_path / "run", 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"holdfast: fresh start: no checkpoint under {tmp_path}/run"
    assert "one checkpoint takes about 5.2 KiB" in lines[1]


def test_long_lists_are_cut() -> None:
    """A hundred entries do not fill the screen: the first ones, and how many more."""
    block = ResumeBlock(
        headline="resumed",
        restored=[f"item{number}" for number in range(100)],
        not_restored=[(f"lost{number}", "why") for number in range(20)],
    )
    lines = block.lines()
    assert len(lines) == 11
    assert lines[1].endswith("item7, ... and 92 more")
    assert lines[2] == "  NOT restored  lost0: why"
    assert lines[-1] == "  NOT restored  ... and 12 more"
