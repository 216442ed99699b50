"""`Checkpointer` with several ranks."""

from __future__ import annotations

from pathlib import Path

import holdfast as hf
from holdfast.checkpoint.catalog import Catalog
from holdfast.storage.resolve import resolve

CASES = str(Path(__file__).with_name("joint_cases.py"))


def steps(root):
    return sorted(record.step for record in Catalog(resolve(root)).records())


def test_a_killed_run_goes_on_bit_exact(ranks, tmp_path):
    """DDP with BatchNorm and AdamW, killed after step 4: resumed it ends as one that was never interrupted."""
    plain = ranks.checked(f"{CASES}:train", str(tmp_path / "plain"), 7)
    died = ranks.ranks(f"{CASES}:train", str(tmp_path / "killed"), 7, crash_at=5)
    assert [one.status for one in died] == [9, 9], died
    again = ranks.checked(f"{CASES}:train", str(tmp_path / "killed"), 7)
    assert [one["start"] for one in again] == [4, 4]
    for rank in range(2):
        assert again[rank]["tensors"] == plain[rank]["tensors"]
        assert again[rank]["random"] == plain[rank]["random"]
    assert plain[0]["random"] != plain[1]["random"]
    assert steps(tmp_path / "plain") == [2, 4, 6, 7]
    checkpoint = hf.Checkpoint(tmp_path / "plain" / "step_00000006")
    assert checkpoint.verify(deep=True).ok
    assert checkpoint.manifest.writers == (0, 1)
