"""The writer process dies at any of its operations: the save succeeds, or fails cleanly after the second death."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_crash_sweep import bases, copy_tree  # noqa: F401 - a fixture

FILE = str(Path(__file__).with_name("crash_scenarios.py"))
COUNT = 150  # more than a life on the base run has


def writer_case(server, bases, tmp_path, at, times):  # noqa: F811
    root, diary, marker = (tmp_path / f"{name}-{at}" for name in ("run", "diary", "marker"))
    copy_tree(bases / "prepare_run", root)
    told = server.run(f"{FILE}:writer_dies", str(root), str(diary), str(marker), at, times)
    assert told.status == 0, f"operation {at}: {told.error}\n{told.output}"
    looked = server.run(f"{FILE}:check_run", str(root), str(diary), 3)
    assert looked.status == 0, f"killed at operation {at}: {looked.error}\n{looked.output}\n{told.value}"
    return told.value, looked.value


def once(server, bases, tmp_path, numbers):  # noqa: F811
    died = 0
    for at in numbers:
        told, step = writer_case(server, bases, tmp_path, at, 1)
        died += told["died"]
        assert told["error"] is None, f"operation {at}: one death must not be noticed: {told}"
        assert step == 4
    return died


def test_one_death_is_repaired(server, bases, tmp_path):  # noqa: F811
    """Killed once, at one in nineteen of the operations from start to close: training goes on and the step is saved."""
    assert once(server, bases, tmp_path, range(4, COUNT, 19)) >= 5


def test_two_deaths_fail_cleanly(server, bases, tmp_path):  # noqa: F811
    """Killed every time: an error that says so, the older checkpoint untouched, no litter after the next start."""
    errors = [writer_case(server, bases, tmp_path, at, 2)[0]["error"] for at in range(8, COUNT, 23)]
    assert sum("second time" in (error or "") for error in errors) >= 3, errors


@pytest.mark.slow
def test_one_death_at_every_operation(server, bases, tmp_path):  # noqa: F811
    """The same at every operation."""
    assert once(server, bases, tmp_path, range(COUNT)) >= 100
