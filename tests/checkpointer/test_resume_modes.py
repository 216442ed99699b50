"""What a run goes on from: by itself, by order, by name; branches, lineage, pins, and retention right after."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_kit as kit
import torch
from catalog_kit import index_of

import holdfast as hf


def parents(path: Path) -> dict[str, str | None]:
    """Name of each checkpoint -> name of the one before it."""
    found = {name: hf.Checkpoint(path / name).manifest for name in kit.names(path)}
    by_id = {manifest.checkpoint_id: name for name, manifest in found.items()}
    return {name: by_id.get(manifest.parent or "", manifest.parent) for name, manifest in found.items()}


def test_parents_form_a_line_through_all_lives(tmp_path: Path) -> None:
    """Each checkpoint names the one saved or resumed from before it."""
    kit.train(tmp_path, 4)
    kit.train(tmp_path, 6)
    assert parents(tmp_path) == {
        "step_00000002": None, "step_00000004": "step_00000002", "step_00000006": "step_00000004",
    }  # fmt: skip


def test_an_older_step_starts_a_branch_that_is_the_newest(tmp_path: Path) -> None:
    """Resuming from step 2 of 8 writes steps again under names of their own, and is what the next start finds."""
    kit.train(tmp_path, 8)
    ck = kit.train(tmp_path, 4, resume=tmp_path / "step_00000002")
    assert ck.resumed_from == hf.Checkpoint(tmp_path / "step_00000002")
    assert kit.names(tmp_path)[0] == "step_00000004-a2"
    assert parents(tmp_path)["step_00000004-a2"] == "step_00000002"
    ck = kit.train(tmp_path, 6)
    assert ck.resumed_from == hf.Checkpoint(tmp_path / "step_00000004-a2")
    assert kit.names(tmp_path)[:2] == ["step_00000006-a3", "step_00000004-a2"]
    assert index_of(ck.storage).attempts[-1].resumed_from == {
        "name": "step_00000004-a2", "step": 4, "attempt": 2,
    }  # fmt: skip


def test_a_third_branch_from_one_step_gets_names_of_its_own(tmp_path: Path) -> None:
    """Branching twice from the same step never writes into a directory that is there."""
    kit.train(tmp_path, 4)
    for _ in range(2):
        kit.train(tmp_path, 4, resume=tmp_path / "step_00000002")
    assert sorted(kit.names(tmp_path)) == ["step_00000002", "step_00000004", "step_00000004-a2", "step_00000004-a3"]
    assert all(hf.Checkpoint(tmp_path / name).verify().ok for name in kit.names(tmp_path))


def test_never_starts_at_zero_and_leaves_the_old_ones(tmp_path: Path) -> None:
    """resume="never" in a used directory: step 0, no parent, the newest from then on."""
    kit.train(tmp_path, 4)
    ck = kit.train(tmp_path, 2, resume="never")
    assert ck.resumed_from is None
    assert kit.names(tmp_path)[0] == "step_00000002-a2"
    assert parents(tmp_path)["step_00000002-a2"] is None
    assert kit.train(tmp_path, 2).resumed_from.name == "step_00000002-a2"


@pytest.mark.parametrize("spelling", ["path", "uri", "checkpoint", "text"])
def test_a_checkpoint_of_another_run_can_be_the_start(spelling: str, tmp_path: Path) -> None:
    """Step, weights and lineage come from there; the other run is not written to; the next start goes on here."""
    state = kit.make_state()
    kit.train(tmp_path / "base", 4, state=state)
    found = tmp_path / "base" / "step_00000004"
    before = {file: file.read_bytes() for file in found.rglob("*") if file.is_file()}
    resume = {"path": found, "uri": f"file://{found}", "checkpoint": hf.Checkpoint(found), "text": str(found)}[spelling]
    mine = kit.make_state(seed=8)
    with hf.Checkpointer(tmp_path / "mine", mine, every=1, keep=hf.Keep(last=1), resume=resume) as ck:
        assert ck.global_step == 4
        assert ck.resumed_from == hf.Checkpoint(found)
        assert all(torch.equal(one, two) for one, two in zip(kit.weights(state), kit.weights(mine), strict=True))
        ck.step()
        ck.step()
    assert kit.steps(tmp_path / "mine") == [6]
    assert {file: file.read_bytes() for file in found.rglob("*") if file.is_file()} == before
    attempt = index_of(tmp_path / "mine").attempts[-1]
    assert attempt.resumed_from["name"] == str(found)
    assert kit.train(tmp_path / "mine", 6).resumed_from.step == 6


def test_an_outside_start_is_saved_here_even_without_a_step(tmp_path: Path) -> None:
    """The run has a checkpoint of its own after it was started from elsewhere: the base may go away."""
    kit.train(tmp_path / "base", 4)
    kit.train(tmp_path / "mine", 4, resume=tmp_path / "base" / "step_00000004")
    assert kit.steps(tmp_path / "mine") == [4]


def test_a_plain_save_can_be_the_start_and_what_it_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hf.save knows no data position and no generators: its step is taken over, the rest is listed as NOT restored."""
    state = kit.make_state()
    hf.save(tmp_path / "plain", state, step=40)
    capsys.readouterr()
    with hf.Checkpointer(tmp_path / "run", kit.make_state(seed=2), resume=tmp_path / "plain", every=None) as ck:
        assert ck.global_step == 40
    said = capsys.readouterr().err
    assert "at step 40, epoch 0" in said
    assert "NOT restored" in said
    assert "holdfast" in said.split("NOT restored")[1]


