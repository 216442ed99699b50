"""An owner that was taking over directories, or committing parts of several ranks, wakes up after it was taken over."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import handed_scenarios as scenarios
import intake_scenarios
import pytest
from test_crash_sweep import copy_tree

FILE = str(Path(__file__).with_name("handed_scenarios.py"))
CASES = [case for case in scenarios.ALL if case != "attempts"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "run"
    intake_scenarios.prepare(root)
    shutil.rmtree(root / intake_scenarios.NEW)  # so that the second owner may use the same name
    return root


def one_case(server, base, tmp_path, case, at, *, after=False, early=False):
    home = tmp_path / "case"  # without what the operation is known by
    copy_tree(base, home / "run")
    copy_tree(Path(f"{base}.user"), home / "run.user")
    args = (case, str(home / "run"), str(home / "diary"), at, after, early)
    outcome = server.run(f"{FILE}:run_case", *args, timeout_s=90.0)
    assert outcome.status == 0, (
        f"{case}: stopped at operation {at} ({after=}, {early=}): {outcome.error}\n{outcome.output}"
    )
    shutil.rmtree(home)
    return outcome.value


def sweep(server, base, tmp_path, case, *, stride, first=None):
    count = one_case(server, base, tmp_path, case, None)["count"]
    moments = [(at, after, early) for at in range(count) for after in (False, True) for early in (False, True)]
    moments = moments[zlib.crc32(case.encode()) % stride if first is None else first :: stride]
    told = [one_case(server, base, tmp_path, case, at, after=after, early=early) for at, after, early in moments]
    assert sum(one["stopped"] for one in told) >= 0.9 * len(told) - 1
    return told


def test_before_the_first_operation(server, base, tmp_path):
    """It saw a free name, the second owner takes that one: what is there then is not the first one's to remove."""
    told = one_case(server, base, tmp_path, "copied", 0, early=True)
    assert told["stopped"]
    assert "lost to" in told["error"]


def test_while_files_are_moved(server, base, tmp_path):
    """The second owner has swept plan and sources; what the first one makes afterwards it removes itself."""
    told = one_case(server, base, tmp_path, "moved", "deep/er", after=True)
    assert told["stopped"]
    assert told["error"]


@pytest.mark.parametrize("where", [0, f"{intake_scenarios.NEW}/manifest"])
def test_two_ranks(server, base, tmp_path, where):
    """Before the first part: its manifest lies in the second one's way. Before the manifest: its parts are swept."""
    told = one_case(server, base, tmp_path, "joint", where)
    assert told["stopped"]
    assert told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_some_moments(server, base, tmp_path, case):
    """Stopped before and after some of the operations; the second owner saves before or after it wakes up."""
    sweep(server, base, tmp_path, case, stride=53)


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("case", CASES)
def test_every_moment(server, base, tmp_path, case, part):
    """Every one."""
    told = [one for one in sweep(server, base, tmp_path, case, stride=6, first=part) if one["stopped"]]
    assert any("lost to" in one["error"] for one in told)
