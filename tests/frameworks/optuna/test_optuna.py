"""`holdfast.optuna`: trials that are killed, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from docs_kit import ROOT
from object_kit import moto_bucket
from search import RATES, STEPS

import holdfast as hf
from holdfast.optuna import TidyTrials, resume_killed, trial_path


def run(told: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("search.py")), json.dumps(told)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def values(base: Path) -> dict[float, float]:
    study = optuna.load_study(study_name="lines", storage=f"sqlite:///{base}")
    return {trial.params["rate"]: trial.value for trial in study.trials if trial.state.name == "COMPLETE"}


def test_a_killed_trial_goes_on(tmp_path: Path) -> None:
    """Killed twice in one trial, a search ends with the values of one that nothing disturbed, from checkpoints in S3.

    The pruned trial has left nothing, and of the others the two best keep their checkpoints.
    """
    with moto_bucket() as bucket:
        quiet, base = tmp_path / "quiet.db", tmp_path / "base.db"
        assert run({"root": str(tmp_path / "quiet"), "base": str(quiet)}).returncode == 0
        told = {"root": f"{bucket}/search", "base": str(base)}
        for step in (2, 4):
            assert run({**told, "kill": [0.1, step]}).returncode == -9
        done = run(told)
        assert done.returncode == 0, done.stderr
        assert values(base) == values(quiet)
        study = optuna.load_study(study_name="lines", storage=f"sqlite:///{base}")
        tried = [trial for trial in study.trials if trial.params.get("rate") == 0.1]
        assert [trial.state.name for trial in tried] == ["FAIL", "FAIL", "COMPLETE"]
        assert [trial.user_attrs["began_at"] for trial in tried] == [0, 2, 4]
        assert json.loads(done.stdout.splitlines()[-1]) == [tried[1].number]
    left = {one.name for one in (tmp_path / "quiet" / "lines").iterdir() if any(one.rglob("*"))}
    best = sorted(values(quiet).items(), key=lambda one: one[1])[:2]
    assert left == {f"trial_{RATES.index(rate):05d}" for rate, _ in best}
    for name in left:
        newest = tmp_path / "quiet" / "lines" / name / f"step_{STEPS:08d}"
        assert hf.Checkpoint(newest).verify().ok


def test_whose_trials_are_dead(tmp_path: Path) -> None:
    """A trial of this process is not dead; ``alone`` says that all are; a retry too many is left failed."""
    study = optuna.create_study(study_name="a/b", storage=f"sqlite:///{tmp_path / 'base.db'}")
    trial = study.ask()
    path = trial_path(tmp_path, trial)
    assert path == trial_path(tmp_path, study.trials[0], study)
    assert re.fullmatch(r"a_b-[0-9a-f]{8}/trial_00000", os.path.relpath(path, tmp_path))
    assert resume_killed(study) == []
    assert resume_killed(study, alone=True, max_retry=1) == [0]
    again = study.ask()
    assert (again.number, trial_path(tmp_path, again)) == (1, path)
    assert resume_killed(study, alone=True, max_retry=1) == [1]
    assert [one.state.name for one in study.trials] == ["FAIL", "FAIL"]
    assert trial_path(tmp_path, optuna.trial.FixedTrial({})).endswith("fixed/trial_00000")


def test_two_workers_resume_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second leaves the trial to the first."""
    study = optuna.create_study(study_name="both", storage=f"sqlite:///{tmp_path / 'base.db'}")
    trial_path(tmp_path, study.ask())

    def tell(*args: Any, **options: Any) -> None:
        raise optuna.exceptions.UpdateFinishedTrialError("told already")

    monkeypatch.setattr(study, "tell", tell)
    assert resume_killed(study, alone=True) == []
    assert len(study.trials) == 1


def test_arguments(tmp_path: Path) -> None:
    """States that Optuna has not, and nothing to keep, are refused."""
    with pytest.raises(hf.errors.ConfigError, match="'DONE'"):
        TidyTrials(tmp_path, states=["DONE"])
    with pytest.raises(hf.errors.ConfigError, match="at least 1"):
        TidyTrials(tmp_path, keep_best=0)
