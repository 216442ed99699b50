"""Files of many ranks are removed many at once, by several threads: a crash in between harms nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import many_scenarios as scenarios
import pytest

from holdfast.storage.local import local_storage
from holdfast.testing import CRASH_EXIT_CODE, FaultyOps, FaultyStorage, power_cut_states, snapshot

FILE = str(Path(__file__).with_name("many_scenarios.py"))


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_death_before_any_operation(server, tmp_path, stride):
    """In the commit of the parts of sixteen ranks and in its removal: all of it or nothing, and no litter."""
    scenarios.store_parts(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "dry")
    count = server.run(f"{FILE}:commit_and_remove", str(tmp_path / "dry")).checked()
    assert count >= 2 * scenarios.NUM_RANKS
    found = []
    for at in range(0, count, stride):
        root = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "base", root)
        assert server.run(f"{FILE}:commit_and_remove", str(root), at).status == CRASH_EXIT_CODE
        found.append(scenarios.check(root))
    assert True in found
    assert found[0] is found[-1] is False, "the sweep must see both sides of the commit, and of the removal"


@pytest.mark.parametrize("num_states", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_moment(tmp_path, monkeypatch, num_states):
    """What a disk may hold of it: all of the checkpoint or nothing."""
    monkeypatch.setattr(local_storage, "_DELETED_BY_EACH", 1)
    root = tmp_path / "run"
    scenarios.store_parts(root)
    ops, base = FaultyOps(record=True), snapshot(tmp_path)
    scenarios.commit_and_remove(root, storage=FaultyStorage(root, ops=ops))
    found = set()
    for number, state in enumerate(power_cut_states(ops.log, base, max_states=num_states)):
        home = state.materialise(tmp_path / f"state-{number}") / "run"
        found.add(scenarios.check(home))
    assert found == {True, False}
