"""What the body does after its last step was saved: the run ends with a checkpoint that has it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch

import holdfast as hf


def swap_data(state: dict[str, Any]) -> None:
    """As averaged weights are brought into a model before it is exported: torch counts no version for it."""
    for parameter in state["model"].parameters():
        parameter.data.copy_(torch.full_like(parameter, 7.0))


def append(state: dict[str, Any]) -> None:
    state["history"].append(0.5)


def add(state: dict[str, Any]) -> None:
    state["final"] = {"accuracy": 0.5}


def nothing(state: dict[str, Any]) -> None:
    """Draw random numbers, as an evaluation does, and put weights away and back."""
    kept = state["model"].state_dict()
    swap = {name: value.clone() for name, value in kept.items()}
    torch.randn(3)
    state["model"].load_state_dict(swap)


def run(path: Path, last: Any, *, steps: int = 4, by_epochs: bool = True, **options: Any) -> dict[str, Any]:
    """Four steps, saved every second one, and then something that is no step."""
    state = {**kit.make_state(), "history": [1.0], "table": torch.arange(1 << 20)}  # goes through windows of 2 MiB
    with hf.Checkpointer(path, state, every=2, keep=None, **options) as ck:
        if by_epochs:
            for _ in ck.epochs(steps // 4):
                for batch in ck.batches(kit.loader()):
                    ck.step(loss=kit.train_one(state, batch))
        while ck.global_step < steps:
            ck.step(loss=kit.train_one(state))
        last(state)
    return state


@pytest.mark.parametrize("by_epochs", [True, False])
@pytest.mark.parametrize("last", [swap_data, append, add])
@pytest.mark.parametrize("options", [{}, {"max_staging_bytes": "2MiB"}, {"rescue": 1}], ids=["", "small", "rescue"])
def test_what_comes_after_the_last_saved_step_is_in_the_newest_checkpoint(
    last: Any, by_epochs: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Averaged weights, a result, a line of history; metrics of the step belong to that checkpoint too."""
    state = run(tmp_path, last, by_epochs=by_epochs, **options)
    newest, *older = (hf.Checkpoint(tmp_path / name) for name in kit.names(tmp_path))
    assert [one.step for one in (newest, *older)] == [4, 4, 2]
    found = hf.load(newest)
    assert found["history"] == state["history"]
    assert found.get("final") == state.get("final")
    assert all(torch.equal(found["model"][name], value) for name, value in state["model"].state_dict().items())
    assert newest.metrics == older[0].metrics
    assert newest.metrics.keys() == {"loss"}


@pytest.mark.parametrize("by_epochs", [True, False])
def test_a_run_that_changes_nothing_after_its_last_save_saves_no_more(by_epochs: bool, tmp_path: Path) -> None:
    """Neither random numbers nor the count of epochs are a change; a further start of the run saves nothing either."""
    for _ in range(2):
        run(tmp_path, nothing, by_epochs=by_epochs)
        assert kit.steps(tmp_path) == [2, 4]


def test_a_start_that_only_does_what_was_cut_off_saves_it(tmp_path: Path) -> None:
    """A life that died between the last save and the end of the body; the next one makes no step."""

    def die(state: dict[str, Any]) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run(tmp_path, die)
    state = run(tmp_path, append)
    assert hf.load(tmp_path)["history"] == state["history"] == [1.0, 0.5]
    run(tmp_path, nothing)
    assert kit.steps(tmp_path) == [2, 4, 4]


def test_a_run_that_is_stopped_leaves_the_rest_to_the_next_start(tmp_path: Path) -> None:
    """Half of an evaluation is no state to go on from: the step is, and what follows it is done again."""

    def stopped(state: dict[str, Any]) -> None:
        state["history"].append(9.0)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path, stopped)
    assert kit.steps(tmp_path) == [2, 4]
    assert hf.load(tmp_path)["history"] == [1.0]


@pytest.mark.parametrize(
    "last", [lambda state: state["model"].to("meta"), lambda state: state.update(final=object())], ids=["gone", "odd"]
)
def test_a_state_that_cannot_be_looked_at_any_more_ends_no_run(last: Any, tmp_path: Path, caplog: Any) -> None:
    """The last step is saved: what the body has given away since then is said, and raises nothing."""
    run(tmp_path, last)
    assert [hf.Checkpoint(tmp_path / name).step for name in kit.names(tmp_path)] == [4, 2]
    assert "cannot be looked at any more (UnsupportedStateError" in caplog.text
