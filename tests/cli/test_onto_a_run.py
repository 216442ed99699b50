"""A checkpoint written onto a run would hide it from every command, so it is refused, whoever writes it and however."""

from __future__ import annotations

import pytest
import torch
from catalog_kit import begin, save, steps_of
from command_kit import invoke

import holdfast as hf
from holdfast.errors import CheckpointExistsError
from holdfast.storage import LocalStorage


@pytest.fixture
def run(tmp_path):
    catalog = begin(LocalStorage(tmp_path / "run"))
    save(catalog, 1)
    save(catalog, 2)
    return tmp_path / "run"


@pytest.fixture
def alone(tmp_path):
    hf.save(tmp_path / "alone", {"model": {"w": torch.zeros(2)}})
    return tmp_path / "alone"


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_commands_refuse(run, alone, tmp_path, overwrite) -> None:
    """`import`, `average -o` and `cp`, also with --overwrite: the run and what is in it stay as they are."""
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    for command in (("import", tmp_path / "w.pt", run), ("average", alone, alone, "-o", run), ("cp", alone, run)):
        assert "is a run" in invoke(*command, *overwrite, code=None).stderr
        assert not (run / "manifest.json").exists()
    assert invoke("latest", run).stdout.strip().endswith("step_0002")
    assert steps_of(run) == [1, 2]
    invoke("cp", alone, f"{run}/", *overwrite)  # into it: another name


def test_the_library_refuses(run, alone) -> None:
    """`save`, `save_async` and `to_directory`."""
    state = {"w": torch.zeros(2)}
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="is a run"):
            hf.save(run, state, overwrite=overwrite)
        with pytest.raises(CheckpointExistsError, match="is a run"):
            hf.save_async(run, state, overwrite=overwrite).result()
    with pytest.raises(CheckpointExistsError, match="is a run"):
        hf.Checkpoint(alone).to_directory(run)
    assert not (run / "manifest.json").exists()
    assert steps_of(run) == [1, 2]
