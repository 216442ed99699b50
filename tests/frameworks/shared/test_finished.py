"""Directories that a framework wrote at a place of its own are reported without a second copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.frameworks import huggingface
from holdfast.torch import TorchTrainer

KINDS = ("read", "moved", "cloned", "own", "elsewhere")


def cloned(source: str, target: str) -> bool:
    shutil.copytree(source, target)
    return True


def write(directory: Path, rank: int) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"rank-{rank}").write_text(f"{directory.name} {rank}")
    return str(directory)


def report_in_every_way(config: dict[str, Any]) -> None:
    rank, folder = hf.get_context().get_world_rank(), Path(config["folder"])
    for kind in KINDS:
        if kind == "cloned":  # as on a file system that shares blocks
            huggingface.clone_tree = cloned
        if kind == "elsewhere":  # as on another file system than the run's
            huggingface._moved = lambda source, target: False
        directory = write(folder / (f"{kind}-{rank}" if kind == "own" else kind), rank)
        huggingface.report_finished(
            directory, {"kind": kind}, inside="inner", delete=kind in ("moved", "own", "elsewhere"), timeout_s=60
        )
    try:
        huggingface.report_finished(str(folder / "nothing"), {}, inside="inner", timeout_s=60)
    except hf.CheckpointNotFoundError:
        assert rank == 0
        hf.report({})
    torch.distributed.barrier()  # rank 0 holds the store through which the ranks meet


@pytest.mark.usefixtures("forked")
def test_every_way(tmp_path: Path) -> None:
    """Read where they are, taken away, cloned, from each rank its own, from another disk: all files arrive in `inner`.

    What may not be deleted is still there, the rest is gone, and no place in between is left.
    """
    result = TorchTrainer(
        report_in_every_way,
        train_loop_config={"folder": str(tmp_path / "out")},
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(name="run", storage_path=tmp_path),
    ).fit()
    assert [kind for kind in result.metrics_dataframe["kind"] if isinstance(kind, str)] == list(KINDS)
    for number, kind in enumerate(KINDS):
        inner = tmp_path / "run" / f"checkpoint_{number:06d}" / "inner"
        found = {one.name: one.read_text() for one in inner.iterdir()}
        names = ["own-0", "own-1"] if kind == "own" else [kind, kind]
        assert found == {f"rank-{rank}": f"{name} {rank}" for rank, name in enumerate(names)}
        assert hf.Checkpoint(inner.parent).verify().ok
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["cloned", "read"]
    assert not list((tmp_path / "run").glob(".incoming-*/*"))


def test_an_output_that_is_not_shared() -> None:
    """Refused only if rank 0 misses files: a mount may have other numbers elsewhere, and a listing may come late."""
    one, other = ["out", 1, 5, ["model", "rng_0"]], ["out", 1, 6, ["rng_1"]]
    huggingface.check_shared("out", [one, None, one, ["out", 7, 5, ["model", "rng_9"]], ["out", 1, 9, ["rng_0"]]])
    with pytest.raises(hf.errors.ConfigError, match=r"rank 1 has written rng_1 .* must be on a file system"):
        huggingface.check_shared("out", [one, other])


def test_outside_of_a_worker(tmp_path: Path) -> None:
    """Without a function trainer the error says what to use; one process waits for nobody."""
    with pytest.raises(hf.SessionError, match="TorchTrainer"):
        huggingface.report_finished(write(tmp_path / "out", 0), {}, inside="inner")
    assert huggingface.all_written(str(tmp_path / "out"))
    assert huggingface.all_written(str(tmp_path / "out"), shared=True)
    assert not huggingface.all_written(str(tmp_path / "nothing"))
