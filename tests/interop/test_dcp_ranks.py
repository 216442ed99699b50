"""DCP saves and loads our checkpoints with several ranks, each a real process with sharded tensors (FSDP2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interop_kit import Net, trained

import holdfast as hf
from holdfast.dcp import export, import_

HERE = Path(__file__).parent


def run_ranks(world_size: int, folder: Path, *actions: str) -> None:
    (folder / "meet").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "dcp_ranks.py"), str(rank), str(world_size), str(folder), *actions],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(outputs)


def check(path: Path, reference: dict) -> None:
    """A checkpoint of sharded ranks loads into one process: model, and optimizer by parameter name."""
    model, _ = trained(3)
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.5)
    hf.load(path, {"model": model, "optimizer": optimizer}, only=["model", "optimizer"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference["model"][name]), name
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, reference["kept"][f"{name}.{key}"]), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.01


def check_folder(folder: Path, world_size: int) -> None:
    reference = torch.load(folder / "reference.pt", weights_only=True)
    checkpoint = hf.Checkpoint(folder / "mine")
    assert checkpoint.verify().ok
    assert (checkpoint.step, checkpoint.metrics, checkpoint.manifest.world_size) == (5, {"loss": 0.5}, world_size)
    assert hf.load(checkpoint, only="note")["note"] == {"epoch": 3, "path": Path("x")}
    check(folder / "mine", reference)
    check(folder / "later", reference)
    done = import_(folder / "plain", folder / "imported")
    assert not done.not_taken
    check(folder / "imported", reference)
    out = hf.export(checkpoint, folder / "all.pt", to="torch")
    assert out.left_out == ()
    model = Net()
    model.load_state_dict(torch.load(folder / "all.pt", weights_only=True)["model"])
    assert all(torch.equal(value, reference["model"][name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_two_sharded_ranks_there_and_back(tmp_path) -> None:
    """dcp.save, async_save and load with 2 ranks; hf.load, import and export of the result in one process."""
    run_ranks(2, tmp_path, "save", "async", "plain", "load=mine", "load=later")
    check_folder(tmp_path, 2)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 4])
def test_other_world_sizes(tmp_path, world_size) -> None:
    """The same with 1 and 4 ranks, some of which hold nothing of the small tensors."""
    run_ranks(world_size, tmp_path, "save", "async", "plain", "load=mine", "load=later")
    check_folder(tmp_path, world_size)


@pytest.mark.long
def test_any_layout_reads_any_other(tmp_path) -> None:
    """What 4 ranks have saved, and what one process has exported from it, is read by 1 and 2 ranks."""
    run_ranks(4, tmp_path, "save")
    (tmp_path / "one").mkdir()
    run_ranks(1, tmp_path / "one", "save")
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        (folder / "mine").symlink_to(tmp_path / "mine")
        (folder / "single").symlink_to(tmp_path / "one" / "mine")
        run_ranks(world_size, folder, "load=mine", "load=single")
    export(tmp_path / "mine", tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "again")
    check(tmp_path / "again", torch.load(tmp_path / "reference.pt", weights_only=True))
