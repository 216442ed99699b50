"""`save` and `save_async` by all ranks together."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch

import holdfast as hf

CASES = str(Path(__file__).with_name("joint_cases.py"))


def test_all_ranks_save_one_checkpoint(ranks, tmp_path):
    """Two ranks make one checkpoint, each value of a rank is its own, and both futures end with it.

    With ``ranks="this"`` one of them makes a whole one by itself.
    """
    found = ranks.checked(f"{CASES}:save_twice", str(tmp_path))
    assert [one["rank"] for one in found] == [0, 1]
    for name in ("first", "second"):
        checkpoint = hf.Checkpoint(tmp_path / name)
        assert checkpoint.verify(deep=True).ok
        assert checkpoint.manifest.world_size == 2
        assert checkpoint.manifest.writers == (0, 1)
        assert not list((tmp_path / name).glob("part-*"))
    alone = hf.Checkpoint(tmp_path / "alone")
    assert (alone.manifest.world_size, alone.manifest.writers) == (1, (0,))
    assert alone.verify(deep=True).ok
    assert alone.load()["model"].keys() == checkpoint.load()["model"].keys()


def test_what_fails_on_one_rank_fails_on_all_and_moves_nothing(ranks, tmp_path):
    """A path, or a state, that is bad for one rank: one error for all; the next saves belong together again.

    A rank whose writer has ended for good ends the saves of all of them, and nobody waits for it.
    """
    first, second = ranks.checked(f"{CASES}:one_fails_early", str(tmp_path))
    for name in ("path", "interrupted"):
        assert first[name] == second[name]
    assert "rank 1: " in first["path"]
    assert "nonsense" in first["path"]
    assert first["interrupted"].startswith("SessionError: rank 1: save_async was interrupted")
    for name in ("after path", "after interrupted"):
        assert (first[name], second[name]) == ("fine", "fine")
    assert hf.load(tmp_path / "c")["n"] == 0
    assert "rank 1: its writer process has died" in first["dead writer"]
    assert "the writer process of this rank has ended" in second["dead writer"]
    assert first["quick"]
    assert second["quick"]


def test_ranks_that_do_not_do_the_same_are_told(ranks, tmp_path):
    """Other paths, an unsupported value or other weights on one rank, a missing rank: one error for all, in time."""
    first, second = ranks.checked(f"{CASES}:odd_calls", str(tmp_path))
    for name in ("paths", "one unsupported", "differing"):
        assert first[name] == second[name], name
    assert "do not save the same" in first["paths"]
    assert first["one unsupported"].startswith("UnsupportedStateError: rank 1: ")
    assert "rank 1 and rank 0 hold different values of 'm/bias', 'm/weight'" in first["differing"]
    assert second["missing"].startswith("HoldfastError: ")
    assert "rank 0 did not come to it" in second["missing"]
    assert "ranks='this'" in second["missing"]
    assert first["late"] == "alone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone"], "half a checkpoint is left"


def test_model_files_have_cut_tensors_written_whole(ranks, tmp_path):
    """What FSDP2 has cut lies whole where another library looks, each tensor once; what it costs is said once.

    The optimizer's state stays cut, and both come back.
    """
    found = ranks.checked(f"{CASES}:whole_tensors", str(tmp_path))
    for step, expected in found[0]["expected"].items():
        folder = tmp_path / f"run/step_{int(step):08d}"
        places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        read = {path: safetensors.torch.load_file(folder / path) for path in set(places.values())}
        assert {name: read[path][name].tolist() for name, path in places.items()} == expected
        assert sorted(name for tensors in read.values() for name in tensors) == sorted(expected)
        assert len(read) == 2, "both ranks write a share"
        checkpoint = hf.Checkpoint(folder)
        assert checkpoint.verify(deep=True).ok
        loaded = checkpoint.load()
        assert {name: tensor.tolist() for name, tensor in loaded["model"].items()} == expected
        (first, *_) = loaded["optimizer"]["state"].values()
        assert first["exp_avg"].shape == loaded["model"]["0.weight"].shape
    named = safetensors.torch.load_file(tmp_path / "named/one.safetensors")
    assert {name: tensor.tolist() for name, tensor in named.items()} == {"w": found[0]["named"]}
    assert hf.load(tmp_path / "named")["b"]["weight"].tolist() == found[0]["named"]
    assert [len(one["said"]) for one in found] == [2, 0]
    assert found[0]["said"][0].startswith("holdfast: model_files: 4 tensors (692 B) are cut over ranks.")
