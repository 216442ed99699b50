"""`HoldfastCallback`: a plain `transformers.Trainer` whose checkpoints are kept."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hf_kit import checkpoints, result, run_script
from object_kit import BUCKET
from safetensors.torch import load_file
from transformers import TrainerCallback

import holdfast as hf
from holdfast.transformers import HoldfastCallback


def steps(uri: str) -> list[int | None]:
    """Steps of the committed checkpoints, all of them sound."""
    found = checkpoints(uri)
    assert all(one.verify().ok for one in found)
    return sorted(one.step for one in found)


def test_killed_in_upload_and_in_a_save(s3: str, tmp_path: Path, undisturbed: Any) -> None:
    """Killed in an upload to S3 (with its writer), then in transformers' own save, a run ends with the same weights.

    It goes on from sound checkpoints only.
    """
    uri = f"s3://{BUCKET}/plain"
    told = {
        "run": uri, "folder": str(tmp_path / "out"), "result": str(tmp_path / "result"),
        "options": {"save_total_limit": 1},
    }  # fmt: skip
    assert run_script("tiny.py", {**told, "kill_after": 4, "kill_writer": True}, endpoint=s3) != 0
    assert set(steps(uri)) <= {2, 4}
    assert run_script("tiny.py", {**told, "kill_in": 6}, endpoint=s3) != 0
    assert (tmp_path / "out" / "checkpoint-6" / "model.safetensors").exists()
    assert steps(uri)
    assert 6 not in steps(uri)
    assert run_script("tiny.py", told, endpoint=s3) == 0
    ended = result(tmp_path / "result")
    assert ended["weights"] == undisturbed
    # The best by eval_loss, which comes first here, and the last; and what the last life went on from.
    assert {2, 8} <= set(steps(uri)) <= {2, 4, 8}
    assert not list((tmp_path / "out").glob(".holdfast*"))


def test_two_ranks(tmp_path: Path, undisturbed_ranks: Any) -> None:
    """Two ranks under torchrun, killed right after a save, end with the weights of ranks that nothing disturbed."""
    told = {"run": str(tmp_path / "run"), "folder": str(tmp_path / "out"), "result": str(tmp_path / "result")}
    assert run_script("tiny.py", {**told, "kill_after": 4}, ranks=2) != 0
    assert run_script("tiny.py", told, ranks=2) == 0
    ended = result(tmp_path / "result")
    assert ended["start"].endswith("step_00000004")
    assert ended["weights"] == undisturbed_ranks
    names = {one.name for one in (tmp_path / "run" / "step_00000008").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "model.safetensors"} <= names


class EvaluateOnceMore(TrainerCallback):
    """Evaluates after the save of a step."""

    trainer: Any = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            self.trainer.evaluate()


def test_metrics_are_those_of_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint has no evaluation of an earlier step, which is said; one after the save is bound to it."""
    late = EvaluateOnceMore()
    callback = HoldfastCallback(tmp_path / "run", keep=hf.Keep(best=2, metric="eval_loss"))
    trainer = tiny.make(tmp_path / "out", [callback, late], eval_steps=4, save_total_limit=1)
    late.trainer = trainer
    with caplog.at_level(logging.WARNING, "holdfast.transformers"):
        assert callback.latest() is None
        trainer.train()
    said = [record.message for record in caplog.records if record.name == "holdfast.transformers"]
    assert "save_steps=2 is no multiple of eval_steps=4" in said[0]
    assert ["step 2" in said[1], "step 6" in said[2], len(said)] == [True, True, 3]
    assert "it was last logged at step 4" in said[2]
    kept = {one.step: one.metrics for one in callback.checkpoints()}
    assert kept.keys() >= {4, 6}  # 8 is worse than both, and stays because it is the last
    assert all("eval_loss" in metrics for metrics in kept.values())
    best = callback.best()
    assert best is not None
    assert best.step == 4


def test_nothing_to_keep_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that never saves is told so; where it begins is printed."""
    with caplog.at_level(logging.WARNING, "holdfast.transformers"):
        tiny.make(tmp_path / "out", [HoldfastCallback(tmp_path / "run")], save_strategy="no", max_steps=1).train()
    assert "nothing will ever be saved" in caplog.records[0].message
    assert f"holdfast: starts fresh (of 1); saves to {tmp_path / 'run'}\n" in capsys.readouterr().err


def test_the_best_model_on_another_machine(tmp_path: Path) -> None:
    """`load_best_model_at_end` loads the best of an earlier life from the run, where no disk of that life is there."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    for out, steps in (("first", 4), ("second", 8)):
        callback = HoldfastCallback(tmp_path / "run", keep=hf.Keep(last=1, best=1, metric="eval_loss"))
        trainer = tiny.make(tmp_path / out, [callback], max_steps=steps, **options)
        start = callback.latest()
        trainer.train(resume_from_checkpoint=start)
        shutil.rmtree(tmp_path / out)
    assert start is not None
    best = callback.best()
    assert best is not None
    assert best.step == 2
    with best.as_directory() as directory:
        kept = load_file(Path(directory, "model.safetensors"))
    weights = {name: torch.tensor(value) for name, value in tiny.weights(trainer).items()}
    assert all(torch.equal(weights[name], value) for name, value in kept.items())


class FailOnce(TrainerCallback):
    """Ends the second trial with an error, after its first save."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps == 7:
            raise RuntimeError("out of luck")


def test_trained_anew_after_a_failure(tmp_path: Path) -> None:
    """A training that ends with an error, and one from scratch in the same process: the run goes on from the second."""
    callback, failing = HoldfastCallback(tmp_path / "run", keep=hf.Keep(last=1)), FailOnce()
    for seed in (3, 4):
        trainer = tiny.make(tmp_path / "out", [callback, failing], eval_strategy="no", data_seed=seed)
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.train()
        failing.steps = 2
    callback.keeper.wait()
    assert [one.step for one in callback.checkpoints()] == [4], "not 6, of the first"
    newest = callback.latest()
    assert newest is not None
    assert newest.endswith(callback.checkpoints()[0].name)
    callback.keeper.close()


def test_hyperparameter_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trial has a run of its own, also after one that failed; a training after the search has the first one."""
    callback = HoldfastCallback(tmp_path / "run", keep=hf.Keep(last=1, best=1, metric="eval_loss"))
    trainer = tiny.make(tmp_path / "out", [callback, FailOnce()], max_steps=4, save_total_limit=1)
    start = copy.deepcopy(trainer.model)
    trainer.model_init = lambda trial=None: copy.deepcopy(start)
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        n_trials=3, backend="optuna", direction="minimize", catch=(RuntimeError,),
    )  # fmt: skip
    assert [steps(str(tmp_path / "run" / f"run-{number}")) for number in range(3)] == [[2, 4], [2], [2, 4]]
    assert steps(str(tmp_path / "run")) == []
    trainer.hp_search_backend = None
    trainer.train(resume_from_checkpoint=callback.latest())
    assert steps(str(tmp_path / "run")) == [2, 4]
    capsys.readouterr()
    trainer.train(resume_from_checkpoint=callback.latest())  # finished
    said = capsys.readouterr().err
    assert "holdfast: goes on after step 4 (of 4); saves to " in said
    assert "nothing is left to train: give more max_steps" in said
