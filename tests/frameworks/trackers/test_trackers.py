"""Real trackers hear of committed checkpoints: from a `Checkpointer`, the function trainer and the loop trainer."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import wandb
from object_kit import moto_bucket
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import holdfast as hf
from holdfast.loggers import TensorBoardLogger
from holdfast.torch import TorchTrainer
from holdfast.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker


def run(root: Path, tracker: Any) -> list[hf.Checkpoint]:
    """A short run of a `Checkpointer`; returns its checkpoints, newest first."""
    with hf.Checkpointer(root, {"w": torch.ones(3)}, every=2, on_commit=tracker) as ck:
        for step in range(1, 5):
            ck.step(loss=1 / step)
    tracker.wait()
    return ck.checkpoints()


def test_metrics_that_a_tracker_does_not_take(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a sign that MLflow refuses, and a NaN, which JSON has not, cost no checkpoint its record."""
    logged = []
    with wandb.init(project="holdfast", dir=tmp_path) as active:
        monkeypatch.setattr(active, "log_artifact", lambda artifact, **_: logged.append(artifact))
        listeners = [MLflowTracker(), WandbTracker(active)]
        with hf.Checkpointer(tmp_path / "run", {"w": torch.ones(3)}, every=1, on_commit=listeners) as ck:
            ck.step(**{"acc@5 (%)": 0.5, "loss": math.nan})
        for one in listeners:
            one.wait()
        summary = dict(active.summary)
    (checkpoint,) = ck.checkpoints()
    found = mlflow.get_run(store).data
    assert found.tags["holdfast.uri"] == summary["holdfast/uri"] == checkpoint.uri
    assert found.metrics["checkpoint/acc_5 ___"] == 0.5
    assert math.isnan(found.metrics["checkpoint/loss"])
    assert [one.metadata["metrics"] for one in logged] == [{"acc@5 (%)": 0.5, "loss": "nan"}]


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    with moto_bucket() as uri:
        yield f"{uri}/tracked"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as active:
        yield active.info.run_id


@pytest.mark.parametrize("upload", [False, True])
def test_mlflow(tmp_path: Path, store: str, upload: bool) -> None:
    """Tags name every checkpoint with its digest, metrics are at their steps; bytes go along only when asked for."""
    newest, first = run(tmp_path / "run", MLflowTracker(upload=upload))
    found = mlflow.get_run(store).data
    assert found.tags["holdfast.uri"] == newest.uri
    assert found.tags["holdfast.digest"] == newest.digest
    assert found.tags["holdfast.checkpoint.2"] == f"{first.uri} {first.digest}"
    history = mlflow.MlflowClient().get_metric_history(store, "checkpoint/loss")
    assert [(one.step, one.value) for one in history] == [(2, 0.5), (4, 0.25)]
    artifacts = [one.path for one in mlflow.MlflowClient().list_artifacts(store, "checkpoints")]
    assert artifacts == (["checkpoints/step_00000002", "checkpoints/step_00000004"] if upload else [])


def test_mlflow_begins_late(tmp_path: Path) -> None:
    """Without a run one begins with the first checkpoint, so that ranks that commit none leave none behind."""
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    tracker = MLflowTracker()
    assert len(mlflow.search_runs(search_all_experiments=True)) == 0
    newest, _ = run(tmp_path / "run", tracker)
    assert mlflow.active_run() is None
    assert mlflow.get_run(tracker.run_id).data.tags["holdfast.uri"] == newest.uri


