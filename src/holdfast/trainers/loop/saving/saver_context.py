"""`SaverContext`: what the savers of one trainer have in common, apart from the folders."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import xxhash

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint

from ..state import State
from .finder import FolderEntry
from .naming import run_variables
from .uploads import RemoteUploaderDownloader

__all__ = ["SaverContext"]

_LOG = get_logger("trainers.loop")


class SaverContext:
    """The training that all savers of one trainer save, and the listeners that hear of their checkpoints.

    Args:
        state: of the trainer.
        destinations: its loggers.

    Attributes:
        variables: of the run, for names.
        uploaders: the destinations that checkpoints are uploaded to.
        resumed: training goes on from a checkpoint of this very run, with everything that was in it.
        autoresumes: the trainer looked for such a checkpoint; otherwise nothing of an earlier life counts as ours.
        source: (URI, step) of the checkpoint that training goes on from, whole; None if it began anew.
        parent: id of the checkpoint that training goes on from; None if it began anew, or with a single file.
        training: identity of the training over all its lives, also on another machine; "" before `identify`.
        begun: the saver that a later life goes on from has saved: a later life knows our training.
    """

    def __init__(self, state: State, destinations: Sequence[Any]) -> None:
        self.state, self.ranks = state, state.ranks
        self.variables = run_variables(state.run_name, self.ranks.info)
        self.uploaders = [logger for logger in destinations if isinstance(logger, RemoteUploaderDownloader)]
        self.resumed = self.autoresumes = self.begun = False
        self.source: tuple[str, int] | None = None
        self.parent: str | None = None
        self.training = ""
        self._destinations = tuple(destinations)
        self._files_at: str | None = None

    # -- which training this is

    def goes_on_from_files(self, place: str) -> None:
        """Note that a later life goes on from single files.

        Args:
            place: URI of their folder and their name, its counters left open.
        """
        self._files_at = f"at {xxhash.xxh3_64_hexdigest(place.encode())}"

    def identify(self, run_id: str | None) -> None:
        """Set the identity of this training, unless a resume has set it. All ranks call it; idempotent.

        Args:
            run_id: identity of the run that a later life resumes; None where a later life resumes from single files.
        """
        if not self.training:
            self.training = run_id or self.ranks.lead("training", lambda: secrets.token_hex(8))

    def training_of(self, *, is_source: bool) -> str:
        """Return the identity of the training that a checkpoint records.

        Single files do not tell a later life which training they belong to before the first of them is stored. What
        other savers save until then records a digest of the place of that file instead.

        Args:
            is_source: it is of the saver that a later life goes on from.
        """
        return self.training if self.begun or is_source else self._begun_at

    def is_of_earlier_life(self, found: FolderEntry) -> bool:
        """Return whether an earlier life of this training saved a checkpoint, beside those that training resumes."""
        return self.autoresumes and found.training in (self.training, self._begun_at)

    @property
    def _begun_at(self) -> str:
        # The run of a folder of directories knows its training from the start.
        return self.training if self._files_at is None else self._files_at

    # -- callbacks and loggers

    def announce(self, checkpoint: Checkpoint) -> None:
        """Give callbacks and loggers a committed checkpoint; what they raise is logged."""
        for listener in (*self.state.callbacks, *self._destinations):
            hear = getattr(listener, "checkpoint_committed", None)
            try:
                if hear is not None:
                    hear(checkpoint)
            except Exception:  # noqa: BLE001 - the user's code must not end a training
                _LOG.exception("%r did not take note of %s; training goes on", listener, checkpoint.uri)

    def flush_logs(self) -> None:
        """Let loggers write what they keep: no checkpoint is ahead of its metrics."""
        for logger in self._destinations:
            if callable(flush := getattr(logger, "flush", None)):
                flush()
