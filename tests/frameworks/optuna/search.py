"""A small search whose trials train a line, and may be killed: ``search.py '{"root": ..., "kill": [0.1, 3]}'``."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import optuna
import torch

import holdfast as hf
from holdfast.optuna import TidyTrials, resume_killed, trial_path

RATES = (0.01, 0.05, 0.1, 0.2)
STEPS = 6


def objective(trial: Any, root: str, kill: tuple[float, int] | None = None) -> float:
    """Train, with momentum; rates below 0.02 are pruned. ``kill``: in the trial of which rate, at which step."""
    rate = trial.suggest_categorical("rate", RATES)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loss = torch.zeros(())
    with hf.Checkpointer(trial_path(root, trial), {"model": model, "optimizer": optimizer}, every=1) as ck:
        trial.set_user_attr("began_at", ck.global_step)
        while ck.global_step < STEPS:
            loss = model(torch.randn(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ck.step(loss=loss)
            if rate < 0.02:
                raise optuna.TrialPruned
            if kill == (rate, ck.global_step):
                ck.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return float(model.weight.detach().square().sum())


def main() -> None:
    """Run the search to its end."""
    told = json.loads(sys.argv[1])
    root = told["root"]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="lines", storage=f"sqlite:///{told['base']}", load_if_exists=True)
    if not study.trials:
        for rate in RATES:
            study.enqueue_trial({"rate": rate})
    found = resume_killed(study)
    kill = (told["kill"][0], told["kill"][1]) if told.get("kill") else None
    waiting = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "WAITING"]
    study.optimize(
        lambda trial: objective(trial, root, kill),
        n_trials=len(waiting),
        callbacks=[TidyTrials(root, keep_best=2)],
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
