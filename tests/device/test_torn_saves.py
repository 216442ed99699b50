"""Whatever changes a tensor that is copied late: the checkpoint is that of the end of the step, or there is none."""

import logging
import os
import random
import shutil
from concurrent.futures import wait

import pytest
import torch
from on_device import on_device
from tearing_loops import LOOPS, NOTICED
from training_kit import Training, as_late_as_can_be, model_of, on_cpu, read

import holdfast as hf
from holdfast.errors import TornSaveError
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal
from holdfast.writer.client import WriterClient

assert len(LOOPS) > 20
HARMLESS = {"plain", "exchanges_memory", "replaces_optimizer_state"}
RESTORING = {  # the values are those of the boundary again before the optimizer's step
    "swaps_in_averages", "swaps_in_averages_by_data", "swaps_in_averages_and_back_at_once", "negates_and_back",
    "perturbs_for_sharpness", "rounds_for_forward",
}  # fmt: skip


def saves_of(folder, loop, num, client, *, seed=0):
    """Make saves of a loop at random moments; return how many were right, and the messages of those dropped."""
    seed = seed * len(LOOPS) + list(LOOPS).index(loop)
    training = Training(folder, loop, seed, client)
    chance = random.Random(seed)
    moments = [0, 2] if loop in NOTICED else [0, 1, 2]
    good, dropped = 0, []
    try:
        for number in range(num):
            # As late as can be, or so many operations later that copies end anywhere in the next step.
            torch.late.set_lateness(chance.choice([0, 3, 10, 30, 60, 100, 300]), seed * 100_000 + number)
            wanted, future, path = training.save()
            training.step(chance.choice(moments))
            try:
                future.result(60)
            except TornSaveError as error:
                dropped.append(str(error))
                assert not path.exists()
                continue
            assert_state_equal(wanted, read(path))
            shutil.rmtree(path)
            good += 1
    finally:
        torch.late.set_lateness(0)
        training.close()
    return good, dropped


@pytest.mark.parametrize("loop", LOOPS)
@on_device
def test_a_save_is_right_or_dropped(loop, tmp_path):
    """Code that changes tensors in a body at any moment costs a save at most: none is committed with other bytes."""
    with WriterClient.start(thread=True) as client:
        good, dropped = saves_of(tmp_path, loop, 3, client)
    assert good + len(dropped) == 3


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@on_device
def test_many_saves_are_right_or_dropped(loop, tmp_path):
    """The same for more moments; HOLDFAST_TORN_SAVES says how many (480 a loop are 10 000 checkpoints)."""
    num = int(os.environ.get("HOLDFAST_TORN_SAVES", "40"))
    with WriterClient.start(thread=True) as client:
        good, dropped = saves_of(tmp_path, loop, num, client, seed=1)
    assert good + len(dropped) == num
    assert not dropped or loop not in HARMLESS


@pytest.mark.parametrize("loop", sorted(LOOPS.keys() - HARMLESS - RESTORING))
@on_device
def test_a_change_ahead_of_the_optimizer_is_seen(loop, tmp_path):
    """Every lasting change before a copy is seen, by `.data` or not, of all elements or of one, of values or places."""
    with as_late_as_can_be(), WriterClient.start(thread=True) as client:
        training = Training(tmp_path, loop, 3, client)
        _, future, path = training.save()
        training.step(2)
        with pytest.raises(TornSaveError, match=r"(model|optimizer)/\S+ .*changed while this save was copied"):
            future.result(60)
        assert not path.exists()
        training.close()


@pytest.mark.parametrize("loop", sorted(HARMLESS))
@on_device
def test_almost_everything_is_late_and_nothing_is_dropped(loop, tmp_path):
    """A loop that changes nothing in place loses no save, and at least nine tenths of the bytes are copied late.

    Memory that it gives back while it is copied is not used again before.
    """
    with as_late_as_can_be(), WriterClient.start(thread=True) as client:
        training = Training(tmp_path, loop, 4, client)
        for number in range(4):
            wanted, future, path = training.save()
            training.step(number % 3)
            future.result(60)
            assert_state_equal(wanted, read(path))
            assert training.snapshotter.copies.late_bytes >= 0.9 * training.snapshotter.layout.tensor_bytes
        training.close()


