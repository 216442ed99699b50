"""Loops over epochs without batches: an epoch whose steps were made is over, and what follows them belongs to it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import run_kit
import torch

import holdfast as hf


class Stopped(Exception):
    """The end of a life that saves nothing more."""


def life(path: Path, *, steps_an_epoch: int = 1, stop: tuple[int, str] = (0, "")) -> tuple[list[int], dict[str, Any]]:
    """Train six epochs; ``stop`` is (step, "wait", "before", "after", "save" or "end") at which a life is cut off."""
    state = run_kit.make_state(kind=torch.optim.SGD)
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, 0.5)
    entered: list[int] = []
    try:
        with hf.Checkpointer(path, state, every=1) as ck:
            for epoch in ck.epochs(6):
                entered.append(epoch)
                for _ in range(steps_an_epoch):
                    loss = run_kit.train_one(state)
                    if stop == (ck.global_step + 1, "before"):
                        raise Stopped
                    if stop == (ck.global_step + 1, "save"):
                        ck.save()
                    ck.step(loss=loss)
                    if stop == (ck.global_step, "wait"):
                        ck.wait()
                        raise Stopped
                    if stop == (ck.global_step, "save"):
                        raise Stopped
                state["scheduler"].step()
                if stop == (ck.global_step, "end"):
                    raise Stopped
    except Stopped:
        pass
    return entered, {
        "step": ck.global_step,
        "lr": state["scheduler"].get_last_lr(),
        "weights": run_kit.weights(state),
        "epoch": ck.epoch,
    }


@pytest.mark.parametrize(("moment", "steps_an_epoch"), [("before", 1), ("save", 1), ("end", 1), ("before", 2)])
def test_a_full_batch_loop_that_is_cut_off_ends_as_one_that_never_was(
    tmp_path: Path, moment: str, steps_an_epoch: int
) -> None:
    """Weights, learning rate and number of steps are those of one life, wherever in an epoch it stops."""
    _, whole = life(tmp_path / "whole", steps_an_epoch=steps_an_epoch)
    for step in (3, 4):
        # Of several steps an epoch only the last one is a place to go on from.
        life(
            tmp_path / "run", steps_an_epoch=steps_an_epoch, stop=(step * steps_an_epoch + (steps_an_epoch > 1), moment)
        )
    entered, resumed = life(tmp_path / "run", steps_an_epoch=steps_an_epoch)
    assert resumed["step"] == whole["step"] == 6 * steps_an_epoch
    assert resumed["lr"] == whole["lr"]
    assert all(torch.equal(left, right) for left, right in zip(resumed["weights"], whole["weights"], strict=True))
    assert entered[-1] == 5


def test_an_epoch_whose_step_is_durable_is_not_entered_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step that was made durable inside of its epoch counts for the epoch, and the block says so."""
    life(tmp_path / "run", stop=(4, "wait"))
    entered, resumed = life(tmp_path / "run")
    assert (entered, resumed["step"]) == ([4, 5], 6)
    assert "epoch 3 is done: its step was made" in capfd.readouterr().err


def test_a_loop_of_several_steps_an_epoch_goes_on_in_its_epoch(tmp_path: Path) -> None:
    """An epoch with steps still to come is entered again: it is not taken for a full-batch loop."""
    life(tmp_path / "run", steps_an_epoch=3, stop=(5, "wait"))
    entered, _ = life(tmp_path / "run", steps_an_epoch=3)
    assert entered == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("at_head", [True, False])
def test_a_loop_that_asks_at_its_bottom_hears_of_the_step_too_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_head: bool
) -> None:
    """A start of a finished run that trains one more step says where to ask; one that asks at its head is silent."""

    def start() -> int:
        state = run_kit.make_state()
        with hf.Checkpointer(tmp_path / "run", state, every=None) as ck:
            while not at_head or ck.global_step < 3:
                ck.step(loss=run_kit.train_one(state))
                if not at_head and ck.global_step >= 3:
                    break
        return ck.global_step

    with caplog.at_level(logging.WARNING, "holdfast"):
        assert start() == 3
        assert not caplog.records
        assert start() == (3 if at_head else 4)
    assert ["Ask at its head" in record.message for record in caplog.records] == ([] if at_head else [True])