@pytest.mark.parametrize("upload", [False, True])
def test_wandb_offline(tmp_path: Path, upload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is a version of an artifact that refers to it; the summary has the newest."""
    logged = []
    with wandb.init(project="holdfast", dir=tmp_path) as active:
        original = active.log_artifact

        def log_artifact(artifact: Any, **options: Any) -> Any:
            logged.append((artifact, options["aliases"]))
            return original(artifact, **options)

        monkeypatch.setattr(active, "log_artifact", log_artifact)
        newest, first = run(tmp_path / "run", WandbTracker(active, upload=upload))
        summary = dict(active.summary)
    assert summary["holdfast/uri"] == newest.uri
    assert summary["holdfast/digest"] == newest.digest
    assert [aliases for _, aliases in logged] == [["latest", "step-2"], ["latest", "step-4"]]
    artifact = logged[0][0]
    assert artifact.metadata["digest"] == first.digest
    assert artifact.metadata["metrics"] == {"loss": 0.5}
    entries = artifact.manifest.entries
    if upload:
        assert "manifest.json" in entries
    else:
        assert all(entry.ref.startswith(f"file://{first.uri}/") for entry in entries.values())
        assert len(entries) > 1


def test_a_bucket(remote: str, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a bucket is killed and goes on: trackers have the checkpoints of both lives, at their places."""
    root, board = f"{remote}/run", str(tmp_path / "board")
    told = {"root": root, "store": store, "mlruns": f"file://{tmp_path}/mlruns", "board": board}
    code = "import sys, json, test_trackers; test_trackers.train_and_tell(json.loads(sys.argv[1]), kill=3)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps(told)]
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    logged: list[Any] = []
    with wandb.init(project="holdfast", dir=tmp_path) as active:
        monkeypatch.setattr(active, "log_artifact", lambda artifact, **_: logged.append(artifact))
        train_and_tell(told, also=WandbTracker(active))
    checkpoints = {one.step: one for one in hf.Checkpointer(root).checkpoints()}
    tags = mlflow.get_run(store).data.tags
    for step, one in checkpoints.items():
        assert one.uri == f"{root}/step_{step:08d}"
        assert tags[f"holdfast.checkpoint.{step}"] == f"{one.uri} {one.digest}"
    assert tags["holdfast.uri"] == f"{root}/step_00000004"
    history = mlflow.MlflowClient().get_metric_history(store, "checkpoint/loss")
    assert [(one.step, one.value) for one in history] == [(2, 0.5), (4, 0.25)]
    (entry,) = logged[-1].manifest.entries.values()
    assert (entry.path, entry.ref) == ("step_00000004", f"{root}/step_00000004")
    scalars = EventAccumulator(board).Reload().Scalars("checkpoint/loss")
    # TensorBoard reads the files of one second in the order of the process ids, whichever life was first.
    assert sorted(one.step for one in scalars) == [2, 4]


def train_and_tell(told: dict[str, Any], *, kill: int | None = None, also: Any = None) -> None:
    """A run of four steps, or what is left of it, that tells MLflow and TensorBoard."""
    mlflow.set_tracking_uri(told["mlruns"])
    trackers = [MLflowTracker(told["store"]), TensorBoardTracker(told["board"]), *([also] if also else [])]
    heard = threading.Event()
    listeners = [*trackers, lambda _: heard.set()]
    with hf.Checkpointer(told["root"], {"w": torch.ones(3)}, every=2, on_commit=listeners) as ck:
        while ck.global_step < 4 and ck.global_step != kill:
            ck.step(loss=1 / (ck.global_step + 1))
        ck.wait()
        assert heard.wait(60)
        if kill:
            for tracker in trackers:
                tracker.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    for tracker in trackers:
        tracker.wait()


def test_tensorboard(tmp_path: Path) -> None:
    """A line of text and the metrics of each checkpoint are in the event file."""
    newest, first = run(tmp_path / "run", TensorBoardTracker(tmp_path / "board"))
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    texts = found.Tensors("holdfast/checkpoint/text_summary")
    told = [one.tensor_proto.string_val[0].decode() for one in texts]
    assert told == [f"`{one.uri}` {one.digest}" for one in (first, newest)]
    assert [(one.step, one.value) for one in found.Scalars("checkpoint/loss")] == [(2, 0.5), (4, 0.25)]


class Notes(Tracker):
    """What users write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def record(self, checkpoint: hf.Checkpoint) -> None:
        self.names.append(checkpoint.name)


def train(config):
    for epoch in range(2):
        hf.report({"epoch": epoch}, state={"epoch": epoch})


def test_function_trainer(tmp_path: Path, store: str) -> None:
    """Among the callbacks of a run it works in the process that calls `fit`."""
    notes, tracker = Notes(), MLflowTracker()
    config = hf.RunConfig(name="run", storage_path=tmp_path, callbacks=[notes, tracker])
    result = TorchTrainer(train, run_config=config).fit()
    notes.wait()
    tracker.wait()
    assert notes.names == ["checkpoint_000000", "checkpoint_000001"]
    assert result.checkpoint is not None
    assert mlflow.get_run(store).data.tags["holdfast.digest"] == result.checkpoint.digest


def test_loop_trainer(tmp_path: Path, store: str) -> None:
    """Among the callbacks of the loop trainer; its own TensorBoard logger writes what the run logs."""
    features = torch.randn(16, 4)
    notes, tracker = Notes(), MLflowTracker()
    model = torch.nn.Linear(4, 2)
    trainer = hf.Trainer(
        model=model, loss_fn=torch.nn.functional.cross_entropy, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(features, (features.sum(1) > 0).long()), batch_size=4
        ),
        max_duration="2ep", save_folder=str(tmp_path / "run"), save_interval="1ep", callbacks=[notes, tracker],
        loggers=[TensorBoardLogger(str(tmp_path / "board"))],
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    assert len(notes.names) == 2
    assert mlflow.get_run(store).data.tags["holdfast.step"] == "8"
    events = [path.parent for path in (tmp_path / "board").rglob("events*")]
    assert events
    assert any("loss" in tag for tag in EventAccumulator(str(events[0])).Reload().Tags()["scalars"])


def test_a_tracker_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its server away, its run gone: the log says so, training goes on and every checkpoint is there."""
    with caplog.at_level(logging.ERROR, logger="holdfast.announce"):
        assert len(run(tmp_path / "run", WandbTracker())) == 2
    assert "call wandb.init() first" in caplog.text
    with pytest.raises(hf.ConfigError, match="on_commit"):
        hf.Checkpointer(tmp_path / "other", {}, on_commit=[1])  # type: ignore[list-item]


def test_plain_functions(tmp_path: Path) -> None:
    """Any function can be told."""
    told = []
    with hf.Checkpointer(tmp_path / "run", {"w": torch.ones(1)}, every=1, on_commit=[told.append]) as ck:
        ck.step()
    assert [one.uri for one in told] == [f"{tmp_path}/run/step_00000001"]


class _Late(Tracker):
    """Gives what it hears to other trackers once the training has ended, when retention has done its work."""

    def __init__(self, *trackers: Tracker) -> None:
        super().__init__()
        self.trackers, self.go, self.heard = trackers, threading.Event(), 0

    def record(self, checkpoint: hf.Checkpoint) -> None:
        assert self.go.wait(60)
        for tracker in self.trackers:
            tracker.record(checkpoint)
        self.heard += 1


def report_three(config):
    for step in range(3):
        hf.report({"loss": 1 / (step + 1)}, state={"step": step})


@pytest.mark.parametrize("door", ["checkpointer", "function", "loop", "loop files"])
def test_what_retention_deleted_is_recorded(
    door: str, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With Keep(last=1) two of three checkpoints are gone before a tracker looks: it has all three, with metrics."""
    logged: list[Any] = []
    root = tmp_path / "run"
    with wandb.init(project="holdfast", dir=tmp_path) as active:
        monkeypatch.setattr(active, "log_artifact", lambda artifact, **_: logged.append(artifact))
        late = _Late(MLflowTracker(store), TensorBoardTracker(tmp_path / "board"), WandbTracker(active))
        if door == "checkpointer":
            with hf.Checkpointer(root, {"w": torch.ones(3)}, every=1, keep=hf.Keep(last=1), on_commit=late) as ck:
                for step in range(1, 4):
                    ck.step(loss=1 / step)
                    ck.wait()
                late.go.set()
        elif door == "function":
            config = hf.RunConfig(
                name="run",
                storage_path=tmp_path,
                callbacks=[late],
                checkpoint_config=hf.CheckpointConfig(num_to_keep=1),
            )
            TorchTrainer(report_three, run_config=config).fit()
        else:
            model = torch.nn.Linear(4, 2)
            data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.zeros(12).long())
            name = {"save_filename": "ba{batch}.pt"} if door == "loop files" else {}
            trainer = hf.Trainer(
                model=model, loss_fn=torch.nn.functional.cross_entropy, max_duration="3ba", save_folder=str(root),
                optimizers=torch.optim.SGD(model.parameters(), lr=0.1), save_interval="1ba", callbacks=[late],
                train_dataloader=torch.utils.data.DataLoader(data, batch_size=4), save_num_checkpoints_to_keep=1,
                **name,
            )  # fmt: skip
            trainer.fit()
            late.go.set()
            trainer.close()
        late.go.set()
        late.wait()
    assert late.heard == 3
    assert "did not take note" not in caplog.text
    tags = mlflow.get_run(store).data.tags
    texts = [tags[f"holdfast.checkpoint.{step}"] for step in (1, 2, 3)]
    assert [Path(text.split(" ")[0]).exists() for text in texts] == [False, False, True]
    digests = [text.split(" ")[1] for text in texts]
    assert all(digests) or door == "loop files"
    assert [one.metadata["digest"] for one in logged] == digests
    assert all(len(one.manifest.entries) >= 1 for one in logged)
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert len(board.Tensors("holdfast/checkpoint/text_summary")) == 3
    if "loop" not in door:
        history = mlflow.MlflowClient().get_metric_history(store, "checkpoint/loss")
        assert [one.value for one in history] == [1, 1 / 2, 1 / 3]
