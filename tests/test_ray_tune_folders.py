"""`holdfast.ray_tune.report` leaves no copy of a state on the disk of a machine, whatever happens to its trial.

Ray Tune is played here; the real one is in tests/frameworks/ray_tune.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_TRIAL = """
import os, signal, sys, types

import holdfast.ray_tune

class Checkpoint:
    @staticmethod
    def from_directory(path):
        return path

def report(metrics, checkpoint):
    print(os.listdir(checkpoint), flush=True)  # Tune copies it, and waits until it wants the next report
    sys.stdin.readline()

tune = types.SimpleNamespace(Checkpoint=Checkpoint, report=report)
holdfast.ray_tune._tune = lambda function: tune
holdfast.ray_tune.report({"loss": 1.0}, state={"epoch": 1})
"""


class _Trial:
    """A process in the middle of its report."""

    def __init__(self, folder: Path) -> None:
        self.process: Any = subprocess.Popen(
            [sys.executable, "-c", _TRIAL], env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def reports(self) -> _Trial:
        """Wait until it is in its report."""
        assert "manifest.json" in self.process.stdout.readline()
        return self

    def end(self, *, kill: bool) -> None:
        if kill:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate("\n" if not kill else None, timeout=60)
        assert self.process.returncode == (-signal.SIGKILL if kill else 0)


def _left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("holdfast-report-")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where temporary directories are; a link of somebody else has a name like ours."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/holdfast-report-link").symlink_to(tmp_path / "mine")
    return tmp_path / "tmp"


@pytest.mark.usefixtures("forked")
def test_a_trial_that_was_killed_in_its_report_leaves_nothing_for_long(folder: Path) -> None:
    """The next trial on the machine removes its copy, and leaves that of a trial that is still in its report."""
    killed, slow = _Trial(folder), _Trial(folder)
    slow.reports()
    killed.reports().end(kill=True)
    assert len(_left(folder)) == 3
    _Trial(folder).reports().end(kill=False)
    assert len(_left(folder)) == 2
    slow.end(kill=False)
    assert _left(folder) == {"holdfast-report-link"}
    assert (folder.parent / "mine").is_dir()
