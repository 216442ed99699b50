"""What the savers of one trainer have in common, apart from the folders: the training they save, and its history."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.metrics import MetricLog
from holdfast.checkpointer.run_session import RunSession

from ..callbacks import LoggerDestination
from ..state import State
from .finder import FolderEntry
from .naming import run_variables
from .uploads import RemoteUploaderDownloader

__all__ = ["HistoryLogger", "SaverContext"]


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


class HistoryLogger(LoggerDestination):
    """Passes the numbers that are logged to the history of the run that a later life goes on from.

    Tensors are copied on their device and read when something is saved. What is no number is for other loggers.

    Args:
        state: of the trainer.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._log: MetricLog | None = None
        self._sessions: tuple[RunSession, ...] = ()

    def begin(self, session: RunSession | None, others: Iterable[RunSession] = ()) -> None:
        """Write to a run from now on; None: to none.

        Args:
            session: of the run.
            others: of all runs that training saves to: each knows how far it has come.
        """
        self._log = None if session is None or not session.leads else MetricLog(session)
        self._sessions = tuple(others)
        self.stepped()

    def stepped(self) -> None:
        """Tell the runs how many batches are trained."""
        for session in self._sessions:
            session.note_step(self._state.timestamp.count("batch"))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row."""
        self.stepped()  # the loop logs its losses right after each batch
        if self._log is None:
            return
        stamp = self._state.timestamp
        numbers = {name: value for name, value in metrics.items() if _is_number(value)}
        if numbers:
            self._log.add(stamp.count("batch") if step is None else step, stamp.count("epoch"), numbers)

    def flush(self) -> None:
        """Send what is kept."""
        if self._log is not None:
            self._log.flush(self._state.timestamp.count("batch"))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float, str))
