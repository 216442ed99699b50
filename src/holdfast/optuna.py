"""Optuna: a killed trial goes on from its own checkpoints, and trials leave behind what you choose.

    resume_killed(study)                                      # what was running when the process died comes again
    study.optimize(objective, callbacks=[TidyTrials("runs/search", keep_best=3)])

with, in the objective, ``holdfast.Checkpointer(trial_path("runs/search", trial), ...)``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from ._log import get_logger
from ._optional import require
from .errors import ConfigError, HoldfastError
from .run.process import is_dead, this_process
from .storage.resolve import resolve

__all__ = ["TidyTrials", "resume_killed", "trial_path"]

_LOG = get_logger("optuna")
_OWNER = "holdfast:process"
_FIRST = "failed_trial"  # where Optuna itself notes the first trial of a chain of retries
_PURPOSE = "holdfast.optuna"


def trial_path(root: str | os.PathLike[str], trial: Any, study: Any = None) -> str:
    """Return where the checkpoints of a trial belong: the same place for a trial that is tried again after a kill.

    In an objective it also notes in the trial which process runs it, for `resume_killed`.

    Args:
        root: of all trials of all studies: a path or a URI.
        trial: what the objective got; or with ``study`` a trial that is over, such as ``study.best_trial``.
        study: of a trial that is over.
    """
    if study is not None:
        return _place(root, study.study_name, trial)
    study = getattr(trial, "study", None)
    if study is None:  # a FixedTrial, for trying an objective out
        return _place(root, "fixed", trial)
    trial.set_user_attr(_OWNER, this_process())
    return _place(root, study.study_name, study.get_trials(deepcopy=False)[trial.number])


def resume_killed(study: Any, *, max_retry: int | None = None, alone: bool = False) -> list[int]:
    """Put trials whose process has died in front of the others; call it before ``study.optimize``.

    A killed trial stays "running" in a study for ever. Here it becomes failed, and a trial with its parameters waits to
    be run, which finds the checkpoints of the first trial by `trial_path`. Only trials that have called `trial_path` on
    this machine, since it was started, are known to be dead; Optuna's heartbeat with its
    ``RetryHeartbeatStaleTrialCallback`` finds those of other machines, and their retries find their checkpoints too.

    Args:
        study: with a storage that outlives the process.
        max_retry: how often a trial is tried again; None: as often as it is killed.
        alone: no other process works on this study: whatever is running in it is dead.

    Returns:
        Numbers of the trials that were found dead.
    """
    optuna = require("optuna", extra="optuna", purpose=_PURPOSE)
    found = []
    for trial in study.get_trials(deepcopy=True, states=(optuna.trial.TrialState.RUNNING,)):
        owner = trial.user_attrs.pop(_OWNER, None)
        if not (alone or (owner is not None and is_dead(owner))):
            continue
        try:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
            continue  # another process has found it first
        found.append(trial.number)
        history = [*trial.system_attrs.get("retry_history", []), trial.number]
        if max_retry is None or len(history) <= max_retry:
            noted = {**trial.system_attrs, _FIRST: _first(trial), "retry_history": history}
            study.add_trial(
                optuna.create_trial(
                    state=optuna.trial.TrialState.WAITING, params=trial.params, distributions=trial.distributions,
                    user_attrs=trial.user_attrs, system_attrs=noted,
                )
            )  # fmt: skip
            _LOG.warning("trial %d of %s was killed: it goes on as a new trial", trial.number, study.study_name)
    return found


class TidyTrials:
    """A callback of ``study.optimize`` that deletes checkpoints of trials that are over.

    Args:
        root: as given to `trial_path`.
        states: whose checkpoints go as soon as they end: names of Optuna's states.
        keep_best: of the completed trials so many keep theirs; None: all. With several objectives, those of
            ``study.best_trials`` stay in any case.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, states: Sequence[str] = ("PRUNED",), keep_best: int | None = None
    ) -> None:
        if unknown := sorted(set(states) - {"PRUNED", "FAIL", "COMPLETE"}):
            raise ConfigError(f"states={unknown}: a trial ends as 'PRUNED', 'FAIL' or 'COMPLETE'")
        if keep_best is not None and keep_best < 1:
            raise ConfigError(
                f"keep_best={keep_best!r}: give at least 1, or None to keep those of all completed trials"
            )
        self._root, self._states, self._keep_best = root, frozenset(states), keep_best
        self._gone: set[int] = set()

    def __call__(self, study: Any, trial: Any) -> None:
        """Look at the trial that has just ended, and at those it displaces."""
        over = [trial] if trial.state.name in self._states else []
        if trial.state.name == "COMPLETE" and self._keep_best is not None:
            over += self._displaced(study)
        for ended in over:
            if ended.number in self._gone:
                continue
            self._gone.add(ended.number)
            path = _place(self._root, study.study_name, ended)
            try:
                resolve(path).delete_tree("")
            except HoldfastError as error:
                _LOG.warning("the checkpoints of trial %d stay at %s: %s", ended.number, path, error)

    def _displaced(self, study: Any) -> list[Any]:
        done = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        if len(study.directions) > 1:
            best = {trial.number for trial in study.best_trials}
            return [trial for trial in done if trial.number not in best]
        done.sort(key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")
        return done[self._keep_best :]


def _first(trial: Any) -> int:
    return int(getattr(trial, "system_attrs", {}).get(_FIRST, trial.number))


def _place(root: str | os.PathLike[str], study: str, trial: Any) -> str:
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in study)
    if safe != study or not study.strip("."):  # "a:1" and "a 1" are two studies
        safe = f"{safe.strip('.')}-{hashlib.sha256(study.encode()).hexdigest()[:8]}"
    return f"{os.fspath(root).rstrip('/')}/{safe}/trial_{_first(trial):05d}"
