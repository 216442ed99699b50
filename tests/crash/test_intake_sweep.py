"""Killed at any storage operation of an intake, of parts and their commit, or of a new attempt: all or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import intake_scenarios as scenarios
import pytest
from ranks_kit import LastingServer
from test_crash_sweep import copy_tree

from holdfast.testing import CRASH_EXIT_CODE, FaultyOps, FaultyStorage, power_cut_states, snapshot
from holdfast.writer.client import WriterClient

FILE = str(Path(__file__).with_name("intake_scenarios.py"))
CASES = list(scenarios.CASES)
INTAKES = [case for case in CASES if case != "attempts"]
NUM_STATES = {"default": 40, "slow": 600}


@pytest.fixture(scope="module")
def forks():
    with LastingServer(preload=(FILE,)) as one:
        yield one


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What there is before each case, made once: a run, and directories of a user beside it."""
    root = tmp_path_factory.mktemp("base") / "run"
    scenarios.prepare(root)
    return root


@pytest.fixture
def fresh(base, tmp_path):
    """Make a copy of the base; sources that the case names lie in it."""

    def make(name):
        root = tmp_path / name / "run"
        copy_tree(base, root)
        copy_tree(Path(f"{base}.user"), Path(f"{root}.user"))
        return root, root.parent / "promised"

    return make


def sweep(forks, base, fresh, case, *, stride=1, go_on=False):
    root, promised = fresh("dry")
    count = forks.run(f"{FILE}:run_case", case, str(root), str(promised)).checked()
    assert forks.run(f"{FILE}:check", case, str(root), str(promised), f"{base}.user").checked() == (case != "attempts")
    deaths, found = 0, set()
    for at in range(0, count, stride):
        root, promised = fresh(str(at))
        died = forks.run(f"{FILE}:run_case", case, str(root), str(promised), at)
        assert died.status in (CRASH_EXIT_CODE, 0), (at, died)
        deaths += died.status == CRASH_EXIT_CODE
        looked = forks.run(f"{FILE}:check", case, str(root), str(promised), f"{base}.user", go_on)
        assert looked.status == 0, f"{case}: killed at operation {at}: {looked.error}\n{looked.output}"
        found.add(looked.value)
        shutil.rmtree(root.parent)
    assert deaths >= 0.9 * count / stride - 1
    return count, found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_operation(forks, base, fresh, case):
    """Killed before operation k, for every k: a normal start finds the right checkpoint bit-exact and cleans up."""
    count, found = sweep(forks, base, fresh, case)
    assert count >= 15
    assert found == ({0} if case == "attempts" else {0, 1}), "the sweep must see both sides of the commit"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_run_goes_on(forks, base, fresh, case):
    """After each such death the run can be continued."""
    sweep(forks, base, fresh, case, go_on=True)


def writer_case(forks, base, fresh, case, at, times):
    root, promised = fresh(f"{case}-{at}-{times}")
    marker = root.parent / "marker"
    told = forks.run(f"{FILE}:writer_dies", case, str(root), str(promised), str(marker), at, times)
    assert told.status == 0, f"{case}: operation {at}: {told.error}\n{told.output}"
    looked = forks.run(f"{FILE}:check", case, str(root), str(promised), f"{base}.user", False)
    assert looked.status == 0, f"{case}: writer killed at {at}: {looked.error}\n{looked.output}\n{told.value}"
    shutil.rmtree(root.parent)
    return told.value, looked.value


def once(forks, base, fresh, case, numbers):
    died = 0
    for at in numbers:
        told, found = writer_case(forks, base, fresh, case, at, 1)
        assert told["error"] is None, f"{case}: operation {at}: one death must not be noticed: {told}"
        assert found == (case != "attempts")
        died += told["died"]
    return died


# Two of them are enough to notice at once; all of them run in CI's sweep.
@pytest.mark.parametrize(
    "case", [one if one in ("moved", "parts") else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_one_death_of_the_writer_is_repaired(forks, base, fresh, case):
    """Killed once, at one in seven of the operations: the job is repeated and the checkpoint is there, exact."""
    assert once(forks, base, fresh, case, range(3, 120, 7)) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_death_at_every_operation(forks, base, fresh, case):
    """The same at every operation."""
    assert once(forks, base, fresh, case, range(130)) >= 30


@pytest.mark.parametrize("case", INTAKES)
def test_two_deaths_fail_cleanly(forks, base, fresh, case):
    """Killed every time: an error that says so, the older checkpoint untouched, no litter after the next start."""
    errors = [writer_case(forks, base, fresh, case, at, 2)[0]["error"] for at in range(12, 60, 12)]
    assert sum("second time" in (error or "") for error in errors) >= 2, errors


def cut(base, fresh, tmp_path, case, num_states):
    """Lose power at any moment of a case, and look; which sides of the commit were seen, and how many states."""
    root, _ = fresh("cut")
    before = snapshot(root.parent)
    ops = FaultyOps(record=True)
    storage = FaultyStorage(root, ops=ops)
    with WriterClient.start(storage) as client:
        opened = scenarios.open_run(client, storage, "bbbbbbbb")
        scenarios.CASES[case][0](client, storage, opened, root)
        ops.mark("committed")
    found, count = set(), 0
    for number, state in enumerate(power_cut_states(ops.log, before, max_states=num_states)):
        target = tmp_path / f"state-{number}"
        home = state.materialise(target)
        promised = target / "promised"
        if state.marks:
            promised.write_text("done")
        try:
            found.add(scenarios.check(case, home / "run", promised, go_on=False))
        except Exception as error:
            raise AssertionError(
                f"state {number}, {state.num_done} operations done, {state.marks}: {error!r}"
            ) from error
        shutil.rmtree(target)
        count += 1
    return found, count


@pytest.mark.parametrize(
    "case", [one if one in ("moved", "copied") else pytest.param(one, marks=pytest.mark.slow) for one in INTAKES]
)
def test_power_cuts(base, fresh, tmp_path, case):
    """A sample of what a power cut may leave: what was committed is found, whole, and nothing else."""
    found, count = cut(base, fresh, tmp_path, case, NUM_STATES["default"])
    assert count >= 20
    assert found == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("case", INTAKES)
def test_more_power_cuts(base, fresh, tmp_path, case):
    """The same for many more states."""
    found, count = cut(base, fresh, tmp_path, case, NUM_STATES["slow"])
    assert count >= 60
    assert found == {0, 1}


def test_the_checks_can_fail(forks, base, fresh):
    """A flipped byte, a touched foreign file, litter, a lost promise, a changed source: each is reported."""
    for breakage in ("flip", "foreign", "litter", "promise", "source"):
        root, promised = fresh(breakage)
        forks.run(f"{FILE}:run_case", "copied", str(root), str(promised), 3)
        if breakage == "flip":
            (root / "checkpoint_000001/w.bin").write_bytes(b"x" * 5000)
        elif breakage == "foreign":
            (root / "notes.txt").write_text("yours")
        elif breakage == "litter":
            (root / "checkpoint_000001/part-00000-0badc0de-1.json").write_text("x")
        elif breakage == "promise":
            promised.write_text("done")
        else:
            (Path(f"{root}.user") / "rank0/same.pt").unlink()
        looked = forks.run(f"{FILE}:check", "copied", str(root), str(promised), f"{base}.user", False)
        assert looked.status == 1, breakage
        assert "AssertionError" in looked.error
