"""Loops as people write them, killed at every place where a process may die, end as if they had never been."""

from __future__ import annotations

import itertools
import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from catalog_kit import catalog_of

from holdfast.testing import assert_state_equal
from loops import LOOPS, Ended, Loop

_numbers = itertools.count()
WITH_WORKERS = {"augmentation_in_persistent_workers", "evaluation_by_persistent_workers"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the body catches it, nothing is saved after it."""


def ticking(kill_at: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return a tick that dies when it is called for the ``kill_at``-th time (0: never), and its count."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            raise Killed

    return tick, lambda: count


def life(loop: Loop, path: str, kill_at: int = 0) -> tuple[Ended | None, int]:
    tick, count = ticking(kill_at)
    random.seed(0)  # as a script does that is to be repeatable; a resume restores what came after
    np.random.seed(0)
    try:
        return loop(path, tick), count()
    except Killed:
        return None, count()


def lives(loop: Loop, path: str, kills: list[int]) -> Ended:
    for kill_at in kills:
        over, _ = life(loop, path, kill_at)
        if over is not None:
            return over
    over, _ = life(loop, path)
    assert over is not None
    return over


def check(name: str, kills: list[list[int]]) -> None:
    loop = LOOPS[name]
    base = f"memory://{name}-{next(_numbers)}"
    wanted, ticks = life(loop, f"{base}/whole")
    assert ticks > 3
    records = catalog_of(f"{base}/whole").records()
    assert max(record.step for record in records) > 3, "a loop that counts no steps and saves nothing tests nothing"
    for number, places in enumerate(kills or [[at] for at in range(1, ticks + 1)]):
        plan = [1 + (at - 1) % ticks for at in places]
        found = lives(loop, f"{base}/{number}", plan)
        try:
            assert_state_equal(wanted, found)
        except AssertionError as difference:
            raise AssertionError(f"{name}, killed at {plan}: {difference}") from None


@pytest.mark.parametrize("name", sorted(set(LOOPS) - WITH_WORKERS))
def test_a_loop_killed_a_few_times_is_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Killed in the middle of an epoch, at its end, after an evaluation, and again in the second and third life."""
    caplog.set_level(logging.CRITICAL)
    chance = random.Random(name)
    check(name, [[chance.randrange(1, 100) for _ in range(lives)] for lives in (1, 1, 2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_loop_killed_at_every_place_is_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One life for each place where the loop may die, and another one that ends it."""
    caplog.set_level(logging.CRITICAL)
    check(name, [[3], [5, 2]] if name in WITH_WORKERS else [])


BY_COMMAND = {"gan", "evaluation_at_the_end_of_an_epoch", *WITH_WORKERS}  # in CI's sweep; the others in the long one


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in BY_COMMAND else pytest.mark.long) for one in LOOPS]
)
def test_a_loop_in_processes_that_are_killed_is_exact(name: str, tmp_path: Path) -> None:
    """`holdfast verify-resume` finds every one of them exact, with SIGKILL at the moments that it chooses itself."""
    script = Path(__file__).with_name("run_loop.py")
    command = [sys.executable, "-m", "holdfast.cli.main", "verify-resume", "--json", "--", sys.executable, str(script)]
    done = subprocess.run(
        [*command, name, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["exact"] is True


def test_a_state_of_another_twin_is_noticed() -> None:
    """The comparison itself: a weight that differs in one bit fails it."""
    wanted, _ = life(LOOPS["iterable_data"], "memory://twin/one")
    assert wanted is not None
    changed: dict[str, Any] = {**wanted, "torch": wanted["torch"].clone()}
    changed["torch"].view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError, match="torch"):
        assert_state_equal(wanted, changed)
