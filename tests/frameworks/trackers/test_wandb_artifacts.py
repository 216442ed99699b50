"""Artifacts of W&B as `load_object_store` of the loop trainer: real artifacts, and a stand-in for the server alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.trackers import WandbArtifacts, WandbTracker


class Api:
    """What `wandb.Api` does for artifacts: finds them by "entity/project/name:version", and gives their files."""

    def __init__(self, **artifacts: wandb.Artifact) -> None:
        self._artifacts = artifacts
        self.asked: list[str] = []

    def artifact(self, name: str) -> Any:
        self.asked.append(name)
        whole = name.rpartition("/")[2]
        if whole not in self._artifacts:
            raise wandb.errors.CommError(f"artifact '{whole}' not found in 'team/project'")
        return _Logged(self._artifacts[whole])


class _Logged:
    """An artifact as the server gives it back."""

    def __init__(self, artifact: wandb.Artifact) -> None:
        self.metadata, self.manifest = artifact.metadata, artifact.manifest

    def download(self, root: str) -> str:
        for path, entry in self.manifest.entries.items():
            target = Path(root, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(entry.local_path, target)
        return root


def trainer(**options: Any) -> hf.Trainer:
    model = torch.nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3), torch.ones(8, 1)), batch_size=4)
    return hf.Trainer(
        model=model,
        train_dataloader=data,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        loss_fn=torch.nn.functional.mse_loss,
        progress_bar=False,
        **{"max_duration": "1ep", **options},
    )


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train an epoch; gives what a tracker logs of it by `upload`, the trainer and the folder."""
    active = wandb.init(project="project", dir=tmp_path)
    made: list[wandb.Artifact] = []
    monkeypatch.setattr(active, "log_artifact", lambda artifact, **_: made.append(artifact))

    def train(name: str = "ep{epoch}", **options: Any) -> tuple[wandb.Artifact, hf.Trainer]:
        tracker = WandbTracker(active, **options)
        one = trainer(save_folder=str(tmp_path / "saved"), save_filename=name, callbacks=[tracker])
        one.fit()
        one.close()
        tracker.wait()
        return made[-1], one

    yield train
    active.finish()


def same(one: hf.Trainer, other: hf.Trainer) -> bool:
    found = [{name: value.clone() for name, value in each.state.model.state_dict().items()} for each in (one, other)]
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("upload", [False, True])
def test_a_checkpoint_is_loaded_from_its_artifact(logged: Any, upload: bool) -> None:
    """By reference or from its files: weights and timestamp are those of the checkpoint that was logged."""
    artifact, first = logged(upload=upload)
    api = Api(**{"run:latest": artifact, "run:v3": artifact})
    for path in ("run", "run:v3"):
        store = WandbArtifacts("team", "project", api=api)
        second = trainer(max_duration="2ep", load_object_store=store, load_path=path)
        assert same(first, second)
        assert second.state.timestamp.epoch == 1
        second.fit()
        assert second.state.timestamp.epoch == 2
        second.close()
    assert api.asked == ["team/project/run:latest", "team/project/run:v3"]


def test_one_file_of_an_artifact(logged: Any, tmp_path: Path) -> None:
    """Files that somebody added by hand, as Composer's logger does: one is taken as it is, of several one is named."""
    _, first = logged("ep{epoch}.pt")
    path = tmp_path / "saved/ep1.pt"
    alone, several = wandb.Artifact("alone", "model"), wandb.Artifact("several", "model")
    alone.add_file(str(path))
    several.add_file(str(path))
    several.add_file(str(path), name="other.pt")
    store = WandbArtifacts("team", "project", api=Api(**{"alone:latest": alone, "several:v0": several}))
    for load_path in ("alone", "several:v0/ep1.pt"):
        second = trainer(load_object_store=store, load_path=load_path, load_weights_only=True)
        assert same(first, second)
        second.close()
    with pytest.raises(hf.CheckpointNotFoundError, match=r"holds ep1.pt, other.pt: give one of them"):
        trainer(load_object_store=store, load_path="several:v0")


def test_what_is_not_there_is_said(logged: Any, tmp_path: Path) -> None:
    """No such artifact; a checkpoint that was deleted or replaced since it was logged."""
    artifact, _ = logged()
    store = WandbArtifacts("team", "project", api=Api(**{"run:latest": artifact}))
    with pytest.raises(hf.CheckpointNotFoundError, match="W&B has no artifact 'team/project/other:latest'"):
        trainer(load_object_store=store, load_path="other")
    place = tmp_path / "saved/ep1"
    hf.save(place, {"w": torch.zeros(2)}, overwrite=True)
    with pytest.raises(hf.CorruptCheckpointError, match="another checkpoint lies by now"):
        trainer(load_object_store=store, load_path="run")
    shutil.rmtree(place)
    with pytest.raises(hf.CheckpointNotFoundError, match="not there any more"):
        trainer(load_object_store=store, load_path="run")


def test_the_real_api_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.Api` itself, with nobody logged in: an error of ours that says what was looked for, not a fresh start."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("NETRC", "/nonexistent/netrc")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises((hf.StorageError, hf.CheckpointNotFoundError), match="team/project/run:latest"):
        trainer(load_object_store=WandbArtifacts("team", "project"), load_path="run")


def test_the_tracker_itself_stands_for_its_project(logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Composer takes its logger: the artifacts of the run's own project."""
    artifact, first = logged()
    api = Api(**{"run:latest": artifact})
    monkeypatch.setattr(wandb, "Api", lambda: api)
    second = trainer(load_object_store=WandbTracker(wandb.run), load_path="run")
    assert same(first, second)
    assert api.asked[0].endswith("project/run:latest")
    second.close()
