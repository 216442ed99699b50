"""What a trainer hands to its writer: storages and memory, by the numbers that later messages name them with."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.storage.plugins import extend_path
from holdfast.storage.resolve import from_description

from .arena import Arena
from .frames import Message

__all__ = ["Attachments", "Handed", "ReceivedAttachments", "Shared"]


class Attachments(Protocol):
    """Where storages and arenas come from: the socket (process) or the trainer's own objects (thread)."""

    def storage(self, message: Message) -> Storage:
        """Give the storage a message tells of."""

    def arena(self, message: Message) -> memoryview:
        """Give the memory a message hands over."""

    def drop(self, number: int) -> None:
        """Let go of an arena."""


class ReceivedAttachments:
    """What a writer process takes from the socket."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}

    def storage(self, message: Message) -> Storage:
        """Rebuild the storage a message describes; a plug-in is imported along the trainer's ``sys.path``."""
        extend_path(message.header.get("imports", []))
        return from_description(message.header["description"], message.header.get("secrets"))

    def arena(self, message: Message) -> memoryview:
        """Map the arena a message hands over, and its pages in the background: direct IO needs them mapped."""
        arena = Arena.attach(message.fds[0], message.header["size"])
        arena.prefault(allocate=False)
        self._arenas[message.header["number"]] = arena
        return arena.view

    def drop(self, number: int) -> None:
        """Unmap an arena that the trainer closed."""
        arena = self._arenas.pop(number, None)
        if arena is not None:
            arena.close()


class Shared:
    """What a writer thread takes from its trainer directly instead of through the socket."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.views: dict[int, memoryview] = {}

    def share(self, arena: Arena) -> None:
        """Keep a view of our own, so that the memory outlives `Arena.close` in the middle of a save."""
        self.views[arena.number] = arena.view[:]

    def storage(self, message: Message) -> Storage:
        """Find the storage a message tells of."""
        return self.storages[message.header["key"]]

    def arena(self, message: Message) -> memoryview:
        """Find the memory a message hands over."""
        return self.views[message.header["number"]]

    def drop(self, number: int) -> None:
        """Let go of an arena."""
        view = self.views.pop(number, None)
        if view is not None:
            view.release()


class Handed:
    """Storages and arenas of one conversation. Taken in on the reading thread, dropped on the working one.

    Args:
        source: makes them out of messages.
    """

    def __init__(self, source: Attachments) -> None:
        self._source = source
        self._storages: dict[int, Storage | HoldfastError] = {}
        self._views: dict[int, memoryview] = {}
        self._unmapped: dict[int, Message] = {}

    def take_storage(self, message: Message) -> None:
        """Take a storage in, or the reason why it cannot be made here: what is asked of it fails with that."""
        try:
            self._storages[message.header["key"]] = self._source.storage(message)
        except HoldfastError as error:
            self._storages[message.header["key"]] = error

    def storage(self, key: int) -> Storage:
        """Return a storage by its number.

        Raises:
            HoldfastError: it could not be made in this process.
        """
        found = self._storages[key]
        if isinstance(found, HoldfastError):
            raise found
        return found

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
