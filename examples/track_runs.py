"""Train twice, tell MLflow, Weights & Biases and TensorBoard of every checkpoint, and load the best one they know of.

    python examples/track_runs.py [--folder PATH]

Needs mlflow-skinny, wandb and tensorboard. Nothing leaves this machine: MLflow writes files, wandb is offline. Without
a folder one is made and removed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import mlflow
import torch
import wandb

import holdfast
from holdfast.trackers import MLflowTracker, TensorBoardTracker, WandbTracker

STEPS = 60


def train(folder: Path, rate: float) -> None:
    """Learn to add. All three trackers get the same checkpoints; none of them holds the training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    name = f"rate-{rate}"
    with (
        mlflow.start_run(run_name=name),
        wandb.init(project="holdfast", name=name, dir=folder, mode="offline") as run,
    ):
        trackers = [MLflowTracker(), WandbTracker(run), TensorBoardTracker(str(folder / "board" / name))]
        state = {"model": model, "optimizer": optimizer}
        with holdfast.Checkpointer(folder / "runs" / name, state, every=20, on_commit=trackers) as ck:
            while ck.global_step < STEPS:
                x = torch.randn(64, 8)
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ck.step(loss=loss)
        for tracker in trackers:
            tracker.wait()


def best_checkpoint() -> holdfast.Checkpoint:
    """Ask MLflow which run ended with the lowest loss, and where its newest checkpoint is."""
    (best,) = mlflow.search_runs(
        search_all_experiments=True, order_by=["metrics.`checkpoint/loss`"], max_results=1, output_format="list"
    )
    checkpoint = holdfast.Checkpoint(best.data.tags["holdfast.uri"])
    if checkpoint.digest != best.data.tags["holdfast.digest"]:
        raise SystemExit(f"{checkpoint.uri} is not what MLflow was told of")
    print(f"{best.info.run_name}: loss {best.data.metrics['checkpoint/loss']:.3f}, {checkpoint.uri}")
    return checkpoint


def main() -> None:
    """Train with two rates, and use the better one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    os.environ.setdefault("WANDB_SILENT", "true")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        mlflow.set_tracking_uri(f"file://{folder}/mlruns")
        for rate in (0.001, 0.02):
            train(folder, rate)
        weights = best_checkpoint().load(only="model")["model"]
        print(f"loaded {len(weights)} tensors, every byte checked")


if __name__ == "__main__":
    main()
