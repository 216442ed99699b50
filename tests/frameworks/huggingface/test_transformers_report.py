"""`ReportCallback`: a `transformers.Trainer` in the function trainer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from hf_kit import result
from object_kit import BUCKET

import holdfast as hf
from holdfast.torch import TorchTrainer
from holdfast.transformers import RayTrainReportCallback, ReportCallback, prepare_trainer


def fit(storage: str, told: dict[str, Any], *, workers: int = 1, failures: int = 0) -> hf.Result:
    return TorchTrainer(
        tiny.reported,
        train_loop_config=told,
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            name="run",
            storage_path=storage,
            checkpoint_config=hf.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
            ),
            failure_config=hf.FailureConfig(max_failures=failures),
        ),
    ).fit()


def test_two_workers_killed(tmp_path: Path, undisturbed_ranks: Any) -> None:
    """Both workers are killed after a save: the final weights are those of ranks that nothing disturbed.

    The best checkpoints are kept although transformers keeps one.
    """
    told = {
        "folder": str(tmp_path / "out"), "result": str(tmp_path / "result"), "kill_after": 4,
        "options": {"save_total_limit": 1},
    }  # fmt: skip
    ended = fit(str(tmp_path / "results"), told, workers=2, failures=1)
    assert result(tmp_path / "result")["weights"] == undisturbed_ranks
    assert [attempt.attempt for attempt in ended.attempts] == [1, 2]
    rows = ended.metrics_dataframe
    assert list(rows["step"]) == [2, 4, 6, 8]
    best = sorted(rows["eval_loss"])[:2]
    assert [metrics["eval_loss"] for _, metrics in ended.best_checkpoints] == best[::-1]
    assert ended.checkpoint is not None
    with ended.checkpoint.as_directory() as directory:
        names = {one.name for one in Path(directory, "checkpoint").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "model.safetensors"} <= names
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["checkpoint-8"]


def test_taken_away_to_s3(s3: str, tmp_path: Path, undisturbed: Any) -> None:
    """The trainer's directories are taken instead of copied, to S3 too, and a killed worker goes on from there."""
    told = {
        "folder": str(tmp_path / "out"), "result": str(tmp_path / "result"), "kill_after": 4, "delete": True,
        "options": {"save_total_limit": 2},
    }  # fmt: skip
    ended = fit(f"s3://{BUCKET}/fit", told, failures=1)
    assert result(tmp_path / "result")["weights"] == undisturbed
    assert list((tmp_path / "out").iterdir()) == []
    assert ended.checkpoint is not None
    assert ended.checkpoint.verify().ok
    assert ended.checkpoint.metrics["step"] == tiny.STEPS


class Mine(ReportCallback):
    """What users do: remember what is logged, and say something at each save."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(logs.get("loss", 0.0))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        self.logged.clear()

    def metrics(self, state: Any) -> dict[str, Any]:
        return {**super().metrics(state), "logs": len(self.logged)}


def prepared(config: dict[str, Any]) -> None:
    """Three trainers: with a callback of the user's own, with none, and one that sees other ranks than there are."""
    said: list[str] = []
    logging.getLogger("holdfast.transformers").addFilter(lambda record: said.append(record.getMessage()) is not None)
    folder = Path(config["folder"])
    mine = prepare_trainer(tiny.make(folder / "mine", [Mine()], max_steps=2))
    mine.train()
    bare = prepare_trainer(tiny.make(folder / "bare", [], max_steps=2, eval_strategy="no"))
    bare.train()
    callbacks = [
        [type(one).__name__ for one in trainer.callback_handler.callbacks if hasattr(one, "validation")]
        for trainer in (mine, bare)
    ]
    with pytest.raises(hf.errors.ConfigError, match="sees 4 ranks, the run has 1"):
        prepare_trainer(SimpleNamespace(args=SimpleNamespace(world_size=4)))
    Path(config["result"]).write_text(json.dumps({"callbacks": callbacks, "said": said}))


def test_prepare_trainer_and_a_subclass(tmp_path: Path) -> None:
    """A callback of the user's own is left alone, where there is none one is added, and a wrong number of ranks told.

    A subclass uses `on_log` and `on_save`. Without an evaluation a checkpoint lacks what ranks it: that is said when
    training begins and at the save.
    """
    told = {"folder": str(tmp_path / "out"), "result": str(tmp_path / "result")}
    ended = TorchTrainer(
        prepared,
        train_loop_config=told,
        run_config=hf.RunConfig(
            name="run",
            storage_path=tmp_path / "results",
            checkpoint_config=hf.CheckpointConfig(checkpoint_score_attribute="eval_loss"),
        ),
    ).fit()
    found = result(tmp_path / "result")
    assert found["callbacks"] == [["Mine"], ["ReportCallback"]]
    assert ended.metrics_dataframe["logs"].tolist()[0] == 3  # two losses and an evaluation
    assert ["eval_loss" in metrics for _, metrics in ended.best_checkpoints] == [False, True]  # the best is the last
    assert ["eval_strategy='no'" in found["said"][0], "step 2 has no 'eval_loss'" in found["said"][1]] == [True, True]


def test_needs_a_train_func() -> None:
    """Outside of a train_func the error says where it belongs."""
    assert RayTrainReportCallback is ReportCallback
    with pytest.raises(hf.errors.SessionError, match="outside of train_func"):
        prepare_trainer(None)


def test_the_best_model_needs_its_directory() -> None:
    """Directories are not taken away from a trainer that is to load the best of them at the end."""
    arguments = SimpleNamespace(load_best_model_at_end=True)
    with pytest.raises(hf.errors.ConfigError, match="load_best_model_at_end=True"):
        ReportCallback(delete_local_checkpoint_after_upload=True).on_train_begin(arguments, None, None)
