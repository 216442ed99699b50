"""Saves whose bytes are still on their way from the trainer: window by window, or behind a watermark in the arena."""

from __future__ import annotations

from holdfast.errors import HoldfastError

from .frames import Message
from .messages import FilePlan, SaveJob
from .watermark import Watermark
from .windows import Window, WindowSource

__all__ = ["Arriving", "watermark"]


class Arriving:
    """By the number of the call that brought the save."""

    def __init__(self) -> None:
        self._windowed: dict[int, WindowSource] = {}
        self._followed: dict[int, Watermark] = {}

    def expect(self, call: int, source: WindowSource | None, filled: Watermark | None) -> None:
        """Wait for the bytes of a save from now on; one that comes whole has neither source nor watermark."""
        if source is not None:
            self._windowed[call] = source
        if filled is not None:
            self._followed[call] = filled

    def window(self, message: Message) -> None:
        """Take in that a window is filled.

        Raises:
            HoldfastError: its save has ended.
        """
        header = message.header
        source = self._windowed.get(header["job_no"])
        if source is None:
            raise HoldfastError("this save has ended already; its future says why")
        fields = ("call", "file_no", "file_offset", "arena_offset", "nbytes")
        source.put(Window(**{name: header[name] for name in fields}))

    def fill(self, message: Message) -> None:
        """Take in how much of the arena is filled."""
        filled = self._followed.get(message.header["job_no"])
        if filled is not None:
            filled.rise(message.header["filled"])

    def seal(self, message: Message) -> None:
        """Take in that all windows of a save have been sent."""
        source = self._windowed.get(message.header["job_no"])
        if source is not None:
            source.seal(message.attachments, message.header["manifest"])

    def abandon(self, message: Message) -> None:
        """Take in that the trainer gives a save up."""
        number = message.header["job_no"]
        waiting = self._windowed.get(number) or self._followed.get(number)
        if waiting is not None:
            waiting.abandon("the trainer abandoned this save")

    def abandon_all(self, why: str) -> None:
        """Give up every save that is not complete: nobody will send the rest."""
        waiting: list[WindowSource | Watermark] = [*self._windowed.values(), *self._followed.values()]
        for one in waiting:
            one.abandon(why)

    def end(self, call: int) -> list[Window]:
        """Forget a save that has ended; return the windows that nobody has answered.

        Windows that come from now on are refused by `window`.
        """
        self._followed.pop(call, None)
        source = self._windowed.pop(call, None)
        return [] if source is None else list(source.end())


def watermark(job: SaveJob, filled: int) -> Watermark:
    """Return the mark below which the arena of a job is filled."""
    return Watermark(filled, max((_end(plan) for plan in job.files), default=0))


def _end(plan: FilePlan) -> int:
    return plan.arena_offset + plan.size
