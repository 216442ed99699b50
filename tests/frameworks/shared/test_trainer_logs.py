"""What the log of a `transformers.Trainer` says about a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.frameworks.huggingface import misaligned, missing_metric, saved_metrics, trial_of, written

HISTORY: list[dict[str, Any]] = [
    {"loss": 3.0, "learning_rate": 0.1, "epoch": 0.5, "step": 10},
    {"eval_loss": 2.5, "eval_runtime": 0.1, "epoch": 0.5, "step": 10},
    {"loss": 2.0, "learning_rate": 0.1, "epoch": 0.9, "step": 18},
    {"eval_accuracy": 0.5, "total_flos": 1e9, "epoch": 1.0, "step": 20},
]


def test_metrics_of_a_step() -> None:
    """The newest training log and everything of the step itself; no evaluation of other weights."""
    assert saved_metrics(HISTORY, step=20, epoch=1.0) == {
        "loss": 2.0, "learning_rate": 0.1, "eval_accuracy": 0.5, "epoch": 1.0, "step": 20,
    }  # fmt: skip
    assert saved_metrics([], step=3, epoch=None) == {"step": 3}


def test_missing_metric() -> None:
    """What is missing, when it was last there, and what to do."""
    metrics = saved_metrics(HISTORY, step=20, epoch=1.0)
    assert missing_metric(None, metrics, HISTORY) is None
    assert missing_metric("loss", metrics, HISTORY) is None
    said = missing_metric("eval_loss", metrics, HISTORY)
    assert said is not None
    assert "step 20 has no 'eval_loss'" in said
    assert "last logged at step 10" in said
    assert "never logged" in (missing_metric("f1", metrics, HISTORY) or "")


@pytest.mark.parametrize(
    ("told", "metric", "said"),
    [
        ({"save_strategy": "no"}, None, "nothing will ever be saved"),
        ({"save_only_model": True}, None, "cannot go on from them"),
        ({"eval_strategy": "no"}, "eval_loss", "eval_strategy='no'"),
        ({"eval_strategy": "epoch"}, "eval_loss", "one strategy for both"),
        ({"save_steps": 5}, "eval_loss", "save_steps=5 is no multiple of eval_steps=2"),
        ({"save_steps": 4}, "eval_loss", None),
        ({"save_steps": 5}, "loss", None),
        ({"save_strategy": "best", "save_steps": 5}, "eval_loss", None),
    ],
)
def test_settings(told: dict[str, Any], metric: str | None, said: str | None) -> None:
    """Settings under which checkpoints are not made, ranked or resumed from are named, others pass."""
    values = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "save_only_model": False, **told}
    found = misaligned(SimpleNamespace(**values), metric=metric, save_steps=values["save_steps"], eval_steps=2)
    assert [said in one for one in found] == ([] if said is None else [True])


def test_where_a_trial_saves(tmp_path: Path) -> None:
    """In a search the directory just written is the trial's, which has the name given to it, or the newest files."""
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=2, is_hyper_param_search=False, trial_name=None)
    assert written(args, state) == str(tmp_path / "checkpoint-2")
    assert trial_of(args, state, written(args, state)) == {}
    state.is_hyper_param_search = True
    for name in ("run-1", "run-0"):  # an earlier search has left these, run-0 last; run-1 is written again
        (tmp_path / name / "checkpoint-2").mkdir(parents=True)
        (tmp_path / name / "checkpoint-2" / "rng_state.pth").touch()
    again = tmp_path / "run-1" / "checkpoint-2" / "rng_state.pth"
    os.utime(again, ns=(0, (tmp_path / "run-0" / "checkpoint-2").stat().st_mtime_ns + 1_000_000))
    assert trial_of(args, state, written(args, state)) == {"trial": "run-1"}
    state.trial_name = "lr-3"
    assert written(args, state) == str(tmp_path / "lr-3" / "checkpoint-2")
