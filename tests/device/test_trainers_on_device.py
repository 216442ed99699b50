"""The trainers on a device, by its name and by default."""

import os
import sys
from pathlib import Path

import late_device
import pytest
import torch
from loop_kit import Crash, everything, rich
from on_device import on_device

import holdfast as hf
from holdfast import RunConfig
from holdfast.torch import TorchTrainer, get_device, prepare_model
from holdfast.trainers.loop.parallel import choose_device
from holdfast.verify.state import assert_state_equal, generators


@on_device
def test_the_accelerator_is_the_default():
    """An accelerator that is not CUDA is found by the same calls; its generators are among those recorded."""
    assert choose_device(None).type == choose_device("gpu").type == get_device().type == "late"
    model = prepare_model(torch.nn.Linear(2, 2))
    assert model.weight.device == torch.device("late", 0)
    assert len(generators()["late"]) == 2


@on_device
def test_the_loop_trainer_goes_on_as_if_it_had_never_ended(tmp_path):
    """Two optimizers, averages, dropout and metrics on the device: a life that ends and goes on is the whole one."""
    whole = rich(str(tmp_path / "whole"), max_duration="2ep", device="late")
    whole.fit()
    with pytest.raises(Crash):
        rich(str(tmp_path / "parts"), max_duration="2ep", crash_at=7, device="late").fit()
    parts = rich(str(tmp_path / "parts"), max_duration="2ep", device="late", autoresume=True)
    assert int(parts.state.timestamp.batch) == 6
    parts.fit()
    assert next(parts.state.model.parameters()).device.type == "late"
    assert_state_equal(everything(whole), everything(parts))
    for trainer in (whole, parts):
        trainer.close()


def train_on_device(config):
    """Train in a worker that dies once in the middle."""
    sys.path.insert(0, config["kits"])
    import late_device as device

    device.load()
    torch.manual_seed(3)
    model = torch.nn.Linear(160, 160).to("late")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "rng": hf.RNG, "done": 0}
    checkpoint = hf.get_checkpoint()
    if checkpoint is not None:
        state = hf.load(checkpoint, state)
    while state["done"] < 6:
        model(torch.randn(4, 160, device="late")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["done"] += 1
        hf.report({"sum": float(model.weight.double().sum())}, state=state)
        if state["done"] == 3 and checkpoint is None and config["dies"]:
            os._exit(3)


@pytest.mark.slow
def test_the_function_trainer_goes_on_as_if_it_had_never_ended(tmp_path):
    """Workers whose state lies on a device: killed after step 3, the run ends with the numbers of an unbroken one."""
    if (why := late_device.missing()) is not None:
        pytest.skip(why)
    late_device._build()
    sums = []
    for name, dies in (("whole", False), ("parts", True)):
        config = {"kits": str(Path(late_device.__file__).parent), "dies": dies}
        trainer = TorchTrainer(
            train_on_device,
            train_loop_config=config,
            run_config=RunConfig(storage_path=tmp_path, name=name, failure_config=hf.FailureConfig(max_failures=1)),
        )
        result = trainer.fit()
        sums.append(result.metrics["sum"])
    assert sums[0] == sums[1]
