"""Send a state through memory that is smaller: two windows of an arena take turns, so copying and writing overlap.

The first big save of a process goes from both ends at once (`AsideCopy`), because neither of two ways is fast alone.
The arena that later saves use does not exist yet, and making its pages costs more than the whole copy. Two ways need no
such arena: send the state window by window through a small arena (as fast as the storage), or copy it into private
memory (as fast as the system makes fresh pages; 0.5 to 2 GiB/s were seen). So a thread sends windows from the front,
straight from the live tensors, while the caller copies windows from the back. When they meet, training goes on, and the
thread sends the copied windows.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from holdfast.errors import DroppedSaveError, HoldfastError
from holdfast.storage.together import SerialExecutor, wait_out
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import PendingCall, WindowsLostError

from ..tree.arrays import move
from .plan import MIN_WINDOW, FileLayout, Layout

__all__ = ["AsideCopy", "WindowStream", "copy_window"]

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
