"""Small files that a saver commits with its directories, for other libraries that read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from loop_kit import Crash, CrashAt, flip, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.loggers import RemoteUploaderDownloader

INDEX = "model.safetensors.index.json"
FILES = hf.ModelFiles(files={"config.json": '{"a": 1}'}, indexes={INDEX: "model"})
OPTIONS: dict[str, Any] = {"save_filename": "ba{batch}", "save_interval": "4ba", "model_files": FILES}


def read_by_index(folder: Path) -> dict[str, torch.Tensor]:
    """Read tensors as another library does: the index says which file, safetensors gives the tensor."""
    found = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def assert_model(folder: Path, trainer: hf.Trainer) -> None:
    """A directory holds the weights of a trainer, under the names that its model has, and its other file."""
    found, expected = read_by_index(folder), trainer.state.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (folder / "config.json").read_text() == '{"a": 1}'
    assert hf.Checkpoint(folder).verify().ok


def test_a_directory_is_a_model_and_resumes(tmp_path: Path) -> None:
    """Each checkpoint has the files, written once; training goes on from it as ever."""
    with pytest.raises(Crash):
        plain(tmp_path, callbacks=CrashAt(9), **OPTIONS).fit()
    trainer = plain(tmp_path, autoresume=True, **OPTIONS)
    assert int(trainer.state.timestamp.batch) == 8
    assert_model(tmp_path / "ba8", trainer)
    trainer.fit()
    assert_model(tmp_path / "ba12", trainer)
    assert (tmp_path / "ba4/config.json").stat().st_ino == (tmp_path / "ba8/config.json").stat().st_ino
    whole = plain(tmp_path / "whole", save_interval="1000ba")
    whole.fit()
    assert torch.equal(trainer.state.model.weight, whole.state.model.weight)  # type: ignore[arg-type]


def test_a_module_within_the_model(tmp_path: Path) -> None:
    """``item`` may be a path: a wrapped model is read under the names that it has by itself."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)

        def forward(self, batch: torch.Tensor) -> Any:
            return self.other(self.inner(batch))

    files = hf.ModelFiles(indexes={INDEX: "model/inner"})
    trainer = plain(tmp_path, model=Wrapped(), **{**OPTIONS, "model_files": files})
    trainer.fit()
    found = read_by_index(tmp_path / "ba12")
    assert found.keys() == {"weight", "bias"}
    assert torch.equal(found["weight"], trainer.state.model.inner.weight)  # type: ignore[union-attr, arg-type]
    assert int(plain(None, model=Wrapped(), load_path=tmp_path / "ba12").state.timestamp.batch) == 12


@pytest.mark.parametrize("harm", ["manifest.json", "state_model"])
def test_what_was_damaged_is_written_anew(tmp_path: Path, harm: str) -> None:
    """A bad checkpoint is passed over, and its name is used again although its files have fixed names."""
    trainer = plain(tmp_path, **OPTIONS)
    trainer.fit()
    (bad,) = [path for path in (tmp_path / "ba12").iterdir() if path.name.startswith(harm)]
    flip(bad)
    again = plain(tmp_path, autoresume=True, **OPTIONS)
    assert int(again.state.timestamp.batch) == 8
    again.fit()
    assert_model(tmp_path / "ba12", again)
    assert torch.equal(again.state.model.weight, trainer.state.model.weight)  # type: ignore[arg-type]


def test_later_checkpoints_are_replaced(tmp_path: Path) -> None:
    """With ``save_overwrite`` the one that is there goes right before its name is used again, and no earlier."""
    plain(tmp_path, **OPTIONS).fit()
    with pytest.raises(Crash):
        plain(tmp_path, save_overwrite=True, callbacks=CrashAt(5), **OPTIONS).fit()
    assert [hf.Checkpoint(tmp_path / name).verify().ok for name in ("ba4", "ba8", "ba12")] == [True] * 3
    trainer = plain(tmp_path, save_overwrite=True, **OPTIONS)
    trainer.fit()
    assert_model(tmp_path / "ba12", trainer)


def test_uploads_are_models_too(tmp_path: Path) -> None:
    """The copy is whole, and a later life may send the same name again."""
    far = tmp_path / "far"
    for _ in range(2):
        uploader = RemoteUploaderDownloader(str(far))
        trainer = plain(tmp_path / "run", loggers=uploader, run_name="r", save_overwrite=True, **OPTIONS)
        trainer.fit()
        trainer.close()
        assert_model(far / "r/checkpoints/ba12", trainer)


def test_two_ranks_write_one_model(ranks: Any, tmp_path: Path) -> None:
    """Each writes its share, the index of rank 0 names the files of both; a later training replaces it."""
    cases = f"{Path(__file__).with_name('rank_cases.py')}:write_models"
    for _ in range(2):
        told = ranks.checked(cases, str(tmp_path / "run"), INDEX)
        (newest,) = tmp_path.glob("run/ba6")
        sums = [tensor.double().sum().item() for _, tensor in sorted(read_by_index(newest).items())]
        assert sums == told[0] == told[1]
    files = {path.name.split("-")[1] for path in newest.glob("state_model-*.safetensors")}
    assert files == {"00000", "00001"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"save_filename": "ba{batch}.pt"}, "that is a single file"),
        ({"save_filename": "ep{epoch}"}, r"use a name with \{batch\}"),
        ({"save_filename": "all/ba{batch}"}, "directly in save_folder"),
        ({"model_files": 3}, "give a dict"),
        ({"model_files": {"a b": b""}}, "name of a file"),
    ],
)
def test_refused_when_the_trainer_is_made(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    """What cannot be is said before anything is trained."""
    with pytest.raises(hf.ConfigError, match=problem):
        plain(tmp_path, **{**OPTIONS, **options})
    assert os.listdir(tmp_path) == []


def test_refused_without_a_folder_of_its_own() -> None:
    """``model_files`` of a trainer is for ``save_folder``; savers have their own."""
    with pytest.raises(hf.ConfigError, match="goes with save_folder"):
        plain(None, model_files=FILES)
    with pytest.raises(hf.ConfigError, match="that is a single file"):
        CheckpointSaver("a", "ba{batch}.safetensors", weights_only=True, model_files=FILES)


def test_an_item_that_is_not_there(tmp_path: Path) -> None:
    """Said at the first batch, not hours later."""
    trainer = plain(tmp_path, **{**OPTIONS, "model_files": hf.ModelFiles(indexes={INDEX: "policy"})})
    with pytest.raises(hf.ConfigError, match="no tensors under 'state/policy'"):
        trainer.fit()
    assert int(trainer.state.timestamp.batch) == 1
