"""A search for a learning rate is killed in the middle of a trial: the trial goes on, and the search ends as if not.

    python examples/optuna_resume.py [--folder PATH]

Needs optuna and scikit-learn (the digits come with it). Without a folder one is made and removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits

import holdfast
from holdfast.optuna import TidyTrials, resume_killed, trial_path

EPOCHS = 6
RATES = [0.01, 0.03, 0.1, 0.3]


def objective(trial: optuna.Trial, root: Path, kill: int) -> float:
    """Learn to read digits; returns the share of errors."""
    rate = trial.suggest_float("rate", RATES[0], RATES[-1])
    pictures, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    pictures = pictures.float() / 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(trial_path(root, trial), state, every="1ep", keep=holdfast.Keep(last=1)) as ck:
        trial.set_user_attr("began", ck.epoch)
        if ck.epoch:
            print(f"trial {trial.number} goes on in epoch {ck.epoch}", flush=True)
        for epoch in ck.epochs(EPOCHS):
            for batch in torch.randperm(1500).split(64):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                ck.step(loss=loss)
            if trial.number == kill and epoch == 3:
                os.kill(os.getpid(), signal.SIGKILL)  # the power cut
    with torch.no_grad():
        return (model(pictures[1500:]).argmax(1) != labels[1500:]).float().mean().item()


def search(folder: Path, kill: int) -> None:
    """Run all trials, or those that are left."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name="digits", storage=f"sqlite:///{folder}/study.db", load_if_exists=True)
    resume_killed(study)
    if not study.trials:
        for rate in RATES:
            study.enqueue_trial({"rate": rate})
    left = sum(trial.state.name == "WAITING" for trial in study.get_trials(deepcopy=False))
    tidy = TidyTrials(folder / "trials", keep_best=1)
    study.optimize(lambda trial: objective(trial, folder / "trials", kill), n_trials=left, callbacks=[tidy])
    best = study.best_trial
    print(f"best of {len(RATES)}: rate {best.params['rate']}, {best.value:.2%} errors")
    newest = holdfast.Result.from_path(trial_path(folder / "trials", best, study)).checkpoint
    print(f"its weights: {newest.uri}")


def main() -> None:
    """Search once in peace, and once with a kill in the third trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search is not None:
        search(options.search, options.kill)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        values = {}
        for name, kills in (("whole", [-1]), ("killed", [2, -1])):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for kill in kills:
                command = [sys.executable, __file__, "--search", folder / name, "--kill", str(kill)]
                print(f"{name}: exit status {subprocess.run(command, check=False).returncode}", flush=True)
            study = optuna.load_study(study_name="digits", storage=f"sqlite:///{folder}/{name}/study.db")
            values[name] = {one.params["rate"]: one.value for one in study.trials if one.state.name == "COMPLETE"}
            began = [one.user_attrs.get("began", 0) for one in study.trials]
            if any(began) != (len(kills) > 1):
                sys.exit(f"{name}: the trials began in epochs {began}; one that was killed goes on, no other does")
        if values["whole"] != values["killed"]:
            sys.exit(f"the values differ: {values}")
        print("the killed search has found the same values")


if __name__ == "__main__":
    main()
