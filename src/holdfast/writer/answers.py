"""What the loop of a writer does for the parts of it that answer calls later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.storage.base import Storage

from .messages import SaveJob
from .open_run import Run

__all__ = ["DeferredAnswers"]


class DeferredAnswers(Protocol):
    """The loop, as `holdfast.writer.distributed` sees it."""

    def say_done(self, call: int, value: Any, attachments: tuple[bytes, ...] = ()) -> None:
        """Answer a call."""

    def say_failed(self, call: int | None, error: BaseException) -> None:
        """Let a call fail."""

    def later(self, work: Callable[[], None]) -> None:
        """Do something on the working thread."""

    def run_of(self, job: SaveJob) -> Run | None:
        """Give the run of a job."""

    def hold(self, fd: int) -> bool:
        """Have the trainer keep a descriptor open too, in place of the last one, until its writer has ended for good.

        Returns:
            Whether the file is certain to stay open as long as somebody may start this writer again.
        """

    @property
    def run(self) -> Run | None:
        """The open run."""

    def storage_of(self, key: int) -> Storage:
        """Give a storage that the trainer has told of."""
