"""Snapshots of several ranks: the newest step that the writers of all of them hold is committed when trainers die."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from catalog_kit import index_of
from process_kit import wait_until
from ranks_kit import RankServer

import holdfast as hf
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal

CASES = f"{Path(__file__).parent / 'rescue_cases.py'}:train"


def newest(run: Path) -> hf.Checkpoint:
    """Return the newest checkpoint once the writers of the dead trainers have given the run back."""
    storage = LocalStorage(run)
    assert wait_until(lambda: index_of(storage).attempts[-1].ended is not None)
    return hf.Checkpoint(max(path.parent for path in run.glob("step_*/manifest.json")))


def done(run: Path) -> int:
    """Return the newest step that all ranks have ended."""
    return min(int(Path(f"{run}-{rank}").read_text()[:8]) for rank in range(2))


def check_rescued(run: Path, step: int) -> None:
    """The newest checkpoint is whole and of this step; it and the only attempt so far say that a trainer has died."""
    found = newest(run)
    assert found.step == step
    assert found.verify(deep=True).ok
    assert found.manifest is not None
    assert "trainer process has died" in found.manifest.extra["rescued"]
    (attempt,) = index_of(run).attempts
    assert "trainer process has died" in (attempt.reason or "")


@pytest.mark.parametrize("killed", [{"0": 7}, {"1": 7}, {"0": 7, "1": 7}])
def test_a_killed_rank_loses_no_step_that_all_had_kept(
    ranks: RankServer, tmp_path: Path, killed: dict[str, int]
) -> None:
    """One rank is killed after step 7, the other raises, or both are killed: step 7 is there, whole, and says why."""
    run = tmp_path / "run"
    outcomes = ranks.ranks(CASES, str(run), 30, kill_at=killed)
    assert [outcome.status == -signal.SIGKILL for outcome in outcomes] == [str(rank) in killed for rank in range(2)]
    check_rescued(run, 7)


def test_a_rank_whose_body_raises_does_not_wait_for_the_others(ranks: RankServer, tmp_path: Path) -> None:
    """Rank 0 raises while rank 1 waits in a collective, which ends when rank 0's process does: step 7 is kept."""
    run = tmp_path / "run"
    ranks.ranks(CASES, str(run), 30, raise_at=7)
    found = newest(run)
    assert found.step == 7
    assert found.manifest is not None
    assert "ZeroDivisionError" in found.manifest.extra["rescued"]


@pytest.mark.parametrize("killed", ["0", "1"])
@pytest.mark.parametrize(
    "how",
    [
        {"total": 10, "every": 5},
        {"total": 10},
        pytest.param({"total": 10, "width": 1800}, id="no memory for a third copy"),
        {"total": 30, "save_at": 10},
    ],
    ids=", ".join,
)
def test_a_rank_killed_before_a_save_of_the_others_loses_its_step_alone(
    ranks: RankServer, tmp_path: Path, killed: str, how: dict[str, Any]
) -> None:
    """One rank is killed within step 10, which the other saves, at its end or before: step 9 is there, and says why."""
    run = tmp_path / "run"
    outcomes = ranks.ranks(CASES, str(run), **how, kill_within={killed: 10})
    other = outcomes[1 - int(killed)]
    assert other.status == 1
    check_rescued(run, 9)
    ranks.checked(CASES, str(run), **how)
    assert newest(run).step == how["total"]


def test_an_end_in_order_rescues_nothing(ranks: RankServer, tmp_path: Path) -> None:
    """Two ranks train to the end: one checkpoint, an ordinary one."""
    for rescue in (1, "auto"):
        run = tmp_path / f"run-{rescue}"
        ranks.checked(CASES, str(run), 5, rescue=rescue)
        found = newest(run)
        assert found.step == 5
        assert found.manifest is not None
        assert "rescued" not in found.manifest.extra
        assert len(list(run.glob("step_*"))) == 1


@pytest.mark.parametrize(("rescue", "soonest_s"), [("auto", 0.05), pytest.param("1s", 1.0, marks=pytest.mark.slow)])
def test_ranks_keep_by_time_what_rank_0_asks_for(
    ranks: RankServer, tmp_path: Path, rescue: str, soonest_s: float
) -> None:
    """A rank is killed after some seconds: a step that both had kept is there, whole, and both go on from it."""
    run = tmp_path / "run"
    ranks.ranks(CASES, str(run), 10**6, rescue=rescue, soonest_s=soonest_s, after_s={"1": 1.2 + 2 * soonest_s})
    found = newest(run)
    assert found.step > 0
    assert found.verify(deep=True).ok
    assert found.manifest is not None
    assert "trainer process has died" in found.manifest.extra["rescued"]
    assert len(list(run.glob("step_*"))) == 1
    end = found.step + 20
    ranks.checked(CASES, str(run), end, rescue=rescue)
    ranks.checked(CASES, str(tmp_path / "twin"), end)
    parts = ["model", "optimizer", "seen"]
    twin = hf.Checkpoint(tmp_path / "twin" / f"step_{end:08d}")
    assert_state_equal(*({name: found.load()[name] for name in parts} for found in (newest(run), twin)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [16, 1800])
def test_ranks_killed_at_random_moments(ranks: RankServer, tmp_path: Path, width: int) -> None:
    """One rank or both, at any moment: no more than the step in flight is lost, and the end is bitwise the twin's."""
    chance = random.Random(width)
    options: dict[str, Any] = {"every": 5, "width": width}
    ranks.checked(CASES, str(tmp_path / "twin"), 40, **options)
    twin = newest(tmp_path / "twin").load()
    run, kills, before = tmp_path / "run", 0, 0
    while True:
        moment = chance.uniform(0.0, 0.4)
        who = chance.choice([{"0": moment}, {"1": moment}, {"0": moment, "1": moment + chance.choice([0.0, 0.01])}])
        outcomes = ranks.ranks(CASES, str(run), 40, after_s=who if kills < 8 else None, **options)
        began = int(Path(f"{run}-0").read_text()[8:])
        assert began >= before, f"life {kills} began at {began}, all had ended {before}"
        if all(outcome.status == 0 for outcome in outcomes):
            break
        before = done(run)
        kills += 1
    found = newest(run).load()
    for own in (twin, found):
        del own["holdfast"]["progress"]
    assert_state_equal(twin, found)
