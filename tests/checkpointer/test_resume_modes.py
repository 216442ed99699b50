"""What a run goes on from: by itself, by order, by name; branches, lineage, pins, and retention right after."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

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


def test_never_under_holdfast_run_says_what_a_death_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each life begins at step 0: that is said with the first one."""
    (tmp_path / "life").mkdir()
    kit.train(tmp_path / "run", 2, resume="never")
    assert "each life begins at step 0" not in capsys.readouterr().err
    monkeypatch.setenv("HOLDFAST_LIFE", str(tmp_path / "life"))
    kit.train(tmp_path / "run", 2)
    assert "each life begins at step 0" not in capsys.readouterr().err
    kit.train(tmp_path / "run", 2, resume="never")
    assert "with resume='never' each life begins at step 0" in capsys.readouterr().err


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


def life(path: Path, until: int, *, dies: bool = False, **options: Any) -> int:
    """Train up to step ``until``, saving every second one; return where it began. One that dies is not finished."""
    begun, state = -1, kit.make_state()
    options = {"every": 2, "keep": hf.Keep(last=3), **options}
    with contextlib.suppress(SystemExit), hf.Checkpointer(path, state, **options) as ck:
        begun = ck.global_step
        while ck.global_step < until:
            ck.step(loss=kit.train_one(state))
        if dies:
            sys.exit("killed")
    return begun


