"""The first big save of a process: from both ends at once, since neither way alone is fast.

The arena that later saves use does not exist yet, and making its pages costs more than the whole copy. Two ways do
without it: send the state window by window through a small arena (as fast as the storage), or copy it into private
memory (as fast as the system makes fresh pages; 0.5 to 2 GiB/s were seen). Here a thread sends windows from the front,
straight from the live tensors, while the caller copies windows from the back; where they meet, training goes on, and
the thread sends what was copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from holdfast.errors import HoldfastError
from holdfast.writer.arena import Arena
from holdfast.writer.serial_executor import SerialExecutor

from ..memory import move
from .plan import FileLayout, Layout
from .staging import copy_window

__all__ = ["AsideCopy"]


class AsideCopy:
    """Windows of a state, each taken by one of two sides: sent from the live tensors, or copied into private memory.

    Two threads use it: the one that owns the tensors calls `copy`, the other one `fill` for every window in order and
    `close` at last.

    Args:
        layout: where each tensor goes.
        tensors: the live tensors, in the order of the layout.
        window: bytes of a window.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor], window: int) -> None:
        self._layout, self._tensors = layout, tensors
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
        """Let nothing more be sent: not all of it was copied."""
        self._broken = True
        self._end()

    def _end(self) -> None:
        self._left.clear()
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _let_go(self) -> None:
        """Wait until nobody reads the tensors: a piece each at most. A Ctrl-C has to wait for that as well."""
        interrupted: BaseException | None = None
        while True:
            try:
                self._helper.close()
                with self._changed:
                    self._changed.wait_for(lambda: not self._filling)
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _copy_from_back(self) -> None:
        while True:
            try:
                file, start, size = self._left.pop()
            except IndexError:
                return
            address = self._memory.address + file.arena_offset + start
            copy_window(self._layout, file, self._tensors, start=start, size=size, address=address)

    def fill(self, file: FileLayout, start: int, size: int, address: int) -> None:
        """Put the next window at an address: of the live tensors if nobody has copied it, else of the copy.

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
            copy_window(self._layout, file, self._tensors, start=start, size=size, address=address)
        finally:
            with self._changed:
                self._filling = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back once nobody copies into it."""
        with self._changed:
            self._changed.wait_for(lambda: self._done)
        self._helper.close()
        self._memory.close()
