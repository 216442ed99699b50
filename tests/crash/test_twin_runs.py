"""A killed and resumed training equals an uninterrupted one bit by bit, and `verify_resume` names what is missing."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch
import twin_training

from holdfast.checkpointer import progress
from holdfast.state.load import restore
from holdfast.state.tree import rng
from holdfast.testing import ResumeDivergedError, verify_resume

KILLS = (3, 7, 9, 14)


@pytest.mark.parametrize("workers", [0, 2])
def test_full_state_is_bitwise_equal(tmp_path, workers):
    """AdamW, cosine, dropout, BatchNorm, EMA, scaler, accumulation, augmentation: four kills change nothing."""
    report = verify_resume(partial(twin_training.train, workers=workers), kill_after=KILLS, keep_in=tmp_path)
    assert report.steps == 18
    assert report.lives == ((0, 3), (0, 7), (4, 9), (8, 14), (12, None))
    assert report.items > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_kills(tmp_path, seed):
    """Any choice of steps to die after gives the same."""
    report = verify_resume(
        partial(twin_training.train, every=1 + seed % 3, workers=2 * (seed % 2)), kills=5, seed=seed, keep_in=tmp_path
    )
    assert len(report.lives) == 6  # five of them killed
    assert (report.steps, report.items > 50) == (18, True)


def test_a_script(tmp_path):
    """A script without a main guard is run with its arguments, and killed alike."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch
            import holdfast as hf
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with hf.Checkpointer(sys.argv[2], {"model": model, "optimizer": optimizer}, every=2) as ck:
                while ck.global_step < 8:
                    loss = model(torch.randn(4, 3)).pow(2).mean()
                    loss.backward(); optimizer.step(); optimizer.zero_grad()
                    ck.step(loss=loss)
            """
        )
    )
    report = verify_resume(script, args=["--out", "{run}"], kills=2, keep_in=tmp_path / "runs")
    assert report.steps == 8
    assert len(report.lives) == 3


# ---- mutations: each drops one item; the twin must fail and name it


def skip(names):
    def apply(_):
        original = restore.load_state
        restore.load_state = lambda storage, into, fit, **options: original(
            storage, into, replace(fit, skip=names, strict=False), **options
        )

    return apply


def without_rng(name):
    def apply(_):
        original = rng.restore
        rng.restore = lambda state: original({key: value for key, value in state.items() if key != name})

    return apply


def without_progress(**values):
    def apply(_):
        original = progress.Progress.load_state_dict
        progress.Progress.load_state_dict = lambda self, state: original(self, {**state, **values})

    return apply


def without_running_mean(state):
    model = state["model"]
    model.register_load_state_dict_post_hook(lambda module, _: module.norm.running_mean.zero_())


def frozen_scaler(state):
    type(state["scaler"]).load_state_dict = lambda self, _: None


def frozen_counters(state):
    type(state["counters"]).load_state_dict = lambda self, _: None


MUTATIONS = {
    "model": (skip("model"), "model/"),
    "one parameter": (skip("model/last.bias"), "model/last.bias"),
    "a buffer": (skip("model/norm.running_mean"), "model/norm.running_mean"),
    "optimizer": (skip("optimizer"), "optimizer/"),
    "scheduler": (skip("scheduler"), "scheduler/"),
    "ema": (skip("ema"), "ema/"),
    "scaler": (frozen_scaler, "scaler/"),
    "user counters": (frozen_counters, "counters/"),
    "python generator": (without_rng("python"), "holdfast/rng/python"),
    "numpy generator": (without_rng("numpy"), "holdfast/rng/numpy"),
    "torch generator": (without_rng("torch"), "holdfast/rng/torch"),
    "data position": (without_progress(positions={}), "holdfast/progress/positions"),
    "step": (without_progress(step=1), "holdfast/progress/step"),
    "epoch": (without_progress(epoch=0), "holdfast/progress/epoch"),
    "data seed": (without_progress(seed=99), "holdfast/progress/seed"),
}


# One of each way to drop one; that each item is restored, and by name, is shown by tests of its own.
QUICK = {"one parameter", "scaler", "user counters", "torch generator", "data position", "epoch"}


@pytest.mark.parametrize(
    "what", [what if what in QUICK else pytest.param(what, marks=pytest.mark.slow) for what in MUTATIONS]
)
def test_a_dropped_item_is_named(tmp_path, what):
    """Whatever single item is not restored: the twin run fails and names exactly it."""
    adjust, expected = MUTATIONS[what]
    with pytest.raises(ResumeDivergedError) as caught:
        # Killed after step 5, so resumed at 4: in the second of three epochs.
        verify_resume(partial(twin_training.train, size=24, every=2, adjust=adjust), kill_after=[5], keep_in=tmp_path)
    named = [path for path in caught.value.items if path.startswith(expected)]
    assert named, str(caught.value)
    assert expected.rstrip("/") in str(caught.value)
    assert caught.value.at_resume
    assert len(named) == len(caught.value.items), "nothing else differs right after the resume"


HIDDEN = torch.Generator().manual_seed(5)


def hidden_state(model, generator=HIDDEN):
    with torch.no_grad():
        model.last.bias.add_(torch.randn(1, generator=generator), alpha=1e-3)


def test_state_outside_of_the_state_is_suspected(tmp_path):
    """A generator that is not saved: everything was restored, yet the twins part, and the text says why."""
    with pytest.raises(ResumeDivergedError, match="NOT in the state") as caught:
        verify_resume(partial(twin_training.train, extra=hidden_state), kill_after=[9], keep_in=tmp_path)
    assert not caught.value.at_resume
    assert caught.value.step == 9
    assert any(path.startswith("model/") for path in caught.value.items)
