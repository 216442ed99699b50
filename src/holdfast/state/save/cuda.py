"""Copies from an accelerator: pinned memory, a stream of their own, and a fence before the optimizer's next step.

Parameters and optimizer state do not change between two optimizer steps, so they are copied on a side stream while
training goes on with forward and backward; a hook that torch calls before every ``optimizer.step`` makes the current
stream wait for the copies. (Nothing guards against code that changes parameters in between without an
optimizer.) Everything else is copied on the current stream, ahead of whatever training does next: buffers such as
BatchNorm statistics change in forward.

The device module comes from ``torch.get_device_module``, so a stand-in can test the logic on a machine without an
accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast._log import get_logger
from holdfast.writer.arena import Arena
from holdfast.writer.serial_executor import SerialExecutor

from ..tree.flatten import Flat
from .plan import Layout
from .staging import arena_tensor, stage

__all__ = ["DeviceCopies", "needed", "try_pinning"]

_LOG = get_logger("state")
_PINNED_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device context


def needed(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether any tensor lives on an accelerator."""
    return not all(tensor.is_cpu for tensor in tensors)


class DeviceCopies:
    """The copies from devices for one snapshotter; those of one save at a time are in flight."""

    def __init__(self) -> None:
        self._pinned: int | None = None
        # (device module, device, event): the stream of that device waits for the event before the optimizer's step
        self._fences: list[tuple[Any, torch.device, Any]] = []
        self._streams: dict[torch.device, Any] = {}
        self._sealer = SerialExecutor("holdfast-seal")
        self._sealing: Future[None] | None = None
        self._seen = self._guarded = False  # the hook ran in this step; it ran in the step before `stepped`
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._before_step())

    def submit(
        self,
        flat: Flat,
        layout: Layout,
        arena: Arena,
        seal: Callable[[], Future[Any]],
        *,
        lazy: bool,
    ) -> Future[Any]:
        """Start all copies; ``seal`` runs once their bytes have arrived, on a thread of its own.

        Args:
            flat: the state; tensors of an optimizer and its parameters may be copied late.
            layout: where each tensor goes.
            arena: holds the whole layout.
            seal: submits the job.
            lazy: False waits for every copy before returning.
        """
        self._pin(arena)
        # A captured CUDA graph that is replayed updates parameters without calling any hook: then everything is copied
        # on the current stream, ahead of the next replay.
        late = flat.optimized if lazy and self._guarded else set()
        events = []
        on_cpu = []
        by_device: dict[torch.device, tuple[list[int], list[int]]] = {}
        for number, tensor in enumerate(flat.tensors):
            if layout.offsets[number] < 0 or not layout.sizes[number]:
                continue
            if tensor.device.type == "cpu" or not hasattr(torch.get_device_module(tensor.device), "current_stream"):
                on_cpu.append(number)  # an accelerator without streams (MPS) blocks while it copies, as a CPU does
            else:
                by_device.setdefault(tensor.device, ([], []))[flat.names[number] in late].append(number)
        for device, (now, later) in by_device.items():
            module = torch.get_device_module(device)
            current = module.current_stream(device)
            for number in now:
                _copy(flat, layout, arena, number)
            if later:
                side = self._streams.setdefault(device, module.Stream(device))
                side.wait_stream(current)
                with module.stream(side):
                    for number in later:
                        flat.tensors[number].record_stream(side)
                        _copy(flat, layout, arena, number)
                    event = module.Event()
                    event.record(side)
                self._fences.append((module, device, event))
                events.append(event)
            event = module.Event()
            event.record(current)
            events.append(event)
        sub = _Subset(layout, on_cpu)
        stage(sub, [flat.tensors[number] for number in on_cpu], arena.address, arena.view)  # type: ignore[arg-type]
        if not lazy:
            for event in events:
                event.synchronize()
            return seal()
        result: Future[Any] = Future()
        self._sealing = self._sealer.run(partial(_seal_later, events, seal, result))
        return result

    def stepped(self) -> None:
        """Note the end of a step of the loop. Only if the hook ran in it may the next copies be late."""
        self.fence()
        self._guarded, self._seen = self._seen, False

    def _before_step(self) -> None:
        self._seen = True
        self.fence()

    def fence(self) -> None:
        """Make the current stream wait for copies of the side streams; costs the CPU nothing."""
        fences, self._fences = self._fences, []
        for module, device, event in fences:
            module.current_stream(device).wait_event(event)

    def unpin(self) -> None:
        """Release the pinning of the arena before it is unmapped, once nothing copies into it any more."""
        if self._sealing is not None:
            wait([self._sealing])
            self._sealing = None
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None

    def close(self) -> None:
        """Wait for copies in flight and take the hook out; idempotent."""
        self._sealer.close()
        self._hook.remove()
        self.unpin()

    def _pin(self, arena: Arena) -> None:
        if self._pinned == arena.address or not torch.cuda.is_available():
            return
        self.unpin()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cudart.cudaHostRegister(arena.address, arena.size, _PINNED_PORTABLE)
        if int(status) != 0:
            _LOG.warning("the arena could not be pinned (cuda error %s): copies from the device are slower", status)
            return
        self._pinned = arena.address


class _Subset:
    """The part of a layout that `stage` copies from the CPU."""

    def __init__(self, layout: Layout, numbers: list[int]) -> None:
        self.offsets = [layout.offsets[number] for number in numbers]
        self.sizes = [layout.sizes[number] for number in numbers]


def _copy(flat: Flat, layout: Layout, arena: Arena, number: int) -> None:
    tensor = flat.tensors[number].detach()
    arena_tensor(arena.view, layout.offsets[number], layout.sizes[number], tensor).copy_(tensor, non_blocking=True)


def _seal_later(events: list[Any], seal: Callable[[], Future[Any]], result: Future[Any]) -> None:
    try:
        for event in events:
            event.synchronize()
        submitted = seal()
    except BaseException as error:  # noqa: BLE001 - a thread edge: the future of the save raises it
        result.set_exception(error)
        return
    submitted.add_done_callback(lambda done: _pass_on(done, result))


def _pass_on(done: Future[Any], result: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def try_pinning(size: int) -> tuple[list[str], float]:
    """Pin ``size`` bytes as a save does, copy to them from the device, and release them.

    Returns:
        The names of the devices, and the seconds that pinning took.

    Raises:
        RuntimeError: torch sees no device, or the driver refuses.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no device")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with Arena.create(size) as arena:
        memory = torch.frombuffer(arena.view, dtype=torch.uint8)
        memory.fill_(0)  # makes its pages, which exist before a save as well
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size, _PINNED_PORTABLE))
        seconds = time.perf_counter() - start
        try:
            memory.copy_(torch.ones(size, dtype=torch.uint8, device="cuda"))
            if int(memory[-1]) != 1:
                raise RuntimeError("a copy from the device to pinned memory did not arrive")
        finally:
            torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))
            del memory
    return names, seconds
