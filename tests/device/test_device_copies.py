"""Copies from an accelerator: which are late, who waits for whom, and how they end."""

import time
from concurrent.futures import Future
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from on_device import on_device
from training_kit import Training, as_late_as_can_be, on_cpu, read

from holdfast.errors import HoldfastError
from holdfast.state.accelerator import any_on_device
from holdfast.state.save.device_copies import Checksums, is_checked
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal
from holdfast.writer.client import WriterClient


@contextmanager
def training(tmp_path, seed):
    with as_late_as_can_be(), WriterClient.start(thread=True) as client:
        one = Training(tmp_path, "plain", seed, client)
        yield one
        one.close()


@on_device
def test_needed():
    """Only a state with a tensor on an accelerator takes this way."""
    assert not any_on_device([torch.ones(1)])
    assert any_on_device([torch.ones(1), torch.ones(1, device="late")])


@on_device
def test_only_what_an_optimizer_owns_is_late(tmp_path):
    """Buffers and loose tensors are copied at the boundary: a forward changes them before any optimizer."""
    with training(tmp_path, 1) as one:
        one.state["loose"] = torch.ones(100, 200, device="late")
        wanted, future, path = one.save()
        one.state["loose"].zero_()
        one.model[1].running_mean.zero_()
        one.step(0)
        assert one.snapshotter.copies.late_bytes == 6 * 128 * 160 * 4
        future.result(60)
        del one.state["loose"]
        assert_state_equal(wanted, read(path))
        assert torch.equal(torch.ones(100, 200), one.loaded(path, "loose"))


@on_device
def test_not_lazy_waits_and_copies_nothing_late(tmp_path):
    """Without ``lazy`` the state may change in any way when `submit` returns."""
    with training(tmp_path, 2) as one:
        one.snapshotter.copies.stepped()
        wanted, job = on_cpu(one.state), one.job()
        future = one.snapshotter.submit(one.state, one.client, LocalStorage(one.folder), job)
        for param in one.model.parameters():
            param.data.zero_()
        assert one.snapshotter.copies.late_bytes == 0
        future.result(60)
        assert_state_equal(wanted, read(tmp_path / job.directory))


@on_device
def test_without_a_hook_in_the_step_before_nothing_is_late(tmp_path):
    """A replayed graph calls no hooks, so nothing would hold its update back: copies go before it, in order."""
    with training(tmp_path, 3) as one:
        one.snapshotter.copies.stepped()  # a step in which no optimizer called its hook
        wanted, future, path = one.save()
        for param in one.model.parameters():
            param.data.zero_()
        assert one.snapshotter.copies.late_bytes == 0
        future.result(60)
        assert_state_equal(wanted, read(path))


@on_device
def test_any_optimizer_step_waits_for_the_copies(tmp_path):
    """The next step of any optimizer is behind the copies; a closed snapshotter has no hook any more."""
    with training(tmp_path, 4) as one:
        _, future, _ = one.save()
        side = next(iter(one.snapshotter.copies._streams.values()))
        other = torch.nn.Linear(2, 2).to("late")
        other(torch.ones(1, 2, device="late")).sum().backward()
        assert not side.query()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert side.query()
        future.result(60)
        copies = one.snapshotter.copies
        one.close()
        copies._fences.append(None)  # would raise if the hook still ran
        one.optimizer.step()


@pytest.mark.parametrize("where", ["submit", "job"])
@on_device
def test_errors_reach_the_future(where, tmp_path):
    """A hand-over that fails and a save that fails both end in the future that the caller holds."""
    with training(tmp_path, 5) as one:
        failed = Future()
        failed.set_exception(HoldfastError("disk full"))
        failed.number = 1 << 40
        with mock.patch.object(WriterClient, "submit", autospec=True) as submit:
            submit.side_effect = HoldfastError("writer gone") if where == "submit" else lambda *_, **__: failed
            _, future, _ = one.save()
            one.step(0)
            with pytest.raises(HoldfastError, match="writer gone" if where == "submit" else "disk full"):
                future.result(60)


@on_device
def test_a_lost_device_fails_the_save_alone(tmp_path):
    """An error of the device while copies are waited for is that of the save, which is not submitted."""
    with training(tmp_path, 6) as one:

        class Broken(torch.Event):
            def synchronize(self):
                raise RuntimeError("device lost")

        with mock.patch.object(torch.late, "Event", side_effect=lambda: Broken("late")):
            _, future, path = one.save()
        with pytest.raises(RuntimeError, match="device lost"):
            future.result(60)
        assert not path.exists()
        torch.late.synchronize()  # this device is not lost, and has the arena's address


