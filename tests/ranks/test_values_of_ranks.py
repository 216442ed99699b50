"""Plain data and objects that each rank has for itself, without `holdfast.PerRank`."""

from __future__ import annotations

from pathlib import Path

CASES = str(Path(__file__).with_name("values_cases.py"))


def test_each_rank_goes_on_with_its_own_values(ranks, tmp_path):
    """Samplers, counters, lists and metrics of two ranks that stop and start again: not rank 0's on both.

    One rank that goes on where there were two has those of rank 0: the block names what differed, and nothing else.
    """
    first = ranks.checked(f"{CASES}:train", str(tmp_path), 2)
    assert first[0]["ended"] != first[1]["ended"]
    two = ranks.checked(f"{CASES}:train", str(tmp_path), 3)
    assert [one["begun"] for one in two] == [one["ended"] for one in first]
    (one,) = ranks.ranks(f"{CASES}:train", str(tmp_path), 3, world_size=1)
    assert one.checked()["begun"] == two[0]["ended"]
    (said,) = [line for line in one.output.splitlines() if "other values on other ranks" in line]
    assert said.split(": ")[0].strip() == "average, data, losses, parts/0, parts/2, sampler"
    assert "when 2 saved; 1 go on, each with that of rank 0" in said


def test_save_and_load_keep_them_too(ranks, tmp_path):
    """`hf.save` of all ranks, `hf.load` with and without a live state; one process alone is told what it lacks.

    What comes back as rank 0's although others hold something else is said when it is saved.
    """
    outcomes = ranks.ranks(f"{CASES}:functions", str(tmp_path))
    for rank, one in enumerate(outcome.checked() for outcome in outcomes):
        assert one["anew"] == one["into"] == [7 + rank, 100 * rank, [1, 2]]
        assert one["big"] == [0.0], "an object with more than 1 MiB of tensors is rank 0's"
    said = [line for line in outcomes[0].output.splitlines() if "whose values alone are stored" in line]
    assert [line.partition(": other values on rank 1 ")[0] for line in said] == ["holdfast: big/each/0, big/total"]
    (single,) = ranks.checked(f"{CASES}:alone", str(tmp_path), world_size=1)
    assert single["position"] == 0
    (words,) = single["words"]
    assert "data, parts/0, sampler: other values on other ranks when 2 saved" in words


def test_buffers_and_learning_rates_that_nothing_makes_alike_are_said(ranks, tmp_path):
    """Rank 0's are stored, which DDP gives to all in the next step anyway; BatchNorm's matter to no step.

    So are the hyper-parameters of optimizers, and what these keep for parameters of no module.
    What each rank is given back all the same (`PerRank`) is not said; those of an average are, if they differ.
    """
    outcomes = ranks.ranks(f"{CASES}:buffers", str(tmp_path))
    assert [one.status for one in outcomes] == [0, 0], outcomes
    said = [line for line in outcomes[0].output.splitlines() if "whose values alone are stored" in line]
    names = [line.partition(": other values on rank 1 ")[0] for line in said]
    lonely = "lonely/state/param.0/momentum_buffer"
    assert names == [
        f"holdfast: apart/scale, {lonely}, optimizer/param_groups, spread/scale",
        "holdfast: average/module.running_mean",
    ]
