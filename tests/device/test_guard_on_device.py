"""The guard with a loss that lies on a device: judged when it has arrived, and never waited for by training."""

import pytest
import torch
from catalog_kit import catalog_of
from on_device import on_device
from training_kit import as_late_as_can_be, model_of

import holdfast as hf
from holdfast.run.rollbacks import read_rollbacks


def train(run, steps, *, bad=0, lazy=True, **options):
    """Return how often `step` has waited, but for the first; the loss of step ``bad`` is nan."""
    model = model_of(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    waits = 0
    with hf.Checkpointer(run, {"model": model, "optimizer": optimizer}, guard=hf.Guard(), **options) as ck:
        for _ in ck.batches(range(steps)):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 128, device="late")).square().mean()
            loss.backward()
            optimizer.step()
            value = loss.detach() * (float("nan") if ck.batch + 1 == bad else 1.0)
            before = torch.late.num_waits()
            with as_late_as_can_be():
                ck.step(loss=value)
            value.zero_()  # the metric is what it was when it was given
            if ck.global_step > 1:
                waits += torch.late.num_waits() - before
            if not lazy:
                torch.late.synchronize()
    return waits


def bad_steps(run):
    return [(found.step, bool(found.left_out)) for found in read_rollbacks(catalog_of(run).index.notes)]


@on_device
def test_no_value_makes_training_wait(tmp_path):
    """Two hundred sound steps, none of which waits for the device."""
    assert train(tmp_path, 200, every=None) == 0


@on_device
def test_a_bad_value_is_found_after_its_step_was_saved(tmp_path):
    """Each step is saved, the bad one too, before it is judged: the next life goes on from before it all the same."""
    for number in range(2):
        with pytest.raises(SystemExit) as end:
            train(tmp_path, 30, bad=12, lazy=False, every=1, keep=hf.Keep(last=1))
        assert end.value.code == 86
        assert bad_steps(tmp_path)[number] == (12, number == 1)
        steps = [record.step for record in catalog_of(tmp_path).records()]
        assert any(step < 12 for step in steps), steps
    train(tmp_path, 30, bad=12, lazy=False, every=1, keep=hf.Keep(last=1))
    newest = catalog_of(tmp_path).newest()
    assert newest.step == 29


@on_device
def test_the_last_values_are_waited_for_at_the_end(tmp_path):
    """The bad step is the last one, and nobody asks for a batch after it."""
    with pytest.raises(SystemExit) as end:
        train(tmp_path, 9, bad=9, every=None)
    assert end.value.code == 86
    assert bad_steps(tmp_path) == [(9, False)]
