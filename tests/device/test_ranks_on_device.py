"""Several ranks, each on a device of its own, that save together."""

from pathlib import Path

import late_device
import pytest
from ranks_kit import RankServer

import holdfast as hf

CASES = str(Path(__file__).with_name("rank_cases.py"))


@pytest.fixture(scope="module")
def ranks():
    if (why := late_device.missing()) is not None:
        pytest.skip(why)
    late_device._build()
    with RankServer(path=[Path(late_device.__file__).parent]) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ranks_save_and_go_on_together(how, ranks, tmp_path):
    """DDP and FSDP2: each rank copies its share late; a run of two lives ends as one of a single life."""
    whole = ranks.checked(f"{CASES}:train", str(tmp_path / "whole"), 6, how=how)
    ranks.checked(f"{CASES}:train", str(tmp_path / "parts"), 4, how=how)
    parts = ranks.checked(f"{CASES}:train", str(tmp_path / "parts"), 6, how=how)
    assert [one["begun"] for one in parts] == [4, 4]
    assert all(one["late"] and not one["said"] and not one["skipped"] for one in whole + parts)
    assert [one["sums"]["6"] for one in parts] == [one["sums"]["6"] for one in whole]
    # Every rank of DDP holds the whole, of FSDP2 its part.
    words = whole[0]["sums"]["6"] + (whole[1]["sums"]["6"] if how == "fsdp" else 0)
    assert ranks.checked(f"{CASES}:weights", str(tmp_path / "parts")) == [words] * 2


def test_a_tensor_that_changes_on_one_rank_costs_all_of_them_that_save(ranks, tmp_path):
    """The other ranks drop their parts and go on; the next save is whole, and of the values that stood there."""
    told = ranks.checked(f"{CASES}:train", str(tmp_path), 8, change_after=4)
    assert [one["skipped"] for one in told] == [1, 1]
    assert len(told[0]["said"]) == 1
    assert "step 4 was NOT saved: " in told[0]["said"][0]
    assert "changed while this save was copied" in told[0]["said"][0]
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step_*")) == [2, 6, 8]
    assert ranks.checked(f"{CASES}:weights", str(tmp_path / "step_00000006")) == [told[0]["sums"]["6"]] * 2
    assert hf.Checkpoint(tmp_path / "step_00000006").verify(deep=True).ok
