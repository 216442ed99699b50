"""`LostCheckpoint`: a checkpoint that was added and could not be kept, and what is left of it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace

from holdfast._log import get_logger
from holdfast.checkpointer.transient import TRANSIENT_ERRORS, passing_error, state_of
from holdfast.run.remains import INCOMING

from .places import STAGED, unused

__all__ = ["LostCheckpoint"]

_LOG = get_logger("frameworks")
_ASIDE = "_holdfast-lost-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCheckpoint:
    """A checkpoint that is not in the run.

    Attributes:
        name: it would have had.
        step: of it.
        error: why.
        left: where its files still are; None if nowhere.
        ours: nobody else uses these files.
    """

    name: str
    step: int
    error: BaseException
    left: str | None
    ours: bool

    @classmethod
    def of(cls, source: str, staged: str | None, *, name: str, step: int, error: BaseException) -> LostCheckpoint:
        """Describe the loss of ``source``, whose files are in ``staged`` too, or alone; a second copy is removed."""
        if staged not in (None, source) and os.path.exists(source):
            shutil.rmtree(staged or "", ignore_errors=True)
            staged = None
        left = staged or source
        exists = os.path.exists(left)
        return cls(name=name, step=step, error=error, left=left if exists else None, ours=staged is not None)

    @property
    def what(self) -> str:
        """Say what was lost, why, and where the files are."""
        why = f"{state_of(self.error)} ({self.error})" if isinstance(self.error, TRANSIENT_ERRORS) else str(self.error)
        return f"the checkpoint of step {self.step} was NOT kept, {why}; " + (
            "its files are gone" if self.left is None else f"its files are in {self.left}"
        )

    @property
    def final(self) -> BaseException:
        """The error for an end without this checkpoint, which was to be the newest."""
        return passing_error(self.error, self.what) if isinstance(self.error, TRANSIENT_ERRORS) else self.error

    def drop(self) -> None:
        """Remove what is left: there is a newer checkpoint."""
        if self.ours and self.left is not None:
            shutil.rmtree(self.left, ignore_errors=True)

    def aside(self) -> LostCheckpoint:
        """Bring what is left to where neither the end of the run nor its next start removes it."""
        if self.left is None or not self.ours:
            return self
        home, name = os.path.split(self.left)
        if os.path.basename(home).startswith(INCOMING):
            home = os.path.dirname(home)
        elif not name.startswith(STAGED):
            return self
        target = unused(os.path.join(home, _ASIDE + self.name))
        try:
            os.rename(self.left, target)
        except OSError as error:
            _LOG.warning("%s: they cannot be moved to %s: %s", self.what, target, error)
            return self
        moved = replace(self, left=target)
        _LOG.warning("%s", moved.what)
        return moved
