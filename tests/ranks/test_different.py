"""Ranks that hold different things: stages of a pipeline, experts, plain dictionaries with other keys."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast as hf

CASES = str(Path(__file__).with_name("different_cases.py"))


def test_a_save_of_dcp_loads_into_another_layout(ranks, tmp_path):
    """What each rank had alone is found by name by another one; what was sharded by rows is loaded by columns."""
    found = ranks.checked(f"{CASES}:through_dcp", str(tmp_path), world_size=4)
    assert [one["keys"] for one in found] == [["stage0", "stage1", "stage2", "stage3", "w"]] * 4


def test_state_dicts_of_other_keys_are_united_or_refused(ranks, tmp_path):
    """Plain dictionaries that differ: refused unless somebody says that they may; then all of it is there by name."""
    found = ranks.checked(f"{CASES}:plain_dicts", str(tmp_path), world_size=3)
    for one in found:
        assert one["unsaid"] == found[0]["unsaid"]
        assert "ranks 1, 2 hold tensors that rank 0 does not have, 'model/layers.1.weight'" in one["unsaid"]
        assert "alike=[rank]" in one["unsaid"]
        assert "model/layers.0.weight" in one["nobody's"]
        assert "layers.1" not in one["nobody's"]
        assert "ranks 1, 2 and rank 0 hold different values of 'model/0.weight'" in one["one name"]
        assert "needs different names" in one["one name"]
        assert "rank 0 says" in one["no agreement"] or "rank 1 says" in one["no agreement"]
        assert "ConfigError" in one["not this one"]
        assert one["keys"] == [f"layers.{number}.weight" for number in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "stages"], "half a checkpoint is left"
    assert hf.Checkpoint(tmp_path / "stages").verify(deep=True).ok
    groups = hf.load(tmp_path / "stages")["optimizer"]["param_groups"]
    assert groups == [{"lr": 0.1, "params": [f"layers.{number}.weight" for number in range(3)]}]


def test_what_big_objects_of_some_ranks_hold_is_united_or_refused(ranks, tmp_path):
    """One rank's are stored, so what another one has under another name would be lost; as of plain dictionaries."""
    for one in ranks.checked(f"{CASES}:big_objects", str(tmp_path)):
        assert "rank 1 holds tensors that rank 0 does not have, 'object/layers.1'" in one["unsaid"]
        assert "holdfast.PerRank(...)" in one["unsaid"]
        assert "hold different values of 'optimizer/state/0/momentum_buffer'" in one["one name"]
        assert one["said"] == "fine"
        assert one["loaded"] == [[1.0], [2.0]]


def test_ranks_that_could_not_save_do_not_begin(ranks, tmp_path):
    """Other layers on each rank, unsaid: refused at the start, and not when the first save is due."""
    for one in ranks.checked(f"{CASES}:start_apart", str(tmp_path)):
        assert "CheckpointError: no save of these ranks could be committed: the state of rank 1" in one["unsaid"]
        assert "alike=[rank]" in one["unsaid"]
        assert "the names are the same" in one["frozen"]
        assert (one["said"], one["later"]) == ("fine", "fine")


@pytest.mark.parametrize(("how", "mesh_of"), [
    ("fsdp2", "names"),
    pytest.param("ddp", "own", marks=pytest.mark.slow),
    pytest.param("fsdp2", "own", marks=pytest.mark.slow),
])  # fmt: skip
def test_stages_are_saved_as_stages_and_loaded_as_anything(ranks, tmp_path, how, mesh_of):
    """Stage -> whole, whole -> stage, stage -> another stage, model and optimizer, with nothing said by the script."""
    found = ranks.checked(f"{CASES}:stages", str(tmp_path), how, mesh_of, world_size=4)
    assert [one["params"] for one in found] == [4 * 2 * 4] * 4
    assert hf.Checkpoint(tmp_path / "stages").verify(deep=True).ok


@pytest.mark.slow
def test_experts_of_some_ranks_beside_layers_of_all(ranks, tmp_path):
    """Expert parallelism inside FSDP: what all have is stored beside what some have; each finds its own by name."""
    assert ranks.checked(f"{CASES}:experts", str(tmp_path), world_size=4)


def test_dicts_of_another_order_do_not_hang(ranks, tmp_path):
    """Objects that use collectives in `state_dict` and `load_state_dict`, in dicts whose order differs."""
    found = ranks.checked(f"{CASES}:another_order", str(tmp_path), timeout_s=60)
    assert found == [{f"o{kind}": [kind + 10] * 2 for kind in range(3)}] * 2


def test_what_is_spread_otherwise_comes_back_as_it_was(ranks, tmp_path):
    """Factored optimizer state is spread again in a fresh optimizer; a rank may hold several shards of a tensor."""
    found = ranks.checked(f"{CASES}:odd_spreads", str(tmp_path))
    assert [one["shards"] for one in found] == [[[0.0], [2.0]], [[1.0], [3.0]]]
    assert [one["whole"] for one in found] == [[0.0, 1.0, 2.0, 3.0]] * 2
