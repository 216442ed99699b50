"""Send a state through memory that is smaller: two windows of an arena take turns, so copying and writing overlap.

The first big save of a process goes from both ends at once (`AsideCopy`), because neither of two ways is fast alone.
The arena that later saves use does not exist yet, and making its pages costs more than the whole copy. Two ways need no
such arena: send the state window by window through a small arena (as fast as the storage), or copy it into private
memory (as fast as the system makes fresh pages; 0.5 to 2 GiB/s were seen). So a thread sends windows from the front,
straight from the live tensors, while the caller copies windows from the back. When they meet, training goes on, and the
thread sends the copied windows.

Whether a copy of the state fits into memory at all says `look_for_memory`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch

from holdfast._log import get_logger
from holdfast._ranks import current_ranks
from holdfast._units import format_bytes
from holdfast.errors import DroppedSaveError, HoldfastError
from holdfast.storage.together import SerialExecutor, wait_out
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import PendingCall, WindowsLostError

from ..tree.arrays import move
from ..tree.objects import Modules, parameter_names
from .plan import MIN_WINDOW, FileLayout, Layout

__all__ = ["AsideCopy", "Room", "WindowStream", "copy_window", "look_for_memory", "send_aside"]

_LOG = get_logger("state")

_SPARE = 128 << 20  # left to the writer, and to what the process takes between two looks
_MOST_WINDOWS = 256 << 20  # larger ones hold training no shorter
_ANSWER_S = 1.0  # between the answer to a window and the end of its save
Fill = Callable[[FileLayout, int, int, int], None]
"""Puts bytes of a file at an address: called with the file, the first byte in it, their number, and the address."""


class WindowStream:
    """Sends the files of a layout to the writer, window by window.

    Args:
        layout: the files.
        client: the writer.
        arena: room for two windows.
        timeout_s: bound of the wait for one window; None waits as long as it takes.
    """

    def __init__(self, layout: Layout, client: WriterClient, arena: Arena, timeout_s: float | None) -> None:
        self._files, self._client, self._arena, self._timeout_s = layout.files, client, arena, timeout_s

    def send(self, save: PendingCall, fill: Fill, *, again: bool = True) -> None:
        """Send and seal a save.

        If the writer dies meanwhile, the one that is started in its place gets everything from the first window.

        Args:
            save: the windowed job.
            fill: called for every window, in order.
            again: what was sent can be sent once more.

        Raises:
            HoldfastError: the save failed, or a window took longer than ``timeout_s``.
        """
        client = self._client
        try:
            while True:
                try:
                    self._send_all(save, fill)
                    client.seal(save)
                    return
                except WindowsLostError as error:
                    if not again:
                        why = DroppedSaveError(f"{error}; what it had got is no longer in memory")
                        client.abandon(save, why)
                        raise
                    client.begin_again(save)
        except HoldfastError as error:
            # A window may be refused because its save has failed, which is heard of a moment later.
            wait([save], timeout=_ANSWER_S)
            cause = save.exception() if save.done() else None
            client.abandon(save)
            if cause is not None:
                raise cause from error
            raise
        except BaseException:
            client.abandon(save)
            raise

    def _send_all(self, save: PendingCall, fill: Fill) -> None:
        window = self._arena.size // 2 // MIN_WINDOW * MIN_WINDOW
        slots = deque([0, window])
        waiting: deque[tuple[Future[None], int]] = deque()
        for number, file in enumerate(self._files):
            for start in range(0, file.padded, window):
                if not slots:
                    done, slot = waiting.popleft()
                    self._taken(done)
                    slots.append(slot)
                slot = slots.popleft()
                size = min(window, file.padded - start)
                fill(file, start, size, self._arena.address + slot)
                sent = self._client.window(save, file_no=number, file_offset=start, arena_offset=slot, nbytes=size)
                waiting.append((sent, slot))
        for done, _ in waiting:
            self._taken(done)

    def _taken(self, window: Future[None]) -> None:
        wait([window], timeout=self._timeout_s)
        if not window.done():
            raise HoldfastError(
                f"a part of this save is not written after {self._timeout_s:.0f} s (timeout_s): the storage is stuck "
                "or very slow; training cannot count on it"
            )
        window.result()


def copy_window(tensors: Sequence[torch.Tensor], file: FileLayout, start: int, size: int, address: int) -> None:
    """Copy bytes ``start : start + size`` of one file into a window.

    Args:
        tensors: the live tensors, in the order of the layout.
        file: the file whose bytes are wanted.
        start: first byte within the file.
        size: number of bytes, up to the padded end of the file.
        address: address the first byte goes to.
    """
    if (end := file.size - start) < size:
        ctypes.memset(address + end, 0, size - end)  # the padding of the last block
    for source, first, nbytes in file.segments_between(start, start + size):
        low, high = max(first, start), min(first + nbytes, start + size)
        if isinstance(source, bytes):
            ctypes.memmove(address + low - start, source[low - first : high - first], high - low)
            continue
        tensor = tensors[source].detach()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            # Only the part that belongs to the window is made contiguous, whatever the size of the tensor.
            width = tensor.element_size()
            flat = _elements(tensor, (low - first) // width, -(-(high - first) // width))
            skip = (low - first) % width
            move(address + low - start, flat.data_ptr() + skip, high - low)
        else:
            move(address + low - start, tensor.data_ptr() + low - first, high - low)


def _elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements ``start:stop`` of a tensor in row-major order as a contiguous CPU tensor."""
    if tensor.dim() == 0:
        return tensor.resolve_conj().resolve_neg().cpu().reshape(1)
    row = max(1, tensor[0].numel()) if tensor.shape[0] else 1
    rows = tensor[start // row : -(-stop // row)].resolve_conj().resolve_neg()
    return rows.contiguous().cpu().reshape(-1)[start - start // row * row :]


class AsideCopy:
    """Windows of a state, each taken by one of two sides: sent from the live tensors, or copied into private memory.

    Two threads use it: the owner of the tensors calls `copy`, the other thread calls `fill` for every window in order,
    then `close`.

    Args:
        layout: where each tensor goes.
        tensors: the live tensors, in the order of the layout.
        window: bytes of a window.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], window: int) -> None:
        self._tensors = tensors
        self._left = deque(
            (file, start, min(window, file.padded - start))
            for file in layout.files
            for start in range(0, file.padded, window)
        )
        self._changed = threading.Condition()
        self._filling = False  # the front reads live tensors
        self._done = self._broken = False
        self._memory = Arena.private(layout.arena_bytes)
        try:
            self._helper = SerialExecutor("holdfast-first-copy")
        except BaseException:
            self._memory.close()
            raise

    def copy(self) -> None:
        """Copy windows from the back until the front is met. The tensors may change when this returns, or raises."""
        try:
            other = self._helper.run(self._copy_from_back)
            self._copy_from_back()
            other.result()
        except BaseException:
            self._broken = True
            raise
        finally:
            self._end()
            self._let_go()

    def give_up(self) -> None:
        """Mark the copy as incomplete: the next `fill` of a window that is not copied raises."""
        self._broken = True
        self._end()

    def _end(self) -> None:
        self._left.clear()
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _let_go(self) -> None:
        """Wait until no thread reads the tensors, at most a piece each. A Ctrl-C waits for that as well."""

        def wait() -> None:
            self._helper.close()
            with self._changed:
                self._changed.wait_for(lambda: not self._filling)

        wait_out(wait)

    def _copy_from_back(self) -> None:
        while True:
            try:
                file, start, size = self._left.pop()
            except IndexError:
                return
            address = self._memory.address + file.arena_offset + start
            copy_window(self._tensors, file, start, size, address)

    def fill(self, file: FileLayout, start: int, size: int, address: int) -> None:
        """Put the next window at an address: from the live tensors if it is not copied yet, else from the copy.

        Raises:
            HoldfastError: the copying was interrupted.
        """
        with self._changed:
            try:
                self._left.popleft()
            except IndexError:  # the sides have met
                self._changed.wait_for(lambda: self._done)
            else:
                self._filling = True
        if not self._filling:
            if self._broken:
                raise HoldfastError("the state was not copied to its end: this save is given up")
            move(address, self._memory.address + file.arena_offset + start, size)
            return
        try:
            copy_window(self._tensors, file, start, size, address)
        finally:
            with self._changed:
                self._filling = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back once no thread copies into it."""
        with self._changed:
            self._changed.wait_for(lambda: self._done)
        self._helper.close()
        self._memory.close()


def send_aside(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    client: WriterClient,
    submit: Callable[[Arena], PendingCall],
    *,
    nbytes: int,
    timeout_s: float | None,
    begun: Callable[[threading.Thread], None],
    ready: Callable[[], None],
) -> PendingCall:
    """Copy a state into private memory while a thread already sends it through a small arena.

    Args:
        layout: the files.
        tensors: those of the state, which may change when this returns.
        client: the writer.
        submit: hands the save over, given its arena.
        nbytes: of that arena.
        timeout_s: bound of the wait for one window; None waits as long as it takes.
        begun: called with the thread that sends the save.
        ready: called by the thread when all is sent: gets things ready for the next save.
    """
    copy = AsideCopy(layout, tensors, nbytes // 2)  # before the job is submitted: that waits for its windows
    window: Arena | None = None
    thread: threading.Thread | None = None

    def send(save: PendingCall, window: Arena) -> None:
        try:
            WindowStream(layout, client, window, timeout_s).send(save, copy.fill, again=False)
        except Exception as error:  # noqa: BLE001 - a thread edge: the future of the save fails and says more
            _LOG.debug("the first save was not sent: %s", error)
            return
        finally:
            copy.close()
            window.close()
        try:
            ready()
        except HoldfastError as error:
            _LOG.debug("the arena could not be made ready: %s", error)

    try:
        window = Arena.create(nbytes)
        save = submit(window)
        # Not a daemon: at exit the interpreter waits for it, so the save is sent to its end.
        thread = threading.Thread(target=send, args=(save, window), name="holdfast-first-save")
        try:
            thread.start()
        except BaseException:
            client.abandon(save)
            raise
        begun(thread)
        copy.copy()
    except BaseException:
        copy.give_up()
        if thread is None or thread.ident is None:  # else the thread closes them
            copy.close()
            if window is not None:
                window.close()
        raise
    return save


class Room(NamedTuple):
    """What memory a copy of a state can have: ``bound`` bytes, and what that costs; None if it costs nothing."""

    bound: float = math.inf
    shortage: str | None = None


def look_for_memory(state: Mapping[Any, Any], nbytes: int, *, rescues: bool, reserve: int) -> Room:
    """Decide whether a copy fits into memory, and a second one where snapshots are kept.

    Args:
        state: what is copied.
        nbytes: of a copy.
        rescues: two copies are kept.
        reserve: bytes that training itself has yet to take, without gradients.
    """
    from holdfast.writer.free_memory import free_memory

    free = free_memory()
    if free is None:
        return Room()
    room = max(0, free.bytes - _SPARE) // current_ranks().local_world_size - _gradient_bytes(state) - reserve
    room -= free.now_and_then
    there = format_bytes(max(0, room))
    if nbytes <= room < 2 * nbytes and rescues:
        return Room(
            shortage=f"memory is short for rescue=: two copies of the state take {format_bytes(2 * nbytes)}, and "
            f"{there} can be had for them. No snapshots are kept between saves"
        )
    if nbytes <= room:
        return Room()
    fitting = max(2 * MIN_WINDOW, min(room // 2, _MOST_WINDOWS) // (2 * MIN_WINDOW) * (2 * MIN_WINDOW))
    return Room(
        fitting,
        f"memory is short: a copy of the state takes {format_bytes(nbytes)}, and of the "
        f"{format_bytes(max(0, free.bytes))} that are free ({free.bound}) {there} can be had for it. Saves go through "
        f"{format_bytes(fitting)} instead (as with max_staging_bytes), and hold training until the whole state is "
        "written",
    )


def _gradient_bytes(state: Mapping[Any, Any]) -> int:
    """Return what the gradients will take in memory that are not there (yet, or since they were set to None)."""
    modules: Modules = {}
    parameter_names(state, modules)
    params = {id(param): param for module, _ in modules.values() for param in module.parameters()}
    return sum(param.nbytes for param in params.values() if param.is_cpu and param.requires_grad and param.grad is None)
