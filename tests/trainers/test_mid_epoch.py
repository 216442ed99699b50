"""Two workers, one killed in the middle of an epoch: the run that goes on is the run that was never killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.torch import TorchTrainer

pytestmark = pytest.mark.usefixtures("forked")


def fit(storage: Path, name: str, strategy: str, *, kill: bool) -> hf.Result:
    def train(config: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader, TensorDataset

        import holdfast as hf
        from holdfast.torch import prepare_data_loader, prepare_model

        torch.manual_seed(0)
        model = prepare_model(torch.nn.Linear(1, 1), parallel_strategy=config["strategy"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        data = TensorDataset(torch.arange(24.0).reshape(-1, 1))
        loader = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=True), seed=1)
        state = {"model": model, "optimizer": optimizer, "data": loader}
        checkpoint = hf.get_checkpoint()
        if checkpoint is not None:
            checkpoint.load(into=state)
        while loader.epoch < 2:
            for number, (x,) in enumerate(loader):
                loss = model(x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if config["kill"] and checkpoint is None and (loader.epoch, number) == (1, 2):
                    hf.get_all_reported_checkpoints()  # what was reported is committed by now
                    if hf.get_context().get_world_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                hf.report({"loss": loss.item(), "val": {"first": x[0].item()}}, state=state)

    return TorchTrainer(
        train,
        train_loop_config={"kill": kill, "strategy": strategy},
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=hf.FailureConfig(max_failures=1),
            checkpoint_config=hf.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val/first"),
        ),
    ).fit()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_worker_killed_in_mid_epoch_changes_nothing_in_the_result(tmp_path, strategy: str) -> None:
    """Losses, data order, best checkpoints are equal to the bit; the history has every step once."""
    whole, broken = fit(tmp_path, "whole", strategy, kill=False), fit(tmp_path, "broken", strategy, kill=True)
    assert [len(one.attempts) for one in (whole, broken)] == [1, 2]
    assert "SIGKILL" in str(broken.attempts[0].reason)
    assert broken.attempts[0].seconds_lost > 0
    frames = [one.metrics_dataframe for one in (whole, broken)]
    for column in ("step", "loss", "val/first"):
        assert frames[0][column].tolist() == frames[1][column].tolist()
    assert len(frames[0]) == 12
    assert whole.metrics == broken.metrics
    assert [metrics for _, metrics in whole.best_checkpoints] == [metrics for _, metrics in broken.best_checkpoints]
    again = hf.Result.from_path(broken.path)
    assert again.best_checkpoints == broken.best_checkpoints
    assert again.checkpoint == broken.checkpoint
    alone = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]  # one process reads what two have sharded
    for model, result in zip(alone, (whole, broken), strict=True):
        assert result.checkpoint is not None
        hf.load(result.checkpoint, {"model": model}, only="model")
    assert torch.equal(alone[0].weight, alone[1].weight)
