"""Population based training of a classifier of handwritten digits: the worse half goes on from the better half.

    python examples/ray_tune_pbt.py [--trials N] [--epochs N] [--folder DIR]

Needs `pip install '.[ray-tune]' scikit-learn`. Trials that die are restarted from their newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray.tune
import torch
from ray.tune.schedulers import PopulationBasedTraining
from sklearn.datasets import load_digits

import holdfast
import holdfast.ray_tune


def trainable(config: dict[str, Any]) -> None:
    """One trial: train on the digits, report every epoch."""
    torch.manual_seed(0)
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = images.float() / 16
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    checkpoint = holdfast.ray_tune.get_checkpoint()
    if checkpoint:
        state = checkpoint.load(into=state)
        optimizer.param_groups[0]["lr"] = config["lr"]
    for epoch in range(state["epoch"], config["epochs"]):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        state["epoch"] = epoch + 1
        holdfast.ray_tune.report({"accuracy": right, "epoch": epoch + 1}, state=state)


def main() -> None:
    """Search, and read the best weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs/tune")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=options.epochs // 2,
        hyperparam_mutations={"lr": ray.tune.loguniform(1e-4, 0.5)},
    )
    results = ray.tune.Tuner(
        trainable,
        param_space={"lr": ray.tune.loguniform(1e-4, 0.5), "epochs": options.epochs},
        tune_config=ray.tune.TuneConfig(metric="accuracy", mode="max", num_samples=options.trials, scheduler=scheduler),
        run_config=ray.tune.RunConfig(
            name="digits",
            storage_path=os.path.abspath(options.folder),
            failure_config=ray.tune.FailureConfig(max_failures=2),
            checkpoint_config=ray.tune.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    best = results.get_best_result()
    newest = holdfast.Checkpoint(best.checkpoint.path, best.checkpoint.filesystem)
    print(f"best accuracy {best.metrics['accuracy']:.3f}, epoch {newest.load(only='epoch')['epoch']}, {newest.uri}")
    ray.shutdown()


if __name__ == "__main__":
    main()
