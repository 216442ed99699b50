"""One save that all ranks bring to the remote, each its own part: what rank 0's writer knows of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast._ranks import rank_list
from holdfast.copying.transfer import TransferStopped
from holdfast.errors import CheckpointError, StorageError

from ..messages import error_from_json
from .link import Message

__all__ = ["JointUploads"]

_LOOK_S = 0.2  # for the end, which nobody announces


class JointUploads:
    """The thread of the control channel reports events here; the thread that uploads waits for them.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._order: Message | None = None
        self._save = ""
        self._missing: set[int] = set()
        self._errors: dict[int, Message] = {}
        self._gone: dict[int, str] = {}
        self._world_size = world_size

    @property
    def order(self) -> Message | None:
        """What a rank that has joined again is to do; None for nothing."""
        return self._order

    @property
    def lacks_ranks(self) -> bool:
        """Whether a rank is gone, and with it what it has not brought; its disk may have it still."""
        return bool(self._gone)

    def uploaded(self, rank: int, save: str, error: Message | None) -> None:
        """A rank's part is at the remote, or cannot get there now."""
        with self._changed:
            if save == self._save:
                if error is None:
                    self._missing.discard(rank)
                    self._errors.pop(rank, None)
                else:
                    self._errors[rank] = error
                self._changed.notify_all()

    def gone(self, rank: int, why: str) -> None:
        """Nothing more will come from a rank."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def bring(self, order: Message, send: Callable[[Message], None], stop: Callable[[], bool]) -> None:
        """Let all ranks bring their parts, and wait until they have.

        Ranks that have done so for the same save, when it was tried before, are done with it.

        Args:
            order: tells them which save.
            send: gives it to all that are there.
            stop: asked now and then; true ends the waiting.

        Raises:
            TransferStopped: ``stop`` said so.
            CheckpointError: a part is damaged, or a rank that has not brought its own is gone (`lacks_ranks`).
            StorageError: a rank could not bring its part now.
        """
        with self._changed:
            if order["save"] != self._save:
                self._save, self._missing = order["save"], set(range(self._world_size))
            self._errors.clear()
            self._order = order
        try:
            send(order)
            with self._changed:
                while not self._ended(order["directory"]):
                    if stop():
                        raise TransferStopped
                    self._changed.wait(_LOOK_S)
        finally:
            self._order = None

    def _ended(self, directory: str) -> bool:
        """Tell whether all have brought theirs; raise what keeps them from it."""
        lost = {rank: why for rank, why in self._gone.items() if rank in self._missing}
        if lost:
            rank, why = min(lost.items())
            raise CheckpointError(
                f"{directory} cannot be completed: the part of {rank_list(lost)} is on the disk of its own machine "
                f"alone, and rank {rank}: {why}"
            )
        for rank, described in sorted(self._errors.items()):
            error = error_from_json(described)
            kind = type(error) if isinstance(error, (CheckpointError, StorageError)) else StorageError
            raise kind(f"rank {rank}: {error}")
        return not self._missing
