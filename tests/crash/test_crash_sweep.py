"""A process that dies before any one of its disk operations leaves the old or the new checkpoint, and no litter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.testing import CRASH_EXIT_CODE

FILE = str(Path(__file__).with_name("crash_scenarios.py"))
CASES = {
    "first_save": "prepare_empty",
    "next_save": "prepare_run",
    "first_model": "prepare_empty",
    "next_model": "prepare_run",
    "index_grows": "prepare_run",
    "overwrite": "prepare_one",
    "resume": "prepare_run",
    "late_metrics": "prepare_run",
    "pin": "prepare_run",
}


@pytest.fixture(scope="session")
def bases(server, tmp_path_factory):
    """What there is before each case, made once."""
    root = tmp_path_factory.mktemp("bases")
    for prepare in sorted(set(CASES.values())):
        server.run(f"{FILE}:{prepare}", str(root / prepare)).checked()
    return root


def run_case(server, bases, tmp_path, case, at, go_on=False):
    """Kill ``case`` at operation ``at`` on a copy of its base, then look; the step found, and whether it died."""
    root, diary = tmp_path / f"{case}-{at}", tmp_path / f"{case}-{at}.diary"
    copy_tree(bases / CASES[case], root)
    died = server.run(f"{FILE}:{case}", str(root), str(diary), at)
    assert died.status in (CRASH_EXIT_CODE, 0), (at, died)
    looked = server.run(f"{FILE}:check_{case}", str(root), str(diary), go_on)
    assert looked.status == 0, f"{case}: killed at operation {at}: {looked.error}\n{looked.output}"
    shutil.rmtree(root)
    return looked.value, died.status == CRASH_EXIT_CODE


def copy_tree(source, target):
    """Copy with hard links kept as hard links among the copies."""
    seen = {}
    for path in sorted(source.rglob("*")):
        new = target / path.relative_to(source)
        if path.is_symlink():
            new.symlink_to(os.readlink(path))
            continue
        if path.is_dir():
            new.mkdir(parents=True, exist_ok=True)
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        inode = path.stat().st_ino
        if inode in seen:
            new.hardlink_to(seen[inode])
        else:
            shutil.copy2(path, new)
            seen[inode] = new


def sweep(server, bases, tmp_path, case, *, stride=1, offset=0, go_on=False):
    root = tmp_path / "dry"
    copy_tree(bases / CASES[case], root)
    count = server.run(f"{FILE}:{case}", str(root), str(tmp_path / "dry.diary")).checked()
    deaths, steps = 0, set()
    for at in range(offset, count, stride):
        step, died = run_case(server, bases, tmp_path, case, at, go_on)
        deaths += died
        steps.add(step)
    return count, deaths, steps


def test_some_operations(server, bases, tmp_path):
    """A fifth of the operations of a first save, to notice at once; all of all cases are in CI's sweep."""
    count, deaths, steps = sweep(server, bases, tmp_path, "first_save", offset=1, stride=5)
    assert deaths >= 0.15 * count
    assert steps == {0, 1}, "the sweep must see both sides of the commit"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_operation(server, bases, tmp_path, case):
    """Killed before operation k, for every k: a normal start finds the right checkpoint bit-exact and cleans up."""
    count, deaths, steps = sweep(server, bases, tmp_path, case)
    assert count >= 5
    assert deaths >= 0.9 * count, "the number of operations may vary a little with the threads, not more"
    both = {
        "first_save": {0, 1},
        "first_model": {0, 1},
        "next_save": {3, 4},
        "next_model": {3, 4},
        "index_grows": {3, 4, 5},
        "overwrite": {1, 2},
    }
    expected = both.get(case, {3})
    assert steps == expected, "the sweep must see both sides of the commit"


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "index_grows"])
def test_the_run_goes_on(server, bases, tmp_path, case):
    """After each such death the run can be continued: two more saves, retention, no litter."""
    sweep(server, bases, tmp_path, case, go_on=True)


def test_a_sweep_that_loses_something_fails(server, bases, tmp_path):
    """The checks can fail: a flipped byte, a touched foreign file, litter, or a lost promise is reported."""
    for breakage in ("flip", "foreign", "litter", "promise"):
        root, diary = tmp_path / breakage, tmp_path / f"{breakage}.diary"
        copy_tree(bases / "prepare_run", root)
        if breakage == "flip":
            target = next((root / "step_00000003").glob("*.safetensors"))
            data = bytearray(target.read_bytes())
            data[-1] ^= 1
            target.write_bytes(data)
        elif breakage == "foreign":
            (root / "notes.txt").write_text("yours")
        elif breakage == "litter":
            (root / "step_00000003" / "model-00000-0badc0de-1.safetensors").write_text("x")
        else:
            diary.write_text('{"durable": 4}\n')
        looked = server.run(f"{FILE}:check_resume", str(root), str(diary))
        assert looked.status == 1, breakage
        assert "AssertionError" in looked.error