def test_checkpoints_of_others_in_the_root_are_said_and_never_picked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain save in the run's directory is no resume candidate; the fresh start says that it is there."""
    hf.save(tmp_path / "run" / "mine", kit.make_state(), step=9)
    capsys.readouterr()
    kit.train(tmp_path / "run", 2, keep=hf.Keep(last=1))
    assert "not of this run, so not picked (name one with resume=): mine" in capsys.readouterr().err
    assert hf.Checkpoint(tmp_path / "run" / "mine").verify().ok


def test_retention_holds_right_after_a_resume(tmp_path: Path) -> None:
    """last=2 over three lives: never more than two and the one resumed from, whose place is free in the next life."""
    for steps in (3, 5, 6):
        kit.train(tmp_path, steps, every=1, keep=hf.Keep(last=2))
    # 5 was resumed from by the last life and is also one of the last two.
    assert kit.steps(tmp_path) == [5, 6]
    ck = kit.train(tmp_path, 9, every=1, keep=hf.Keep(last=2), resume=tmp_path / "step_00000005")
    assert kit.steps(tmp_path) == [5, 8, 9]
    assert ck.resumed_from.step == 5


def test_a_pin_outlives_retention_until_it_is_taken_back(tmp_path: Path) -> None:
    """Pinned by any process during the run, kept over later lives; unpinned, it goes with the next save."""
    kit.train(tmp_path, 2, every=1, keep=hf.Keep(last=2))
    hf.Checkpoint(tmp_path / "step_00000001").pin()
    kit.train(tmp_path, 5, every=1, keep=hf.Keep(last=1))
    kit.train(tmp_path, 7, every=1, keep=hf.Keep(last=1))
    assert kit.steps(tmp_path) == [1, 5, 7]
    hf.Checkpoint(tmp_path / "step_00000001").unpin()
    kit.train(tmp_path, 8, every=1, keep=hf.Keep(last=1))
    assert kit.steps(tmp_path) == [7, 8]


def test_a_start_that_fails_leaves_the_run_free_for_the_next(tmp_path: Path) -> None:
    """After a refused state the lease is given back, the handlers are ours no more, and the reason is noted."""
    import signal

    kit.train(tmp_path, 2)
    before = signal.getsignal(signal.SIGTERM)
    ck = hf.Checkpointer(tmp_path, {"other": torch.zeros(1)})
    with pytest.raises(hf.StateMismatchError):
        ck.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before
    assert kit.train(tmp_path, 4).global_step == 4
    reasons = [attempt.reason for attempt in index_of(tmp_path).attempts]
    assert reasons == ["finished", "did not start: StateMismatchError", "finished"]
