"""Megatron-Core's dist_checkpointing on two tensor-parallel workers, over gloo on the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tp_cases
from launch_kit import run_killed_then_again
from object_kit import moto_bucket

import holdfast as hf
import holdfast.megatron


def whole(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """All tensors that lie in a directory of dist_checkpointing, put together; it is one of DCP."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        name: torch.empty(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP tells that there is one process
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_a_save_in_the_background_is_refused() -> None:
    """Megatron would still be writing when the directory is committed."""
    with pytest.raises(hf.errors.ConfigError, match="async_sharded_save"):
        holdfast.megatron.report({}, {}, async_sharded_save=True)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a training that nobody disturbs comes to."""
    alone = tp_cases.run(tmp_path_factory.mktemp("alone"), "alone", workers=2, steps=4)
    assert alone.checkpoint is not None
    found = whole(alone.checkpoint.path)
    assert sorted(found) == [f"{kind}.{name}" for kind in ("model", "momentum") for name in ("bias", "down", "up")]
    return found


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    with moto_bucket() as uri:
        yield f"{uri}/megatron"


def test_kill_and_reshard(remote: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    """In a bucket: a rank is killed, all go on and end with the same bits; one worker takes over what two have left."""
    result = tp_cases.run(tmp_path, "killed", workers=2, storage=remote, steps=4, kill=3)
    assert result.checkpoint is not None
    assert len(result.attempts) == 2
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2]  # and the newest, which always stays
    found = whole(result.checkpoint.to_directory(tmp_path / "files"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    done = hf.import_checkpoint(result.checkpoint, tmp_path / "imported")
    assert done.format == "dcp"
    assert [path for path, _ in done.not_taken] == ["common.pt", "metadata.json"]
    imported = hf.load(done.checkpoint)
    assert all(torch.equal(imported[name], wanted[name]) for name in wanted)
    assert {"metadata.json", "common.pt", "manifest.json"} <= set(os.listdir(tmp_path / "files"))
    out = tmp_path / "one.pt"
    one = tp_cases.run(tmp_path, "killed", workers=1, storage=remote, steps=5, out=str(out))
    assert one.metrics is not None
    assert one.metrics["step"] == 5
    taken = torch.load(out, weights_only=True)
    assert taken.pop("step") == 4
    assert all(torch.equal(taken[name], wanted[f"model.{name}"]) for name in taken)


def test_a_loop_of_ones_own(remote: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    """Under torchrun, into a bucket: a rank is killed, both go on from what both wrote, and end with the same bits."""
    told = {"run": f"{remote}/loop", "steps": 4, "kill": 3}
    run_killed_then_again(tp_cases.__file__, told)
    run = hf.Result.from_path(told["run"])
    assert run.checkpoint is not None
    assert [one.step for one in holdfast.megatron.Keeper(told["run"]).checkpoints()] == [
        4,
        3,
        2,
    ]  # newest, resumed from, best
    found = whole(run.checkpoint.to_directory(tmp_path / "files"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_damage(tmp_path: Path) -> None:
    """A damaged file is refused before Megatron reads anything."""
    folder = tmp_path / "run"
    result = tp_cases.run(folder, "run", workers=1, steps=1)
    assert result.checkpoint is not None
    file = Path(result.checkpoint.path) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(hf.CorruptCheckpointError, match=r"__0_0\.distcp"):
        holdfast.megatron.load({}, result.checkpoint)
