"""Folders as DeepSpeed writes them, made here by hand; the real ones are in tests/frameworks/deepspeed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2), "d": ()}
WORLD = 3


class Opener:
    """Would make a file if somebody made it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) for name, shape in SHAPES.items()
    }


def write(folder: Path, stage: int, **more: Any) -> dict[str, torch.Tensor]:
    """Write the files of three ranks; returns what has to come out."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7\n")
    weights, mean = tensors(), torch.arange(4.0)
    head: dict[str, Any] = {"global_steps": 7, "ds_version": "0", "lr_scheduler": {"last": 3}, "note": "mine", **more}
    if stage == 0:
        head |= {"module": OrderedDict(weights), "buffer_names": [], "optimizer": {"state": {}}}
        torch.save(head, tag / "mp_rank_00_model_states.pt")
        return weights
    groups = [OrderedDict((name, torch.Size(SHAPES[name])) for name in names) for names in (("a", "b"), ("c", "d"))]
    head |= {"buffer_names": ["mean"], "param_shapes": groups, "shared_params": {"tied": "a"}}
    head["module"] = OrderedDict(mean=mean, **({} if stage == 3 else weights))
    for rank in range(WORLD):
        head["frozen_param_shapes"] = OrderedDict(frozen=torch.Size((5,)))
        piece = torch.arange(6.0)[2 * rank : 2 * rank + 2] if stage == 3 else torch.arange(5.0)
        head["frozen_param_fragments"] = OrderedDict(frozen=piece)
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(head, tag / name)
        flat = [shard(group, weights, rank, stage) for group in groups]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage, "partition_count": WORLD, key: flat, "loss_scaler": Opener(folder / "was-here")}
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return {**weights, "tied": weights["a"], "mean": mean, "frozen": torch.arange(5.0)}


def shard(group: OrderedDict[str, Any], weights: dict[str, torch.Tensor], rank: int, stage: int) -> torch.Tensor:
    if stage == 3:  # each parameter is padded and cut
        return torch.cat([padded(weights[name].reshape(-1))[rank] for name in group])
    return padded(torch.cat([weights[name].reshape(-1) for name in group]))[rank]


def padded(flat: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % WORLD), value=float("nan")).reshape(WORLD, -1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stages(tmp_path: Path, stage: int) -> None:
    """Pieces of all ranks are put together without padding; plain data comes along; nothing of a pickle is run."""
    wanted = write(tmp_path / "theirs", stage)
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert done.format == "deepspeed"
    assert (done.checkpoint.step, done.checkpoint.verify().ok) == (7, True)
    found = hf.load(done.checkpoint)
    assert found["model"].keys() == wanted.keys()
    assert all(torch.equal(found["model"][name], wanted[name]) for name in wanted)
    assert (found["scheduler"], found["note"]) == ({"last": 3}, "mine")
    assert [path for path, _ in done.not_taken] == ["optimizer"]
    assert not (tmp_path / "theirs/was-here").exists()


def test_the_folder_of_a_tag(tmp_path: Path) -> None:
    """The folder of one tag is taken, too."""
    write(tmp_path / "theirs", 2)
    assert hf.import_checkpoint(tmp_path / "theirs/global_step7", tmp_path / "ours").format == "deepspeed"


def test_values_of_the_client_with_our_names(tmp_path: Path) -> None:
    """What a client keeps under "model" or "scheduler" comes in the place of neither weights nor scheduler."""
    weights = {"w": torch.ones(2, 3)}
    of_client = {"model": {"w": torch.zeros(5)}, "scheduler": {"mine": 1}, "note": "x"}
    head = {"module": weights, "buffer_names": [], "param_shapes": None, "lr_scheduler": {"last": 3}, **of_client}
    torch.save(head, tmp_path / "mp_rank_00_model_states.pt")
    done = hf.import_checkpoint(tmp_path, tmp_path / "ours")
    assert [path for path, _ in done.not_taken] == ["model"]
    found = hf.load(done.checkpoint)
    assert torch.equal(found["model"]["w"], weights["w"])
    assert (found["scheduler"], found["lr_scheduler"], found["note"]) == ({"mine": 1}, {"last": 3}, "x")


def test_what_lies_beside(tmp_path: Path) -> None:
    """Files of others, in the folder of the tag and beside it, are named; DeepSpeed's own script and ours are not."""
    write(tmp_path / "theirs", 2)
    for name in ("rng_state_0.pth", "trainer_state.json", "zero_to_fp32.py", "global_step7/notes.txt"):
        (tmp_path / "theirs" / name).write_text("")
    (tmp_path / "theirs" / "global_step3").mkdir()
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    wanted = ["global_step3", "global_step7/notes.txt", "rng_state_0.pth", "trainer_state.json"]
    assert [path for path, _ in done.not_taken] == [*wanted, "optimizer"]


@pytest.mark.parametrize(
    "name", ["layer_1_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt"]
)
def test_experts_are_refused(tmp_path: Path, name: str) -> None:
    """A part of the model that lies in files of its own is never left out without a word."""
    write(tmp_path / "theirs", 2)
    (tmp_path / "theirs/global_step7" / name).write_bytes(b"")
    with pytest.raises(hf.errors.UnsupportedStateError, match=r"experts.*ds_to_universal"):
        hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_cut_parameters_without_their_files(tmp_path: Path) -> None:
    """What is left of a cut parameter in the model's file is never taken for the parameter."""
    write(tmp_path / "theirs", 3)
    tag = tmp_path / "theirs/global_step7"
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    for path in tag.glob("*_model_states.pt"):
        head = torch.load(path, weights_only=True)
        head["module"].update((name, torch.empty(0)) for name in SHAPES)
        torch.save(head, path)
    with pytest.raises(hf.CorruptCheckpointError, match="is cut"):
        hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    "more",
    [
        {"param_shapes": 5},
        {"param_shapes": [{"a": (1 << 40,)}]},
        {"param_shapes": [{"a": "wrong"}]},
        {"module": 3},
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    """Files that contradict each other are refused, and nothing is left at the destination."""
    write(tmp_path / "theirs", 2)
    path = tmp_path / "theirs/global_step7/mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), **more}, path)
    with pytest.raises(hf.CorruptCheckpointError):
        hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
