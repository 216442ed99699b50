"""The logic of copies from an accelerator, on a stand-in device: who copies when, who waits for whom."""

import time
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from state_kit import net, train

from holdfast.state.save import cuda
from holdfast.state.save.plan import plan, signature
from holdfast.state.tree.flatten import flatten
from holdfast.writer.arena import Arena


class Device:
    """A stand-in for ``torch.cuda`` whose streams and events only keep a log."""

    def __init__(self):
        self.log = []
        self.active = "main"
        self.broken = False
        device = self

        class Stream:
            def __init__(self, name="side"):
                self.name = name

            def wait_stream(self, other):
                device.log.append((self.name, "waits for stream", other.name))

            def wait_event(self, event):
                device.log.append((self.name, "waits for event", event.of))

        class Event:
            def record(self, stream):
                self.of = stream.name
                device.log.append((stream.name, "records", None))

            def synchronize(self):
                device.log.append(("cpu", "waits for event", self.of))
                if device.broken:
                    raise RuntimeError("device lost")

        self.Event, self.main = Event, Stream("main")
        self.Stream = lambda _device: Stream("side")

    def current_stream(self, _device=None):
        return self.main

    @contextmanager
    def stream(self, stream):
        self.active, before = stream.name, self.active
        yield
        self.active = before

    def entries(self, *names):
        return [row for row in self.log if row[1] in names]


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to live on an accelerator."""

    device = torch.device("cuda", 0)
    is_cpu = False

    def record_stream(self, stream):
        """Do nothing: nobody frees this memory early."""


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: fake)
    copy = cuda._copy
    monkeypatch.setattr(
        cuda,
        "_copy",
        lambda flat, *more: fake.log.append((fake.active, "copies", flat.names[more[-1]])) or copy(flat, *more),
    )
    return fake


@pytest.fixture
def job():
    """Give (flat, layout, arena) of a trained model whose tensors seem to be on a device."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    flat = flatten({"model": model, "optimizer": optimizer, "loose": torch.ones(2)})
    layout = plan(signature(flat))
    for number, name in enumerate(flat.names):
        if not name.endswith("/step"):
            flat.tensors[number] = flat.tensors[number].as_subclass(OnDevice)
    with_arena = Arena.create(layout.arena_bytes)
    yield flat, layout, with_arena
    with_arena.close()


def test_needed():
    """Only a state with a tensor on an accelerator takes this way."""
    assert not cuda.needed([torch.ones(1)])
    assert cuda.needed([torch.ones(1), torch.ones(1).as_subclass(OnDevice)])