@pytest.mark.parametrize("of", ["a checkpoint", "a run", "one that is gone"])
def test_a_command_that_names_where_to_begin_goes_on_from_its_own_saves_until_it_is_done(
    of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, killed, and started again with the same ``resume=``: no later life begins at the base; it says so."""
    kit.train(tmp_path / "base", 4)
    run, base = tmp_path / "run", tmp_path / "base" / ("" if of == "a run" else "step_00000004")
    with pytest.raises(SystemExit), hf.Checkpointer(run, kit.make_state(), every=None, resume=base) as ck:
        for number in range(20):
            if number == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            ck.step()
    assert "step 9 is saved" in capsys.readouterr().err
    if of == "one that is gone":
        shutil.rmtree(tmp_path / "base")
    assert life(run, 13, dies=True, resume=base) == 9
    said = capsys.readouterr().err
    assert f"resume={str(base)!r} is not used again: this run began there and has got further by itself" in said
    assert life(run, 17, resume=base) == 12
    assert kit.steps(run)[-3:] == [14, 16, 17]
    if of != "one that is gone":
        assert life(run, 6, resume=base) == 4, "the life before was finished"
        said = capsys.readouterr().err
        assert "checkpoint(s) of this run are not used" in said
        assert "the newest one not used is step_00000017" in said


def test_only_what_follows_from_the_named_checkpoint_goes_before_it(tmp_path: Path) -> None:
    """What other starts have saved in between does not; nor does going back to a checkpoint continue what it leaves."""
    run, base = tmp_path / "run", tmp_path / "base"
    kit.train(base, 4)
    old, new = base / "step_00000002", base / "step_00000004"
    assert life(run, 8, dies=True, resume=new) == 4
    assert life(run, 10, dies=True) == 8
    assert life(run, 12, dies=True, resume=new) == 10, "resume='auto' has gone on from there"
    assert life(run, 4, dies=True, resume=old) == 2, "another one is named"
    assert life(run, 6, dies=True, resume=new) == 4
    assert life(run, 2, dies=True, resume="never") == 0
    assert life(run, 6, dies=True, resume=new) == 4, "the newest is of a fresh start"
    newest = run / kit.names(run)[0]
    assert life(run, 5, dies=True, resume=newest) == 6
    assert life(run, 10, dies=True) == 6
    assert life(run, 12, dies=True, resume=newest) == 6, "the life that began there by name has saved nothing"


def test_going_back_in_a_run_is_going_back(tmp_path: Path) -> None:
    """The step that ``resume="auto"`` went on from is named later, because what came of it is not wanted."""
    life(tmp_path, 4, dies=True)
    assert life(tmp_path, 8, dies=True) == 4
    for _ in range(2):
        assert life(tmp_path, 5, dies=True, resume=tmp_path / "step_00000004") == 4, "nothing was saved since"
    assert life(tmp_path, 7, dies=True, resume=tmp_path / "step_00000004") == 4
    assert life(tmp_path, 9, dies=True, resume=tmp_path / "step_00000004") == 6
    assert life(tmp_path, 9, dies=True, resume=tmp_path) == 8, "the run itself is its newest"


def test_what_was_saved_since_and_is_damaged_leads_back_to_the_named_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is good is taken; where none is, the run begins again where it began, and says so."""
    run, base = tmp_path / "run", tmp_path / "base"
    kit.train(base, 4)
    life(run, 9, dies=True, resume=base / "step_00000004")
    kit.flip(run / "step_00000008")
    assert life(run, 7, dies=True, resume=base / "step_00000004") == 6
    assert "begins there again" not in caplog.text
    kit.flip(run / "step_00000006")
    assert life(run, 5, dies=True, resume=base / "step_00000004") == 4
    assert "nothing that the run has saved since it began at" in caplog.text


@pytest.mark.parametrize("every", [None, 4])
def test_a_run_that_begins_at_the_end_of_another_one_says_that_nothing_was_trained(
    every: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Epochs of the base count: asked for as many as it has done, a start trains nothing."""

    def epochs(path: Path, count: int, **options: Any) -> None:
        with hf.Checkpointer(path, kit.make_state(), every=every, **options) as ck:
            for _ in ck.epochs(count):
                for _ in ck.batches(kit.loader()):
                    ck.step()

    epochs(tmp_path / "base", 2)
    epochs(tmp_path / "more", 3, resume=tmp_path / "base" / "step_00000008")
    assert kit.steps(tmp_path / "more")[-1] == 12
    assert "nothing was trained" not in caplog.text
    epochs(tmp_path / "none", 2, resume=tmp_path / "base" / "step_00000008")
    assert "nothing was trained: the checkpoint that resume= names is at step 8, epoch 2" in caplog.text


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
    kit.train(tmp_path, 2)
    before = signal.getsignal(signal.SIGTERM)
    ck = hf.Checkpointer(tmp_path, {"other": torch.zeros(1)})
    with pytest.raises(hf.StateMismatchError):
        ck.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before
    assert kit.train(tmp_path, 4).global_step == 4
    reasons = [attempt.reason for attempt in index_of(tmp_path).attempts]
    assert reasons == ["finished", "did not start: StateMismatchError", "finished"]


@pytest.mark.parametrize(("thaws", "says"), [("once", True), ("each epoch", False), ("never", False)])
def test_layers_that_a_resume_does_not_thaw_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, thaws: str, says: bool
) -> None:
    """`requires_grad` is in no state: what a life before trained and this one does not is said at its first step."""

    def live(num_epochs: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hf.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, every="1ep") as ck:
            for epoch in ck.epochs(num_epochs):
                if thaws != "never" and (epoch == 1 or (thaws == "each epoch" and epoch > 1)):
                    model[0].requires_grad_(True)
                loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
                for batch in ck.batches(loader, name=f"until {num_epochs}"):
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    ck.step()

    live(2)
    caplog.clear()
    live(3)
    assert ("2 parameters are frozen now and were trained" in caplog.text) == says
    assert ("model/0.weight" in caplog.text) == says
    assert "in the middle of epoch" not in caplog.text  # it was saved at the end of one


@pytest.mark.parametrize(("kind", "anew"), [(torch.optim.Adam, True), (torch.optim.SGD, False)])
def test_layers_that_train_again_after_a_resume_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, anew: bool
) -> None:
    """What was frozen at the save and trains now is said at the first step, and that its optimizer state is new."""

    def live(step: int, *, trains: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(trains)
        optimizer = kind(model.parameters(), lr=0.1)
        with hf.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ck:
            while ck.global_step < step:
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ck.step()

    live(2, trains=False)
    live(4, trains=False)
    assert "train now" not in caplog.text
    live(6, trains=True)
    assert caplog.text.count("2 parameters train now and did not when this checkpoint was saved (model/0.weight") == 1
    assert ("optimizer state begins anew" in caplog.text) == anew
    caplog.clear()
    live(8, trains=True)
    assert "train now" not in caplog.text


class Counts(torch.nn.Module):
    """Normalizes by the first batch that it sees, and remembers that it has."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), torch.nan), persistent=persistent)
        self.register_buffer("table", torch.tensor([1.0, torch.nan]), persistent=False)
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Scale."""
        if bool(self.scale.isnan()):
            self.scale = batch.std()
        return batch / self.scale * self.weight * self.table[0]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_training_changes_and_no_state_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, persistent: bool
) -> None:
    """A resume would begin with the one that the script makes anew; constants are not named."""
    model = torch.nn.Sequential(Counts(persistent=persistent))
    with hf.Checkpointer(tmp_path, {"model": model}) as ck:
        for _ in range(3):
            model(torch.randn(4)).sum().backward()
            ck.step()
    assert caplog.text.count("the first step has changed model/0.scale: registered") == (not persistent)
    assert "table" not in caplog.text


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_state_dict_gave_once_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, anew: bool) -> None:
    """Every save would store what it held before the first step; a script that asks anew knows what it does."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "others": [optimizer.state_dict(), scheduler.state_dict()], "kept": optimizer}
    with hf.Checkpointer(tmp_path, state) as ck:
        for _ in range(3):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            if anew:
                ck.state["others"] = [optimizer.state_dict(), scheduler.state_dict()]
            ck.step()
    assert caplog.text.count("others/0, others/1: what state_dict() gave before the first step") == (not anew)
    assert caplog.text.count("what state_dict() gave") == (not anew)
