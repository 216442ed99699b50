"""What the trainer has handed to its writer: storages and memory, by the numbers that later messages name them with."""

from __future__ import annotations

import contextlib
import os

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage

from .frames import Attachments, Message

__all__ = ["Handed"]


class Handed:
    """Storages and arenas of one conversation. Taken in on the reading thread, dropped on the working one.

    Args:
        source: makes them out of messages.
    """

    def __init__(self, source: Attachments) -> None:
        self._source = source
        self._storages: dict[int, Storage] = {}
        self._views: dict[int, memoryview] = {}
        self._unmapped: dict[int, Message] = {}

    def take_storage(self, message: Message) -> None:
        """Take a storage in."""
        self._storages[message.header["key"]] = self._source.storage(message)

    def storage(self, key: int) -> Storage:
        """Return a storage by its number."""
        return self._storages[key]

    def take_arena(self, message: Message) -> None:
        """Take an arena in, and map it if that is possible now: else the first job that needs it tries again."""
        self._unmapped[message.header["number"]] = message
        with contextlib.suppress(HoldfastError):
            self.view(message.header["number"])

    def view(self, number: int) -> memoryview:
        """Return the memory of an arena, mapped now if it is not yet.

        Raises:
            HoldfastError: there is no room to map it.
        """
        view = self._views.get(number)
        if view is None:
            message = self._unmapped[number]
            try:
                view = self._views[number] = self._source.arena(message)
            except OSError as error:
                raise HoldfastError(
                    f"the writer cannot map {message.header['size']} bytes of memory that it shares with the trainer "
                    f"({error.strerror}): this save is lost, the next one tries again; give the machine more memory"
                ) from error
            del self._unmapped[number]
        return view

    def drop_arena(self, number: int) -> None:
        """Give an arena back, when no job uses it any more."""
        self._views.pop(number, None)
        message = self._unmapped.pop(number, None)
        for fd in () if message is None else message.fds:
            os.close(fd)
        self._source.drop(number)
