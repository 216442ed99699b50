"""After a power cut at any moment a start finds every checkpoint that was promised, bit-exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import crash_scenarios as scenarios
import pytest
from catalog_kit import catalog_of

import holdfast as hf
from holdfast.run import index
from holdfast.testing import FaultyOps, FaultyStorage, power_cut_states, snapshot

NUM_STATES = {"default": 60, "slow": 900}


def record_saves(root, ops, *, saves):
    """Save steps of a run, with a mark for each promise."""
    storage = FaultyStorage(root, ops=ops)
    state = scenarios.state_at(0)
    with scenarios.quiet(), scenarios.checkpointer(storage, state) as ck:
        for _ in range(saves):
            scenarios.one_step(ck, state)
            ck.save()
            ck.wait()
            ops.mark(str(ck.global_step))


def record_many(root, ops):
    scenarios.many_rows()
    record_saves(root, ops, saves=2)


def look_many(root, marks, before):
    """The index, of which a part is written beside run.json, says what the manifests say, or says that it is lost."""
    scenarios.many_rows()
    listed = {one.name: (one.step, one.metrics) for one in catalog_of(root).records()}
    scanned = catalog_of(root)
    scanned.scan()
    assert listed == {one.name: (one.step, one.metrics) for one in scanned.records()}
    return look_run(root, marks, before)


def record_overwrite(root, ops):
    storage = FaultyStorage(root, ops=ops)
    hf.save(hf.Checkpoint.at(storage, "best"), scenarios.state_at(2), overwrite=True)
    ops.mark("2")


def look_run(root, marks, before):
    state = scenarios.state_at(0)
    with scenarios.quiet(), scenarios.checkpointer(scenarios.threaded(root), state) as ck:
        step = ck.global_step
        assert step >= max([before, *map(int, marks)]), f"found step {step}, promised {marks}"
        scenarios.assert_state_equal(state, scenarios.state_at(step))
    scenarios.check_foreign(root)
    return step


def look_overwrite(root, marks, _):
    state = scenarios.state_at(0)
    hf.load(Path(root, "best"), into=state)
    step = len(state["note"].log)
    assert step >= max([1, *map(int, marks)])
    scenarios.assert_state_equal(state, scenarios.state_at(step))
    return step


CASES = {
    # saves of steps 1 and 2; step 2, 3, 4 with links and a deletion; a replacement
    "first": (scenarios.prepare_empty, lambda root, ops: record_saves(root, ops, saves=1), look_run, 0),
    "next": (scenarios.prepare_run, lambda root, ops: record_saves(root, ops, saves=2), look_run, 3),
    "many": (scenarios.prepare_run, record_many, look_many, 3),
    "overwrite": (scenarios.prepare_one, record_overwrite, look_overwrite, 1),
}


@pytest.fixture(autouse=True)
def _few_and_many(monkeypatch):
    """Some cases change what many rows are."""
    monkeypatch.setattr(index, "_FEW_BYTES", index._FEW_BYTES)
    monkeypatch.setattr(index, "_MANY_BYTES", index._MANY_BYTES)


def cut(tmp_path, case, num_states, ops=None):
    prepare, record, look, before = CASES[case]
    root = tmp_path / "run"
    prepare(root)
    ops = ops or FaultyOps(record=True)
    base = snapshot(tmp_path)
    record(root, ops)
    found, count = set(), 0
    for number, state in enumerate(power_cut_states(ops.log, base, max_states=num_states)):
        target = tmp_path / f"state-{number}"
        home = state.materialise(target) / "run"
        try:
            found.add(look(str(home), state.marks, before))
        except Exception as error:
            raise AssertionError(
                f"state {number}, {state.num_done} operations done, promised {state.marks}: {error!r}"
            ) from error
        shutil.rmtree(target)
        count += 1
    return found, count


@pytest.mark.parametrize("case", [case for case in CASES if case != "many"])
def test_promises_are_kept(tmp_path, case):
    """A sample of the states over the whole recording: what `wait` promised is found, and nothing else than whole."""
    found, count = cut(tmp_path, case, NUM_STATES["default"])
    assert count >= NUM_STATES["default"] // 3
    assert len(found) >= 2, "the sample must see both sides of the commit"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_more_states(tmp_path, case):
    """The same for many more states."""
    found, count = cut(tmp_path, case, NUM_STATES["slow"])
    assert count >= 100, "states that are alike are built once"
    assert len(found) >= 2


class NoSync(FaultyOps):
    """A disk whose fsync is left out."""

    def fsync(self, fd):
        pass


def test_the_kit_notices_a_missing_fsync(tmp_path):
    """Without fsync of the files some state of the sample loses a promised checkpoint: it is able to fail."""
    with pytest.raises(AssertionError, match="promised"):
        cut(tmp_path, "overwrite", NUM_STATES["default"], NoSync(record=True))