@on_device
def test_a_device_without_streams_is_copied_while_we_wait(tmp_path):
    """An accelerator whose module has no streams (MPS, XLA) is copied as a CPU is."""
    with training(tmp_path, 7) as one:
        with mock.patch("holdfast.state.save.device_copies.has_streams", return_value=False):
            wanted, future, path = one.save()
        for param in one.model.parameters():
            param.data.zero_()
        future.result(60)
        assert_state_equal(wanted, read(path))


@on_device
def test_the_arena_is_given_back_only_after_the_copies(tmp_path):
    """A structure that changes while copies are under way waits for them: the device still writes to that memory."""
    with training(tmp_path, 8) as one:
        sealed = []
        submit = WriterClient.submit

        def slow(*args, **more):
            time.sleep(0.1)
            sealed.append(True)
            return submit(*args, **more)

        with mock.patch.object(WriterClient, "submit", slow):
            _, future, _ = one.save()
            one.step(0)
            one.snapshotter.copies.unpin()
            assert sealed
            future.result(60)


@pytest.mark.parametrize("lazy", [True, False])
@on_device
def test_a_save_that_fails_leaves_no_copy_in_flight(lazy, tmp_path):
    """Whoever gets the error may unmap the arena at once: no device writes to it any more."""
    with training(tmp_path, 11) as one:
        before = one.save()
        one.step(0)
        before[1].result(60)
        one.snapshotter.copies.stepped()
        with (
            mock.patch("holdfast.state.save.device_copies.stage", side_effect=MemoryError("no memory left")),
            pytest.raises(MemoryError, match="no memory left"),
        ):
            one.snapshotter.submit(one.state, one.client, LocalStorage(one.folder), one.job(), lazy=lazy)
        assert one.snapshotter.copies.late_bytes or not lazy
        arena = one.snapshotter.arena
        left = bytes(arena.view)
        torch.late.synchronize()
        assert bytes(arena.view) == left
        one.snapshotter._drop_layout()
        wanted, future, path = one.save()
        one.step(1)
        future.result(60)
        assert_state_equal(wanted, read(path))


@on_device
def test_a_default_device_of_the_script_changes_nothing(tmp_path):
    """Under ``torch.set_default_device`` what a save makes for itself lies where it has to."""
    torch.set_default_device("late")
    try:
        with training(tmp_path, 10) as one:
            wanted, future, path = one.save()
            one.step(0)
            future.result(60)
            assert one.snapshotter.copies.late_bytes
            torch.set_default_device(None)
            assert_state_equal(wanted, read(path))
    finally:
        torch.set_default_device(None)


@on_device
def test_two_devices_in_one_state(tmp_path):
    """Tensors of two devices are copied late, each on a stream of its own device."""
    with training(tmp_path, 9) as one:
        one.model.add_module("far", torch.nn.Linear(160, 128).to("late:1"))
        far = one.model.far
        second = torch.optim.SGD(far.parameters(), lr=0.1, momentum=0.9)
        one.state["second"] = second
        for _ in range(2):
            far(torch.randn(2, 160, device="late:1")).square().sum().backward()
            second.step()
        _, future, path = one.save()
        kept = far.weight.detach().cpu().clone()
        far(torch.randn(2, 160, device="late:1")).square().sum().backward()
        second.step()
        one.optimizer.step()
        future.result(60)
        assert len(one.snapshotter.copies._streams) == 2
        assert torch.equal(one.loaded(path, "model")["far.weight"], kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "complex64", "float8_e4m3fn"])
@on_device
def test_device_and_memory_have_the_same_checksum(dtype):
    """The sums of a device are those of the bytes, wherever they lie, and another byte anywhere changes them."""
    checksums = Checksums()
    torch.manual_seed(1)
    raw = torch.randint(0, 256, (1_200_000,), dtype=torch.uint8)
    tensors = [raw[:size].clone().view(getattr(torch, dtype)) for size in (65536, 65544, 1_200_000)]
    assert all(map(is_checked, tensors))
    sums = checksums.of([tensor.to("late") for tensor in tensors]).cpu().tolist()
    for tensor, expected in zip(tensors, sums, strict=True):
        memory = bytearray(3) + bytearray(tensor.view(torch.uint8).numpy().tobytes())
        view = memoryview(memory)
        assert checksums.of_memory(view, 3, tensor.nbytes) == expected
        for place in (3, 4, len(memory) // 2, len(memory) - 1):
            for bit in (1, 128):
                memory[place] ^= bit
                assert checksums.of_memory(view, 3, tensor.nbytes) != expected
                memory[place] ^= bit


@on_device
def test_what_has_no_checksum_is_copied_at_the_boundary():
    """Small tensors, elements of eight bytes, and what does not lie in memory as it is stored."""
    big = torch.zeros(200, 200, device="late")
    assert is_checked(big)
    for tensor in (big[:2], big.t(), big.double(), big.long(), big[:, 1:], big.to(torch.complex64).conj()):
        assert not is_checked(tensor)
