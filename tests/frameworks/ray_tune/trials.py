"""What the trials of the tests run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import ray
import ray.tune
import torch

import holdfast as hf
import holdfast.ray_tune
from holdfast.torch import TorchTrainer


def objects(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05), "steps": 0}


def train_one(state: dict[str, Any]) -> float:
    """One step on data that follows from its number."""
    generator = torch.Generator().manual_seed(state["steps"])
    x = torch.randn(16, 4, generator=generator)
    loss = ((state["model"](x) - x.sum(1, keepdim=True)) ** 2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["steps"] += 1
    return float(loss)


def weights(state: dict[str, Any]) -> list[float]:
    return [value for one in state["model"].parameters() for value in one.detach().flatten().tolist()]


def killed_once(config: dict[str, Any]) -> None:
    """Ten steps; the process dies of SIGKILL in the sixth, the first time, with a part of what it reports copied."""
    state = objects()
    torn = Path(config["folder"], "torn")
    checkpoint = holdfast.ray_tune.get_checkpoint()
    if checkpoint is not None:
        state = hf.load(checkpoint, state)
    for _ in range(state["steps"], 10):
        loss = train_one(state)
        died = Path(config["folder"]) / "died"
        if state["steps"] == 6 and not died.exists():
            died.touch()
            newest = ray.tune.get_checkpoint()
            torn.write_text(f"{os.path.dirname(newest.path)}/checkpoint_000005/torn.safetensors")
            newest.filesystem.create_dir(os.path.dirname(torn.read_text()))
            with newest.filesystem.open_output_stream(torn.read_text()) as file:
                file.write(b"a part")
            os.kill(os.getpid(), signal.SIGKILL)
        if state["steps"] == 8 and "driver" in config and not (driver := Path(config["folder"], "driver")).exists():
            driver.touch()
            os.kill(config["driver"], signal.SIGKILL)
            time.sleep(600)  # Ray ends the trials of a driver that is gone
        metrics = {"loss": loss, "weights": str(weights(state)), "of": {"last": torch.tensor(loss)}}
        if checkpoint is not None and state["steps"] == 7:
            metrics["torn"] = checkpoint.filesystem.get_file_info(torn.read_text()).type.name
        holdfast.ray_tune.report(metrics, state=state)


def drive(folder: str, address: str) -> None:
    """Be the driver of an experiment whose trial kills itself, and later its driver."""
    ray.init(address=address, log_to_driver=False)
    ray.tune.Tuner(
        ray.tune.with_resources(killed_once, {"cpu": 1}),
        param_space={"folder": folder, "driver": os.getpid()},
        run_config=ray.tune.RunConfig(
            name="t", storage_path=folder, verbose=0, failure_config=ray.tune.FailureConfig(max_failures=2)
        ),
    ).fit()


def population(config: dict[str, Any]) -> None:
    """Steps with a learning rate that Tune changes; says whose checkpoint it goes on from."""
    trial = ray.tune.get_context().get_trial_id()
    state = {**objects(), "trial": trial}
    checkpoint = holdfast.ray_tune.get_checkpoint()
    if checkpoint is not None:
        state = hf.load(checkpoint, state)
        with (Path(config["folder"]) / "starts.jsonl").open("a") as file:
            file.write(json.dumps({"trial": trial, "from": state["trial"], "steps": state["steps"]}) + "\n")
    state["trial"] = trial
    for group in state["optimizer"].param_groups:
        group["lr"] = config["lr"]
    for _ in range(state["steps"], 8):
        loss = train_one(state)
        holdfast.ray_tune.report({"loss": loss, "lr": config["lr"], "steps": state["steps"]}, state=state)


def by_reference(config: dict[str, Any]) -> None:
    """A run of the trial's own in a storage of ours; Tune is only told where its checkpoints are. Dies once."""
    state = objects()
    given = holdfast.ray_tune.get_checkpoint()
    kept = {"model": state["model"], "optimizer": state["optimizer"]}
    with hf.Checkpointer(config["run"], kept, every=None, keep=hf.Keep(last=3), resume=given or "never") as ck:
        for step in range(ck.global_step, 10):
            state["steps"] = step
            loss = train_one(state)
            ck.step(loss=loss)
            ck.save()
            ck.wait()
            holdfast.ray_tune.report({"loss": loss, "weights": str(weights(state))}, checkpoint=ck.latest())
            died = Path(config["folder"]) / "died"
            if step == 5 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Saver:
    """An actor that is in the middle of a save."""

    def save(self, run: str) -> int:
        self.ck = hf.Checkpointer(run, {"w": torch.ones(50_000_000), "step": 1}, every=None).start()
        self.ck.step()
        self.ck.save()
        return os.getpid()


def gone(config: dict[str, Any]) -> None:
    """Reports a checkpoint by its place, takes it away or replaces it, and fails."""
    if holdfast.ray_tune.get_checkpoint() is None:
        checkpoint = hf.save(config["where"], {"x": 1})
        holdfast.ray_tune.report({"loss": 1.0}, checkpoint=checkpoint)
        shutil.rmtree(config["where"])
        if config["how"] == "other":
            hf.save(config["where"], {"x": 2})
        raise RuntimeError("on purpose")


class ToTune:
    """Passes reports of a run on to Tune; kills the trial's process when it has seen two, the first time."""

    def __init__(self, died: Path) -> None:
        self.died = died

    def after_report(self, run_context: Any, metrics: Any, checkpoint: hf.Checkpoint | None) -> None:
        holdfast.ray_tune.report(metrics[0], checkpoint=checkpoint)
        if metrics[0]["steps"] == 2 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train_on_a_node(config: dict[str, Any]) -> None:
    """Five steps, each saved."""
    state = objects()
    if (checkpoint := hf.get_checkpoint()) is not None:
        state = hf.load(checkpoint, state)
    start = state["steps"]
    for _ in range(start, 5):
        loss = train_one(state)
        hf.report({"loss": loss, "steps": state["steps"], "start": start}, state=state)
        hf.get_checkpoint()  # what was reported is committed


def fit_on_the_cluster(config: dict[str, Any]) -> None:
    """A trial that is the driver of a run on the cluster; the run has the trial's name."""
    TorchTrainer(
        train_on_a_node,
        train_loop_config={},
        scaling_config=hf.ScalingConfig(num_workers=1, engine="ray"),
        run_config=hf.RunConfig(
            name=ray.tune.get_context().get_trial_id(),
            storage_path=os.path.join(config["folder"], "runs"),
            callbacks=[ToTune(Path(config["folder"], "died"))],
        ),
    ).fit()
