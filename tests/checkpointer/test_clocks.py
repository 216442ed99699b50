"""Wall clocks that are wrong, or jump while a run goes on: nothing is lost, nobody alive is taken over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import clock_kit
import pytest

import holdfast as hf

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not clock_kit.WORKS, reason="no C compiler"),
]
TRAINER = """
import sys, time, torch, holdfast as hf
root, clock = sys.argv[1:]
state = {"w": torch.zeros(100), "n": 0}
with hf.Checkpointer(root, state, every=["5ba", "1h"], keep=hf.Keep(last=2), deadline="9h") as ck:
    print("from", ck.global_step, flush=True)
    while True:
        state["w"] += 1
        state["n"] += 1
        ck.step(loss=1.0)
        ck.wait()
        print("step", ck.global_step, int(time.time()), flush=True)
        time.sleep(0.01)
"""


class Trainer:
    """A training whose clock, and that of its writer, is told by a file: seconds away from the right time."""

    def __init__(self, root: Path, folder: Path, offset_s: int) -> None:
        variables = clock_kit.environment(folder, offset_s)
        self.clock = Path(variables["CLOCK_OFFSET_FILE"])
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(root), str(self.clock)], env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def turn(self, offset_s: int) -> None:
        """Set the clock."""
        clock_kit.turn(self.clock, offset_s)

    def until(self, step: int) -> list[list[int]]:
        """Wait for a step; returns the (step, time) of all up to it."""
        assert self.process.stdout is not None
        said = []
        while not said or said[-1][0] < step:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            if line.startswith("step "):
                said.append([int(word) for word in line.split()[1:]])
        return said

    def kill(self) -> None:
        """End it, and its writer with it if there is nothing to commit."""
        self.process.kill()
        self.process.communicate()


def test_clocks_that_differ_and_jump(tmp_path: Path) -> None:
    """An hour ahead, an hour behind, jumping both ways: steps count up, the newest is resumed, the owner stays."""
    root = tmp_path / "run"
    newest = 0
    for offset_s, jump_s in ((3600, -7200), (-3600, 40_000), (0, -(10**6))):
        trainer = Trainer(root, tmp_path, offset_s)
        try:
            said = trainer.until(newest + 6)
            assert said[0][0] in (newest // 5 * 5 + 1, newest + 1)
            assert abs(said[-1][1] - time.time() - offset_s) < 1200
            trainer.turn(jump_s)
            said += trainer.until(said[-1][0] + 30)
            assert abs(said[-1][1] - time.time() - jump_s) < 1200
            other = Trainer(root, tmp_path, -offset_s + 77)  # by a third clock
            assert other.process.wait(100) == 1
            assert "is in use by process" in other.process.communicate()[1]
            # Neither the deadline nor "1h" is counted by the wall clock.
            assert trainer.process.poll() is None
            newest = trainer.until(said[-1][0] + 6)[-1][0]
        finally:
            trainer.kill()
        with hf.Checkpointer(root, {"w": hf.load(root, only="w")["w"], "n": 0}, resume="must", every=None) as ck:
            assert ck.global_step >= newest // 5 * 5
            assert ck.state["n"] == ck.global_step
            newest = ck.global_step
        kept = sorted(path.name for path in root.glob("step_*"))
        assert len(kept) <= 3, kept
