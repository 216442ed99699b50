"""Copies from an accelerator: most of them late, on a stream of their own, and checked when they have arrived.

Training does not change parameters and optimizer state between two optimizer steps, as a rule. So they are copied on a
side stream while it goes on with forward and backward; a hook that torch calls before every ``optimizer.step`` makes
the current stream wait for the copies. Everything else is copied on the current stream, ahead of whatever training does
next: buffers such as BatchNorm statistics change in forward.

Nothing keeps other code from changing a parameter in between (averaged weights swapped in for an evaluation, a layer
that is reset, a replayed graph), so no late copy is believed: the device takes a checksum of each tensor at the
boundary (`Checksums`), and the bytes that have arrived must have the same. Where they have not, the save is dropped
before the writer may commit it, and the tensor is copied at the boundary from then on; after a second such save
everything is.

Whatever has streams and events goes this way (CUDA, ROCm, XPU, NPU, backends of others), by the module that
``torch.get_device_module`` names. Only the pinning of the arena is CUDA's alone (ROCm has the same call): torch offers
no other backend a way to pin memory that it has not allocated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import TornSaveError
from holdfast.storage.together import SerialExecutor, chain
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import PendingCall

from ..accelerator import has_streams
from ..tree.flatten import Flat
from .plan import Layout
from .staging import arena_tensor, stage

__all__ = ["Checksums", "DeviceCopies", "is_checked", "try_pinning"]

MIN_BYTES = 64 << 10  # below, a copy costs a device less than a checksum
_COLUMNS = range(4097, 8192, 2)
_TOGETHER = 64  # tensors whose sums are mixed at once; bounds the memory that it takes on a device to some megabytes

_LOG = get_logger("state")
_PINNED_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device context
_FOLLOW = 96 << 20  # checked bytes between two messages to the writer, which writes what is checked
_NAMED = 5  # tensors in a message


@dataclass(slots=True)
class _LateCopies:
    """Tensors of one device that are copied late, and their checksums in host memory once the device is done."""

    numbers: list[int]
    sums: torch.Tensor


class DeviceCopies:
    """The copies from devices for one snapshotter; those of one save at a time are in flight.

    Attributes:
        late_bytes: how much of the last save was copied late.
        sealing: done when the writer has all of the last save; None: it has it.
    """

    def __init__(self) -> None:
        self.late_bytes = 0
        self._checksums = Checksums()
        self._pinned: set[int] = set()  # addresses of arenas
        # (device module, device, event): the stream of that device waits for the event before the optimizer's step
        self._fences: list[tuple[Any, torch.device, Any]] = []
        self._streams: dict[torch.device, Any] = {}
        self._sums: dict[torch.device, torch.Tensor] = {}  # pinned memory for checksums
        self._sealer = SerialExecutor("holdfast-seal")
        self.sealing: Future[None] | None = None
        self._torn: set[str] = set()  # names of tensors that changed while they were copied late
        self._num_torn = 0  # saves dropped for it
        self._seen = self._guarded = False  # the hook ran in this step; it ran in the step before `stepped`
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._before_step())

    def prepare(self, flat: Flat) -> None:
        """Do ahead of the first save what makes training wait for the devices."""
        for device, tensors in _by_device(flat, range(len(flat.tensors))).items():
            if has_streams(device):
                self._checksums.prepare(device)
                self._pinned_sums(device, len(tensors))

    def submit(
        self,
        flat: Flat,
        layout: Layout,
        arena: Arena,
        client: WriterClient,
        hand_over: Callable[[int | None], PendingCall],
        *,
        lazy: bool,
    ) -> Future[Any]:
        """Start all copies. The save is sealed once their bytes have arrived unchanged, on a thread of its own.

        Args:
            flat: the state; tensors of an optimizer and its parameters may be copied late.
            layout: where each tensor goes.
            arena: holds the whole layout.
            client: the writer.
            hand_over: submits the job, with the number of bytes of the arena that are there; None: all.
            lazy: False waits for every copy before returning.

        Returns:
            The future of the save. It fails with `TornSaveError` if a tensor changed while it was copied.

        Raises:
            BaseException: what went wrong, once no copy is in flight any more: the arena may be unmapped.
        """
        copied = [n for n in range(len(flat.tensors)) if layout.offsets[n] >= 0 and layout.sizes[n]]
        # An accelerator without streams (MPS, XLA) blocks while it copies, as a CPU does.
        on_cpu = [n for n in copied if not has_streams(flat.tensors[n].device)]
        devices = _by_device(flat, sorted(set(copied).difference(on_cpu)))
        try:
            events, late_copies = self._start(flat, layout, arena, devices, lazy=lazy)
            stage(
                [flat.tensors[number] for number in on_cpu], [layout.offsets[number] for number in on_cpu],
                [layout.sizes[number] for number in on_cpu], arena,
            )  # fmt: skip
            if not lazy:
                for event in events:
                    event.synchronize()
                return hand_over(None)
            names = layout.signature.names  # the state itself is not kept: its tensors may be freed while it is copied
            check = partial(self._check, names, layout, arena, late_copies) if late_copies else None
            result: Future[Any] = Future()
            self.sealing = self._sealer.run(partial(_seal_later, events, client, hand_over, arena, check, result))
            return result
        except BaseException:
            self._fences.clear()
            for device in devices:
                torch.get_device_module(device).synchronize(device)
            raise

    def _start(
        self, flat: Flat, layout: Layout, arena: Arena, devices: Mapping[torch.device, list[int]], *, lazy: bool
    ) -> tuple[list[Any], list[_LateCopies]]:
        """Queue the copies from all devices; return the events at their ends, and what is copied late."""
        self._pin(arena)
        events: list[Any] = []
        late_copies: list[_LateCopies] = []
        for device, numbers in devices.items():
            late = self._late(flat, numbers) if lazy else []
            sums = self._take_sums(flat, device, late)
            if sums is None:
                late = []
            module = torch.get_device_module(device)
            current = module.current_stream(device)
            is_late = set(late)
            for number in numbers:
                if number not in is_late:
                    _copy(flat, layout, arena, number)
            if sums is not None:
                late_copies.append(_LateCopies(late, sums))
                events.append(self._copy_late(flat, layout, arena, device, late))
            event = module.Event()
            event.record(current)
            events.append(event)
        self.late_bytes = sum(layout.sizes[number] for copies in late_copies for number in copies.numbers)
        return events, late_copies

    def _late(self, flat: Flat, numbers: Sequence[int]) -> list[int]:
        """Return which tensors of a device may be copied late."""
        # A captured graph that is replayed updates parameters without calling any hook: then everything is copied on
        # the current stream, ahead of the next replay.
        if not self._guarded or self._num_torn > 1:
            return []
        may = flat.optimized - self._torn
        return [number for number in numbers if flat.names[number] in may and is_checked(flat.tensors[number])]

    def _take_sums(self, flat: Flat, device: torch.device, numbers: Sequence[int]) -> torch.Tensor | None:
        """Let the current stream take checksums; return where they arrive in host memory, None if there are none."""
        if not numbers:
            return None
        try:
            sums = self._checksums.of([flat.tensors[number] for number in numbers])
        except RuntimeError as error:  # no memory left on the device, or a backend without these operations
            _LOG.debug("%s: no checksums, so nothing is copied late: %s", device, error)
            return None
        return self._pinned_sums(device, len(numbers)).copy_(sums, non_blocking=True)

    def _pinned_sums(self, device: torch.device, num: int) -> torch.Tensor:
        memory = self._sums.get(device)
        if memory is None or len(memory) < num:
            # Pinned, or the copy would make training wait for the device.
            memory = self._sums[device] = torch.empty(num, dtype=torch.int64, device="cpu", pin_memory=True)
        return memory[:num]

    def _copy_late(self, flat: Flat, layout: Layout, arena: Arena, device: torch.device, numbers: Sequence[int]) -> Any:
        """Queue copies on the side stream, behind what the current stream has to do; return the event at their end."""
        module = torch.get_device_module(device)
        side = self._streams.setdefault(device, module.Stream(device))
        side.wait_stream(module.current_stream(device))
        with module.stream(side):
            for number in numbers:
                flat.tensors[number].record_stream(side)  # freed by training, its memory is not used again before
                _copy(flat, layout, arena, number)
            event = module.Event()
            event.record(side)
        self._fences.append((module, device, event))
        return event

    def _check(
        self, names: Sequence[str], layout: Layout, arena: Arena, late_copies: Sequence[_LateCopies],
        checked: Callable[[int], object],
    ) -> None:  # fmt: skip
        """Compare what has arrived with what stood on the devices at the boundary.

        Args:
            names: of the tensors.
            layout: where they lie.
            arena: holds them.
            late_copies: which of them to check.
            checked: called from time to time with the number of bytes at the start of the arena that are good.

        Raises:
            TornSaveError: something else has arrived.
        """
        expected = {
            number: value
            for copies in late_copies
            for number, value in zip(copies.numbers, copies.sums.tolist(), strict=True)
        }
        told = 0
        torn: list[str] = []
        for number in sorted(expected, key=layout.offsets.__getitem__):
            offset, size = layout.offsets[number], layout.sizes[number]
            if not torn and offset - told >= _FOLLOW:
                checked(told := offset)
            if self._checksums.of_memory(arena.view, offset, size) != expected[number]:
                torn.append(names[number])
        if torn:
            self._torn.update(torn)
            self._num_torn += 1
            raise TornSaveError(
                f"{listed(sorted(torn), _NAMED)} changed while this save was copied from the device, after "
                "the end of the step and before the next optimizer.step(): something other than an optimizer changes "
                "them (averaged weights swapped in for an evaluation, a layer that is reset, a replayed graph). "
                + ("These are" if self._num_torn == 1 else "Everything is")
                + " copied at the end of the step from now on, which holds training a little longer"
            )

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
        """Release the pinning of arenas before they are unmapped, once nothing copies into them any more."""
        if self.sealing is not None:
            wait([self.sealing])
            self.sealing = None
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()

    def close(self) -> None:
        """Wait for copies in flight and take the hook out; idempotent."""
        self._sealer.close()
        self._hook.remove()
        self.unpin()

    def _pin(self, arena: Arena) -> None:
        if arena.address in self._pinned or not torch.cuda.is_available():
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cudart.cudaHostRegister(arena.address, arena.size, _PINNED_PORTABLE)
        if int(status) != 0:
            _LOG.warning("the arena could not be pinned (cuda error %s): copies from the device are slower", status)
            return
        self._pinned.add(arena.address)


def _copy(flat: Flat, layout: Layout, arena: Arena, number: int) -> None:
    tensor = flat.tensors[number].detach()
    arena_tensor(arena.view, layout.offsets[number], layout.sizes[number], tensor).copy_(tensor, non_blocking=True)


def _by_device(flat: Flat, numbers: Iterable[int]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for number in numbers:
        groups.setdefault(flat.tensors[number].device, []).append(number)
    return groups


def _seal_later(
    events: Sequence[Any],
    client: WriterClient,
    hand_over: Callable[[int | None], PendingCall],
    arena: Arena,
    check: Callable[[Callable[[int], object]], None] | None,
    result: Future[Any],
) -> None:
    try:
        for event in events:
            event.synchronize()
        if check is None:
            submitted = hand_over(None)
        else:
            submitted = hand_over(0)  # the writer writes what is checked, and commits when all of it is
            try:
                check(partial(client.fill, submitted))
            except TornSaveError as error:
                client.abandon(submitted, error)  # the future fails with it when the files are gone
            except BaseException:
                client.abandon(submitted)
                raise
            else:
                client.fill(submitted, arena.size)
    except BaseException as error:  # noqa: BLE001 - a thread edge: the future of the save raises it
        result.set_exception(error)
        return
    chain(submitted, result)


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


def is_checked(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has a checksum: it is large, and whole words in memory.

    Elements of eight bytes have none: all of their signs are the highest bit of a word, so a change of signs alone
    shows only in columns with an odd number of them. Of smaller elements, those in the low half of a word show too.
    """
    return (
        tensor.nbytes >= MIN_BYTES
        and not tensor.nbytes % 8
        and (tensor.itemsize < 8 or tensor.dtype == torch.complex64)
        and tensor.is_contiguous()
        and not tensor.data_ptr() % 8
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


class Checksums:
    """Checksums of tensors that a device takes before a copy and the CPU after it; those of two objects differ.

    A tensor is read once, as words of eight bytes. Word ``i`` is added to column ``i % columns``, with wrapping
    integers; the high half of each sum is mixed into its low half, and the sums are added with a random odd weight for
    each column. The number of columns is odd and random, so that rows of a matrix lie at another column each: what
    exchanges, turns, moves or negates elements changes the sum, as everything does that does not happen to leave the
    sums of all columns as they are. A changed sign in the high half of a word adds 2**63 to its column, so two of these
    in one column cancel: that takes two elements that lie a multiple of the random number of columns apart, and nothing
    else that changes.
    """

    def __init__(self) -> None:
        chance = random.SystemRandom()  # draws nothing from a generator that training uses
        self.columns = chance.choice(_COLUMNS)
        self._weights = torch.tensor([chance.getrandbits(63) | 1 for _ in range(self.columns)], device="cpu")
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Bring to a device what its checksums need; waits for it."""
        if device not in self._on_device:
            self._on_device[device] = self._weights.to(device)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the checksums of tensors of one device, which must be `is_checked`, as a tensor of that device.

        It is the work of about two operations for each, queued on the current stream.
        """
        device = tensors[0].device
        self.prepare(device)
        parts = []
        for start in range(0, len(tensors), _TOGETHER):
            some = tensors[start : start + _TOGETHER]
            sums = torch.empty((len(some), self.columns), dtype=torch.int64, device=device)
            for row, tensor in zip(sums.unbind(), some, strict=True):
                self._add_columns(tensor.detach().view(-1).view(torch.int64), row)
            parts.append(self._mix(sums, self._on_device[device]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def of_memory(self, view: memoryview, offset: int, size: int) -> int:
        """Return the checksum of bytes in host memory, on one thread."""
        words = np.frombuffer(view, np.int64, size // 8, offset)
        whole = len(words) // self.columns * self.columns
        # NumPy, because torch would share the sum among its threads, which belong to training.
        sums = np.add.reduce(words[:whole].reshape(-1, self.columns), axis=0)
        sums[: len(words) - whole] += words[whole:]
        return int(self._mix(torch.from_numpy(sums)[None], self._weights))

    def _add_columns(self, words: torch.Tensor, row: torch.Tensor) -> None:
        whole = len(words) // self.columns * self.columns
        torch.sum(words[:whole].view(-1, self.columns), 0, out=row)
        if whole < len(words):
            row[: len(words) - whole].add_(words[whole:])

    def _mix(self, sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (sums ^ (sums >> 32)).mul_(weights).sum(1)