def guarded():
    """Give copies that have seen their hook run in a step, so that they may be late."""
    copies = cuda.DeviceCopies()
    model = net(1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    copies.stepped()
    return copies


def late_names(flat):
    return {name for name in flat.names if name.startswith("optimizer/state") and not name.endswith("/step")} | {
        f"model/{number}.{part}" for number in range(3) for part in ("weight", "bias")
    }


def test_only_what_the_optimizer_changes_is_copied_late(device, job):
    """Parameters and optimizer state go to the side stream, buffers and loose tensors are copied in order."""
    flat, layout, arena = job
    copies = guarded()
    ready = Future()
    ready.set_result("committed")
    future = copies.submit(flat, layout, arena, lambda: ready, lazy=True)
    assert future.result(10) == "committed"
    by_stream = {"main": set(), "side": set()}
    for stream, _, name in device.entries("copies"):
        by_stream[stream].add(name)
    assert by_stream["side"] == late_names(flat)
    assert by_stream["main"] == {
        "loose", "model/1.running_mean", "model/1.running_var", "model/1.num_batches_tracked"
    }  # fmt: skip
    copies.close()


def test_not_lazy_copies_everything_at_once_and_waits(device, job):
    """Without ``lazy`` nothing is copied late, and the job is sealed only after the event."""
    flat, layout, arena = job
    copies = guarded()
    copies.submit(flat, layout, arena, lambda: device.log.append(("cpu", "seals", None)), lazy=False)
    assert {stream for stream, _, _ in device.entries("copies")} == {"main"}
    assert device.log[-2:] == [("cpu", "waits for event", "main"), ("cpu", "seals", None)]
    copies.close()


def test_the_side_stream_starts_after_the_work_before_the_save(device, job):
    """The side stream waits for the current one before its first copy."""
    flat, layout, arena = job
    copies = guarded()
    copies.submit(flat, layout, arena, Future, lazy=True)
    rows = [row for row in device.log if row[0] == "side" and row[1] in ("waits for stream", "copies")]
    assert rows[0] == ("side", "waits for stream", "main")
    assert len(rows) > 1
    copies.close()


def test_sealed_only_after_all_copies(device, job):
    """The job is handed over after the events of both streams, from the sealing thread."""
    flat, layout, arena = job
    copies = guarded()

    def seal():
        device.log.append(("cpu", "seals", None))
        done = Future()
        done.set_result(None)
        return done

    copies.submit(flat, layout, arena, seal, lazy=True).result(10)
    rows = device.entries("waits for event", "seals")
    assert sorted(rows[:2]) == [("cpu", "waits for event", "main"), ("cpu", "waits for event", "side")]
    assert rows[2] == ("cpu", "seals", None)
    copies.close()


def test_any_optimizer_step_waits_for_the_copies_once(device, job):
    """The next step of any optimizer makes the current stream wait for the side stream; the one after does not."""
    flat, layout, arena = job
    copies = guarded()
    copies.submit(flat, layout, arena, Future, lazy=True)
    other = net(1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert ("main", "waits for event", "side") not in device.log
    train(other, optimizer, steps=1)
    train(other, optimizer, steps=1)
    assert device.log.count(("main", "waits for event", "side")) == 1
    copies.close()
    copies.close()
    copies.fence()


def test_the_hook_is_gone_after_close(device, job):
    """A closed snapshotter costs later optimizer steps nothing."""
    flat, layout, arena = job
    copies = guarded()
    copies.submit(flat, layout, arena, Future, lazy=True)
    copies.close()
    train(net(1), torch.optim.SGD(net(1).parameters(), lr=0.1), steps=1)
    assert ("main", "waits for event", "side") not in device.log


@pytest.mark.parametrize("where", ["device", "seal", "job"])
def test_errors_reach_the_future(device, job, where):
    """A lost device, a failing hand-over and a failing save all end in the future the caller holds."""
    flat, layout, arena = job
    device.broken = where == "device"
    copies = guarded()

    def seal():
        if where == "seal":
            raise RuntimeError("writer gone")
        failed = Future()
        failed.set_exception(RuntimeError("disk full"))
        return failed

    error = copies.submit(flat, layout, arena, seal, lazy=True).exception(10)
    assert str(error) == {"device": "device lost", "seal": "writer gone", "job": "disk full"}[where]
    copies.close()


def test_bytes_arrive_where_the_layout_says(device, job):
    """Whatever the stream, each tensor's bytes lie at its place in the arena."""
    flat, layout, arena = job
    copies = guarded()
    copies.submit(flat, layout, arena, Future, lazy=True)
    for tensor, offset, size in zip(flat.tensors, layout.offsets, layout.sizes, strict=True):
        plain = tensor.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
        assert bytes(arena.view[offset : offset + size]) == bytes(plain.numpy())
    copies.close()


def test_a_device_without_streams_is_copied_while_we_wait(monkeypatch, job):
    """An accelerator whose module has no streams (MPS) is copied synchronously, and sealed."""
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: object())
    flat, layout, arena = job
    copies = guarded()
    done = Future()
    done.set_result(1)
    assert copies.submit(flat, layout, arena, lambda: done, lazy=True).result(10) == 1
    number = flat.names.index("loose")
    offset = layout.offsets[number]
    assert bytes(arena.view[offset : offset + 8]) == torch.ones(2).numpy().tobytes()
    copies.close()


def test_without_a_hook_in_the_step_before_nothing_is_copied_late(device, job):
    """A replayed CUDA graph calls no hooks, so nothing would hold its update back: copies go before it, in order."""
    flat, layout, arena = job
    copies = guarded()
    copies.stepped()  # a step in which no optimizer called its hook
    copies.submit(flat, layout, arena, Future, lazy=True)
    assert {stream for stream, _, _ in device.entries("copies")} == {"main"}
    copies.close()


def test_the_arena_is_given_back_only_after_the_copies(device, job):
    """A structure that changes while copies are under way waits for them: the device still writes to that memory."""
    flat, layout, arena = job
    copies = guarded()
    sealed = []

    def seal():
        time.sleep(0.2)
        sealed.append(True)
        return Future()

    copies.submit(flat, layout, arena, seal, lazy=True)
    copies.unpin()
    assert sealed
    copies.close()