@on_device
def test_a_torn_tensor_is_copied_at_the_boundary_from_then_on(tmp_path):
    """The first dropped save costs the tensors that it names their late copy, the second costs it all tensors."""
    with as_late_as_can_be(), WriterClient.start(thread=True) as client:
        training = Training(tmp_path, "plain", 5, client)
        late = []
        for name, is_torn in (("0.weight", True), ("0.weight", False), ("3.weight", True), ("3.weight", False)):
            wanted, future, path = training.save(forget=False)
            late.append(training.snapshotter.copies.late_bytes)
            training.model.get_parameter(name).data.neg_()
            training.optimizer.step()
            if is_torn:
                with pytest.raises(TornSaveError, match=f"^model/{name} changed"):
                    future.result(60)
            else:
                future.result(60)
                assert_state_equal(wanted, read(path))
        training.close()
    size = 128 * 160 * 4
    assert late == [6 * size, 5 * size, 5 * size, 0]


@on_device
def test_nothing_is_late_where_there_is_no_memory_for_checksums(tmp_path):
    """A device without memory for them copies everything at the boundary; the save is whole."""
    with WriterClient.start(thread=True) as client:
        training = Training(tmp_path, "plain", 6, client)
        torch.late.set_limit(torch.late.allocated() + 100)
        try:
            wanted, future, path = training.save()
        finally:
            torch.late.set_limit(1 << 60)
        assert training.snapshotter.copies.late_bytes == 0
        training.step(0)
        future.result(60)
        assert_state_equal(wanted, read(path))
        training.close()


@on_device
def test_the_boundary_waits_for_no_device(tmp_path):
    """A save adds no wait of the training thread, and two operations a tensor to its stream."""
    with WriterClient.start(thread=True) as client:
        training = Training(tmp_path, "plain", 7, client)
        training.snapshotter.copies.stepped()
        waits, operations = torch.late.num_waits(), torch.late.num_operations()
        job = training.job()
        future = training.snapshotter.submit(training.state, client, LocalStorage(training.folder), job, lazy=True)
        assert torch.late.num_waits() == waits
        assert training.snapshotter.copies.late_bytes
        assert torch.late.num_operations() - operations <= 6 * 2 + 6
        future.result(60)
        training.close()


class Said(logging.Handler):
    """Keeps what Holdfast logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("holdfast").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("holdfast").removeHandler(self)


@on_device
def test_a_run_goes_on_and_saves_the_next_step_instead(tmp_path):
    """A `Checkpointer` says which step was dropped and why, saves a step after it, and ends with its final step."""
    model = model_of(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = {}
    with Said() as said, hf.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, every=4) as ck:
        while ck.global_step < 12:
            if ck.global_step == 4:
                model[0].weight.data.mul_(-1)
            optimizer.zero_grad()
            model(torch.randn(4, 128, device="late")).square().mean().backward()
            optimizer.step()
            wanted[ck.global_step + 1] = on_cpu({"model": model, "optimizer": optimizer})
            waits = torch.late.num_waits()
            ck.step()
            assert torch.late.num_waits() == waits or ck.global_step == 1  # the first step prepares
            if ck.global_step >= 5:  # by then the save of step 4 has failed; none later finds the writer busy
                wait([save.future for save in ck._session.saves._pending])
        assert ck.stats.skipped == 1
    assert len(said) == 1
    assert "step 4 was NOT saved: model/0.weight changed" in said[0]
    saved = {checkpoint.step: checkpoint for checkpoint in ck.checkpoints()}
    assert 4 not in saved
    assert {8, 12} < saved.keys() <= {5, 6, 7, 8, 12}
    for step, checkpoint in saved.items():
        assert_state_equal(wanted[step], read(checkpoint.path))
