"""Runs and checkpoints written by an earlier version are listed, verified, loaded and resumed by this one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from catalog_kit import catalog_of

import holdfast as hf

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(params=["8ea6d6b"])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote."""
    return Path(shutil.copytree(DATA / request.param, tmp_path / request.param, symlinks=True))


@pytest.fixture
def made_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that wrote it; workers import it, too."""
    monkeypatch.syspath_prepend(str(DATA))
    import older

    yield older
    del sys.modules["older"]


def records(run: Path) -> dict[str, bool]:
    return {record.name: record.pinned for record in catalog_of(run).records()}


def test_it_is_listed_verified_and_loaded(older: Path) -> None:
    """The same checkpoints, every byte as it was; late metrics and pins beside them."""
    assert records(older / "loop") == {
        "step_00000002": True,
        "step_00000004": False,
        "step_00000006": False,
        "step_00000008": False,
    }
    assert records(older / "workers") == {"checkpoint_000000": False, "checkpoint_000001": False}
    for path in sorted(older.glob("*/*/manifest.json")):
        checkpoint = hf.Checkpoint(path.parent)
        found = checkpoint.verify(deep=True)
        assert found, (path, found.problems)
        assert found.bytes_read > 0
    newest = hf.load(older / "loop/step_00000008")
    assert (newest["best"], newest["model"]["seen"].sum().item()) == (0.5, 16.0)
    whole = torch.load(older / "files/ep1-ba6.pt", weights_only=True)
    assert torch.equal(whole["state"]["model"]["seen"], torch.ones(12))


def test_a_loop_goes_on_where_it_died(older: Path, made_by: ModuleType) -> None:
    """In the middle of the second epoch: each sample of each epoch exactly once, retention and pins as before."""
    model, resumed_from = made_by.loop(older / "loop")
    assert resumed_from.name == "step_00000008"
    assert torch.equal(model.seen, torch.full((12,), 2.0))
    kept = ["step_00000002", "step_00000008", "step_00000010", "step_00000012"]  # pinned, resumed from, the last 2
    assert sorted(records(older / "loop")) == kept


def test_workers_go_on(older: Path, made_by: ModuleType) -> None:
    """Its result is read, and a fit of the same name goes on from the newest checkpoint."""
    before = hf.Result.from_path(older / "workers")
    assert (before.metrics["epoch"], list(before.metrics_dataframe["loss"])) == (1, [1.0, 0.5])
    after = made_by.workers(older, epochs=4)
    assert torch.equal(after.checkpoint.load()["model"]["seen"], torch.full((12,), 4.0))
    assert list(after.metrics_dataframe["epoch"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("folder", "name"), [("files", "ep{epoch}-ba{batch}.pt"), ("folders", "ep{epoch}-ba{batch}")])
def test_the_loop_trainer_goes_on(older: Path, made_by: ModuleType, folder: str, name: str) -> None:
    """From a single file and from a directory."""
    path = older / folder / name.format(epoch=1, batch=6)
    trainer = made_by.trainer(older / folder, max_duration="2ep", name=name, load_path=str(path))
    assert torch.equal(trainer.state.model.seen, torch.full((12,), 2.0))
    assert (older / folder / name.format(epoch=2, batch=12)).exists()
