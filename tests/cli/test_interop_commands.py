"""`holdfast export` and `holdfast import` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from command_kit import invoke as command

import holdfast as hf


@pytest.fixture
def saved(tmp_path):
    return hf.save(tmp_path / "ck", {"model": torch.nn.Linear(3, 2), "step": 5})


def invoke(*arguments: object, code: int = 0) -> str:
    return command(*arguments, code=code).stdout


def test_export_says_what_it_wrote(saved, tmp_path) -> None:
    """Files, sizes, and what the format could not take; as text and as one JSON document."""
    text = invoke("export", tmp_path / "ck", tmp_path / "w.safetensors", "--to", "safetensors", "--dtype", "float16")
    assert "2 tensors" in text
    assert "left out: step (not weights)" in text
    found = json.loads(
        invoke("export", tmp_path / "ck", tmp_path / "x.pt", "--to", "torch", "--only", "model", "--json")
    )
    assert (found["format"], found["tensors"], found["left_out"], found["too_large"]) == ("torch", 2, [], [])
    assert found["files"] == [{"path": "x.pt", "bytes": (tmp_path / "x.pt").stat().st_size}]
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == {"model"}


def test_import_says_what_it_took(tmp_path) -> None:
    """Names and kinds, and what was not taken."""
    torch.save({"model": {"w": torch.ones(2)}, "odd": {1, print}}, tmp_path / "a.pt")
    text = invoke("import", tmp_path / "a.pt", tmp_path / "ck")
    assert "model: 1 tensors" in text
    assert "not taken: ['odd']" in text
    found = json.loads(invoke("import", tmp_path / "a.pt", tmp_path / "ck", "--overwrite", "--json"))
    assert (found["format"], [row["name"] for row in found["taken"]]) == ("torch", ["model", "odd"])
    assert hf.load(tmp_path / "ck")["model"]["w"].tolist() == [1, 1]


def test_errors_have_a_status(saved, tmp_path) -> None:
    """2 for a wrong call, 1 for what went wrong."""
    invoke("export", tmp_path / "none", tmp_path / "x.pt", "--to", "torch", code=2)
    invoke("export", tmp_path / "ck", tmp_path / "x", "--to", "hf", "--item", "none", code=2)
    invoke("import", tmp_path / "ck", tmp_path / "x", code=2)
    invoke("export", tmp_path / "ck", tmp_path / "x.pt", "--to", "torch")
    invoke("export", tmp_path / "ck", tmp_path / "x.pt", "--to", "torch", code=1)


def test_no_export_goes_into_a_run_or_a_checkpoint(saved, tmp_path) -> None:
    """With --overwrite it could take the place of files that were committed; a file of its own beside them is one."""
    with hf.Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(3, 2)}) as ck:
        ck.step()
    for place in ("run", "run/step_00000001", "ck"):
        before = sorted((tmp_path / place).iterdir())
        for kind in ("hf", "safetensors", "dcp"):
            error = command("export", tmp_path / "ck", tmp_path / place, "--to", kind, "--overwrite", code=1).stderr
            assert "give a folder of its own" in error
        assert sorted((tmp_path / place).iterdir()) == before
    invoke("export", tmp_path / "run", tmp_path / "run" / "w.safetensors", "--to", "safetensors")


def test_what_is_no_source_of_an_import_is_said_as_what_it_is(saved, tmp_path) -> None:
    """A text file is no torch file to be trusted; a run needs no import."""
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "empty.pt").write_text("")
    for name, why in (("train.py", "no file of torch.save"), ("empty.pt", "is empty: fetch it again")):
        error = command("import", tmp_path / name, tmp_path / "to", code=1).stderr
        assert why in error
        assert "--trusted" not in error
    with hf.Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(3, 2)}) as ck:
        ck.step()
    assert "is a run of Holdfast already" in command("import", tmp_path / "run", tmp_path / "to", code=2).stderr


def test_torch_is_not_imported_for_the_help() -> None:
    """The commands load torch when they have something to do."""
    code = "import sys, holdfast.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
