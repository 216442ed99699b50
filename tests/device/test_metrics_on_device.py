"""Metrics that lie on a device: read when the device is done, by another thread, and never waited for by training."""

import pytest
import torch
from on_device import on_device
from training_kit import as_late_as_can_be, model_of

import holdfast as hf


class Loop:
    """A loop without ``ck.batches`` on the late device; counts the waits of its thread."""

    def __init__(self):
        self.model = model_of(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.waits = 0

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 128, device="late")).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def call(self, function, **metrics):
        before = torch.late.num_waits()
        function(**metrics)
        self.waits += torch.late.num_waits() - before


@pytest.mark.parametrize("every", [1, 3])
@on_device
def test_no_metric_makes_training_wait(every, tmp_path):
    """Steps with a loss on the device, those that save too, and reports: none waits, and all numbers are right."""
    loop, losses = Loop(), {}
    with hf.Checkpointer(tmp_path, loop.state, every=every, keep=None) as ck:
        for step in range(1, 8):
            loss = loop.step()
            losses[step] = loss.clone()
            with as_late_as_can_be():
                loop.call(ck.step, loss=loss)
                if step > 1:  # the first step prepares
                    assert not loop.waits
                loop.waits = 0
                loop.call(ck.report, twice=loss * 2, nested={"half": [loss / 2, 1]})
                loss.zero_()
                assert not loop.waits
    for checkpoint in ck.checkpoints():
        loss = losses[checkpoint.step].item()
        assert checkpoint.metrics == {"loss": loss, "twice": loss * 2, "nested": {"half": [loss / 2, 1]}}
    rows = [
        row for row in hf.Result.from_path(tmp_path).metrics_dataframe.to_dict("records") if row["loss"] == row["loss"]
    ]
    assert {row["step"]: row["loss"] for row in rows} == {step: loss.item() for step, loss in losses.items()}


@on_device
def test_a_report_right_after_a_late_save(tmp_path):
    """Metrics of a step whose save is still being copied are bound to it: the writer hears of it after the save."""
    loop = Loop()
    with hf.Checkpointer(tmp_path, loop.state, every=2, keep=None) as ck:
        for _ in range(4):
            loop.step()
            with as_late_as_can_be():
                ck.step(loss=0.5)
                ck.report(val=0.25)
    assert {each.step: each.metrics for each in ck.checkpoints()} == {
        2: {"loss": 0.5, "val": 0.25},
        4: {"loss": 0.5, "val": 0.25},
    }


@on_device
def test_a_thousand_rows_between_two_saves(tmp_path):
    """Rows are sent when a thousand have gathered: in their order, exactly, and again without a wait."""
    loop = Loop()
    big = torch.tensor([2**53 + 1], device="late")
    with hf.Checkpointer(tmp_path, loop.state, every=None, keep=None) as ck:
        loop.step()
        ck.step(loss=big, flag=True)
        for step in range(2, 1203):
            loop.call(ck.step, loss=big + step, flag=torch.ones((), dtype=torch.bool, device="late"))
        assert not loop.waits
    frame = hf.Result.from_path(tmp_path).metrics_dataframe
    assert list(frame["step"]) == list(range(1, 1203))
    assert [int(loss) for loss in frame["loss"][1:]] == [2**53 + 1 + step for step in range(2, 1203)]
    assert set(frame["flag"]) == {True}


@on_device
def test_metrics_of_another_device_than_the_state(tmp_path):
    """A loss on the second device is as exact as one of the first, and as cheap."""
    loop = Loop()
    with hf.Checkpointer(tmp_path, loop.state, every=1, keep=None) as ck:
        for step in range(1, 4):
            loop.step()
            loss = torch.full((), float(step), device="late:1") * 3
            loop.call(ck.step, loss=loss)
            if step == 1:
                loop.waits = 0
        assert not loop.waits
    assert {each.step: each.metrics for each in ck.checkpoints()} == {step: {"loss": 3.0 * step} for step in (1, 2, 3)}
