"""What a run prints: the block of a start, with what was restored and what was not, and the bar of a long load."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_kit as kit
import torch

import holdfast as hf
from holdfast import _progress
from holdfast.checkpointer.console import ResumeBlock, load_bar
from holdfast.state.load.restore import load_state
from holdfast.storage import resolve


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
    assert re.fullmatch(r"  one checkpoint takes about 2\d\.\d KiB; .* are free", lines[3])
    assert len(lines) == 4


def test_the_block_of_a_fresh_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it looked, and what a checkpoint will take."""
    kit.train(tmp_path / "run", 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"holdfast: fresh start: no checkpoint under {tmp_path}/run"
    assert lines[1].startswith("  one checkpoint takes about 2")


def test_long_lists_are_cut() -> None:
    """A hundred entries do not fill the screen: the first ones, and how many more."""
    block = ResumeBlock(
        headline="resumed",
        restored=[f"item{number}" for number in range(100)],
        not_restored=[(f"lost{number}", "why") for number in range(20)],
    )
    lines = block.lines()
    assert len(lines) == 11
    assert lines[1].endswith("item7 and 92 more")
    assert lines[2] == "  NOT restored  lost0: why"
    assert lines[-1] == "  NOT restored  ... and 12 more"


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
    monkeypatch.setattr("holdfast.checkpointer.console._AFTER_S", -1.0)
    with hf.Checkpointer(uri, {"model": model}, every=None) as ck:
        assert ck.resumed_from is not None
    assert "load step_00000001" in terminal.getvalue()


@pytest.mark.parametrize("within", [True, False])
def test_a_run_that_early_stopping_has_finished_says_what_comes_again(
    within: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last epoch is entered again, so that "nothing to do" is not true, unless the loop over batches ends it."""
    num_evaluated = []
    for _ in range(2):
        with hf.Checkpointer(tmp_path, {}, every=None) as ck:
            for epoch in ck.epochs(9):
                for number, _ in ck.enumerate(kit.loader(6)):
                    ck.step()
                    if within and epoch and number == 0:
                        break
                num_evaluated.append(epoch)
                if epoch == 1:
                    break
    said = capsys.readouterr().err
    assert num_evaluated == [0, 1, 1]
    assert ("this run had finished (1 epochs, step 3): nothing to do" in said) == within
    assert ("this run had finished (1 epochs, step 4), at the end of epoch 1, which was left" in said) == (not within)


def scheduled(lr: float, t_max: int, milestones: list[int]) -> dict[str, object]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    inner = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, t_max) for _ in range(2)]
    several = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones)
    step = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    return {"model": model, "optimizer": optimizer, "deep": {"several": [several]}, "step": step}


def test_settings_that_the_script_has_changed_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new learning rate, or length of a schedule, in the script has no effect, and the block says what counts.

    Nothing is said of a rate that a scheduler has moved, and of what is skipped.
    """
    for options in ((0.5, 4, [2]), (0.5, 4, [2]), (0.25, 8, [3])):
        state = scheduled(*options)
        capsys.readouterr()
        with hf.Checkpointer(tmp_path, state, every=None) as ck:
            state["optimizer"].step()
            state["step"].step()
            state["deep"]["several"][0].step()
            ck.step()
        told = [line.strip() for line in capsys.readouterr().err.splitlines() if "what was saved counts" in line]
        if options[0] == 0.5:
            assert told == []
    assert told == [
        "optimizer: lr is 0.5 as saved, 0.25 in the script: what was saved counts, skip='optimizer/param_groups' takes "
        "the script's",
        "deep/several/0: _milestones is (2,) as saved, (3,) in the script: what was saved counts, "
        "skip='deep/several/0/_milestones' takes the script's",
        "deep/several/0: T_max of scheduler 0 is 4 as saved, 8 in the script: what was saved counts",
        "deep/several/0: T_max of scheduler 1 is 4 as saved, 8 in the script: what was saved counts",
        "step: milestones is (2,) as saved, (3,) in the script: what was saved counts, skip='step/milestones' takes "
        "the script's",
    ]
    state = scheduled(0.25, 8, [3])
    skipped = ["optimizer/param_groups", "deep/several/0", "step/milestones"]
    with hf.Checkpointer(tmp_path, state, every=None, skip=skipped):
        assert state["optimizer"].param_groups[0]["initial_lr"] == 0.25
    assert "what was saved counts" not in capsys.readouterr().err
