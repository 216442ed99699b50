"""What a StorageWriter and a StorageReader of torch.distributed.checkpoint have in common: a location."""

from __future__ import annotations

import os

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError

__all__ = ["DcpPlace"]


class DcpPlace:
    """Knows where its checkpoint is; stands before DCP's class among the bases.

    Attributes:
        path: path or URI of the checkpoint; None until DCP's ``checkpoint_id`` gives it.
    """

    path: str | None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at ``checkpoint_id`` if that is given."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a location."""
        try:
            Checkpoint(checkpoint_id)
        except ConfigError:
            return False
        return True
