"""DeepSpeed ZeRO-2 and ZeRO-3 on two workers, over gloo on the CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zero_cases
from launch_kit import run_killed_then_again
from object_kit import moto_bucket

import holdfast as hf
import holdfast.deepspeed


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def weights(source: Any, target: Path) -> dict[str, Any]:
    """Import what DeepSpeed has written, and give the weights."""
    done = hf.import_checkpoint(source, target)
    assert done.format == "deepspeed"
    assert done.checkpoint.verify().ok
    assert done.checkpoint.step == 4
    return dict(hf.load(done.checkpoint)["model"])


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    with moto_bucket() as uri:
        yield f"{uri}/deepspeed"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a ZeRO-2 training that nobody disturbs."""
    return zero_cases.run(tmp_path_factory.mktemp("alone"), "alone", stage=2)[1]


@pytest.fixture(scope="module")
def stage_2(remote: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[hf.Result, Any, Path]:
    """A training in a bucket, one rank of which was killed; its result, live weights, and newest files."""
    root = tmp_path_factory.mktemp("stage_2")
    result, live = zero_cases.run(root, "killed", stage=2, kill=3, storage=remote)
    assert result.checkpoint is not None
    return result, live, Path(result.checkpoint.to_directory(root / "files"))


def test_a_decoupled_writer_is_refused() -> None:
    """DeepSpeed would still be writing when the directory is committed."""

    class Decoupled:
        def is_decoupled(self) -> bool:
            return True

    with pytest.raises(hf.errors.ConfigError, match="Decoupled writes after"):
        holdfast.deepspeed.report({}, SimpleNamespace(checkpoint_engine=Decoupled()))


def test_stage_2(stage_2: tuple[hf.Result, Any, Path], alone: dict[str, Any], tmp_path: Path) -> None:
    """A rank is killed; all go on from what both reported, and end with the same bits, which the import finds too."""
    result, live, files = stage_2
    assert len(result.attempts) == 2
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2]  # and the newest, which always stays
    assert {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)} <= set(
        os.listdir(files / "deepspeed")
    )
    assert same(live, alone)
    assert same(weights(files, tmp_path / "imported"), alone)


def test_stage_3(remote: str, tmp_path: Path) -> None:
    """The same with cut parameters, bfloat16 and some frozen; the import finds the float32 masters."""
    options = {"stage": 3, "half": True, "frozen": True}
    _, alone = zero_cases.run(tmp_path, "alone", **options)
    result, live = zero_cases.run(tmp_path, "killed_3", kill=3, storage=remote, **options)
    assert len(result.attempts) == 2
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2]
    assert same(live, alone)
    assert result.checkpoint is not None
    found = weights(result.checkpoint, tmp_path / "imported")
    assert found["3.weight"].dtype is torch.float32
    assert live["3.weight"].dtype is torch.bfloat16
    assert same({name: value.to(live[name].dtype) for name, value in found.items()}, live)


def test_a_loop_of_ones_own(remote: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Under torchrun, into a bucket: a rank is killed, both go on from what both wrote, and end with the same bits."""
    told = {"run": f"{remote}/loop", "out": str(tmp_path / "out.pt"), "stage": 2, "steps": 4, "kill": 3}
    run_killed_then_again(zero_cases.__file__, told)
    assert same(torch.load(told["out"], weights_only=True), alone)
    run = hf.Result.from_path(told["run"])
    assert [one.step for one in holdfast.deepspeed.Keeper(told["run"]).checkpoints()] == [
        4,
        3,
        2,
    ]  # newest, resumed from, best
    assert same(weights(run.checkpoint, tmp_path / "imported"), alone)


def test_damage(stage_2: tuple[hf.Result, Any, Path], tmp_path: Path) -> None:
    """A damaged file is refused before DeepSpeed unpickles anything."""
    local = Path(shutil.copytree(stage_2[2], tmp_path / "local"))
    file = local / "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(hf.CorruptCheckpointError, match="zero_pp_rank_1"):
        holdfast.deepspeed.load(None, local)  # before it looks at the engine


@pytest.mark.parametrize("stage", [0, 3])
def test_another_stage(stage_2: tuple[hf.Result, Any, Path], stage: int) -> None:
    """What DeepSpeed ends with a bare assertion or an error from its insides is refused with both stages."""
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: stage, load_universal_checkpoint=lambda: False,
        load_checkpoint=lambda directory, **_: (directory, {"step": 4}),
    )  # fmt: skip
    with pytest.raises(hf.CheckpointError, match=f"saved with ZeRO stage 1 or 2, and this engine has stage {stage}"):
        holdfast.deepspeed.load(engine, stage_2[2])
    if stage == 0:  # weights fit
        assert holdfast.deepspeed.load(engine, stage_2[2], load_module_only=True) == {"step": 4}


def test_gradients_that_are_accumulated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed does not save them: a save between two micro-batches of a step says so."""
    engine = SimpleNamespace(
        _is_gradient_accumulation_boundary=None, managed_gradient_accumulation=lambda: True, global_rank=0,
        gradient_accumulation_steps=lambda: 3, micro_steps=6, save_checkpoint=lambda directory, **_: None,
    )  # fmt: skip
    with holdfast.deepspeed.Keeper(tmp_path / "run") as keeper:
        keeper.save(engine, step=2)
        assert caplog.messages == []
        engine.micro_steps = 7
        keeper.save(engine, step=3)
    assert "after 1 of the 3 micro-batches" in caplog.text


def test_what_the_import_refuses(stage_2: tuple[hf.Result, Any, Path], tmp_path: Path) -> None:
    """A rank's file that is missing, several model-parallel ranks, and a tag that leads out of the folder."""
    files = stage_2[2] / "deepspeed"
    missing = Path(shutil.copytree(files, tmp_path / "missing"))
    (missing / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(hf.CorruptCheckpointError, match="1 files of ranks"):
        hf.import_checkpoint(missing, tmp_path / "a")
    parallel = Path(shutil.copytree(files, tmp_path / "parallel"))
    (parallel / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(hf.UnsupportedStateError, match="model-parallel"):
        hf.import_checkpoint(parallel, tmp_path / "b")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "latest").write_text("../missing")
    with pytest.raises(hf.CorruptCheckpointError, match="names"):
        hf.import_checkpoint(outside, tmp_path / "c", format="deepspeed")


def test_nothing_of_deepspeed(tmp_path: Path) -> None:
    """A checkpoint without DeepSpeed's files is an error, not an engine that starts anew."""

    class Engine:
        def load_checkpoint(self, directory: str, **_: Any) -> tuple[None, None]:
            return None, None

    checkpoint = hf.save(tmp_path / "other", {"x": 1})
    with pytest.raises(hf.CheckpointError, match="latest"):
        holdfast.deepspeed.load(Engine(), checkpoint)
