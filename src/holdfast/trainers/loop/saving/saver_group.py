"""What the savers of one trainer do together: take the folders, save, and end with the training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpointer.rank_group import ANSWER_MARGIN_S, RankGroup
from holdfast.errors import ConfigError, SessionError
from holdfast.storage.resolve import resolve
from holdfast.writer.client import SharedWriter, WriterClient

from ..events import Event
from ..state import State
from ..training.ranks import TIMEOUT_S
from .folder import SaveFolder
from .history import HistoryLogger
from .naming import NameTemplate
from .saver import CheckpointSaver
from .saver_context import SaverContext

__all__ = ["SaverGroup"]

_LOG = get_logger("trainers.loop")
_SAVE_S = TIMEOUT_S + ANSWER_MARGIN_S  # that the last save of one saver may take


class SaverGroup:
    """All savers of a trainer, and the folders they save to.

    Args:
        state: of the trainer.
        savers: in their order; the first that saves everything is what autoresume goes by.
        destinations: loggers of the trainer.

    Attributes:
        context: what all savers know.
        history: takes what is logged, for the history of the run.
    """

    def __init__(self, state: State, savers: Sequence[CheckpointSaver], destinations: Sequence[Any]) -> None:
        self.state, self.savers, self.ranks = state, tuple(savers), state.ranks
        self.history = HistoryLogger(state)
        self.context = SaverContext(state, [*destinations, self.history])
        self._writer = SharedWriter()
        for uploader in self.context.uploaders:
            uploader.writer = self._writer
        self._folders: dict[str, SaveFolder] = {}
        self._open = self._left = False
        self._process = 0  # that has opened the folders
        self._control: tuple[WriterClient, RankGroup] | None = None
        for saver in self.savers:
            folder = SaveFolder(saver.folder.format(self.context.variables), self.ranks, writer=self._writer)
            folder = self._folders.setdefault(folder.storage.uri, folder)
            saver.attach(self.context, folder, is_source=saver is self.source)
        self._check_names()

    def _check_names(self) -> None:
        """Refuse savers whose checkpoints, or links to the newest, would be written over each other."""
        seen: dict[str, str] = {}
        for saver in self.savers:
            for where, what, template in self._names_of(saver):
                name = f"{where.rstrip('/')}/{template.shape(self.context.variables)}"
                if name in seen and what == "latest_remote_file_name" and saver.points_by_default:
                    _LOG.warning(
                        "the pointer %s among the uploads is that of %s; the saver of %r gets none: give it a "
                        "latest_remote_file_name of its own", name, seen[name], saver.filename.text,
                    )  # fmt: skip
                    saver.drop_pointer()
                elif name in seen:
                    raise ConfigError(
                        f"{seen[name]} and {what} would be written under the same name, {name}: give them different "
                        "names or folders, or None for the link or the upload of one of them"
                    )
                seen[name] = f"{what}={template.text!r}"

    def _names_of(self, saver: CheckpointSaver) -> list[tuple[str, str, NameTemplate]]:
        """Return everything a saver writes: where, under which argument, and its name."""
        uri, names = saver.place.storage.uri, saver.names
        found = [(uri, "save_filename", names.file), (uri, "save_latest_filename", names.latest)]
        for uploader in saver.uploaders:
            there = f"{uploader.storage.uri.rstrip('/')} (uploads)"
            found.append((there, "save_remote_file_name", names.remote))
            found.append((there, "latest_remote_file_name", names.remote_latest))
        return [(where, what, template) for where, what, template in found if template is not None]

    def _check_uploads(self) -> None:
        """Refuse an upload onto the checkpoint itself: what is deleted here after it would be gone."""
        for saver in self.savers:
            here = f"{saver.place.storage.uri.rstrip('/')}/{saver.names.shape}"
            for uploader in saver.uploaders:
                assert saver.remote_file_name is not None
                path = uploader.path_of(saver.remote_file_name.shape(self.context.variables))
                if f"{uploader.storage.uri.rstrip('/')}/{path}" == here:
                    raise ConfigError(
                        f"save_filename={saver.filename.text!r} would be uploaded onto itself, {here}: give the "
                        "RemoteUploaderDownloader another place, or save_remote_file_name"
                    )

    # -- life

    def open(self, *, check: bool = True) -> None:
        """Take the folders and refuse what must not be overwritten; idempotent.

        Args:
            check: something may be overwritten from now on.

        Raises:
            RunBusyError: another live process saves to one of them.
            CheckpointExistsError: see `CheckpointSaver.check_overwrite`.
            SessionError: the trainer was closed.
        """
        if self._open:
            return
        if self._left:
            raise SessionError("this trainer is closed: make another one")
        for saver in self.savers:
            saver.check_interval()
        self._check_uploads()
        self._process = os.getpid()
        try:
            for saver in self.savers:
                saver.take_place()
            source = self.source
            self.context.identify(None if source is None or source.container != "directory" else source.place.run_id)
            if check:
                self.ranks.lead("overwrite", self._check_overwrite)
            for saver in self.savers:
                saver.open()
            self._begin_history()
        except BaseException:
            self.abandon()
            raise
        self._open = True

    def _begin_history(self) -> None:
        """Record in each run what training goes on from, and let its metrics go where a later life resumes."""
        if (source := self.context.source) is not None:

            def note() -> None:
                for folder in self._folders.values():
                    folder.note_source(*source)

            self.ranks.lead("source", note)
        saver = self.source
        sessions = [folder.session for folder in self._folders.values() if folder.is_run]
        self.history.begin(None if saver is None or saver.container != "directory" else saver.place.session, sessions)

    @property
    def source(self) -> CheckpointSaver | None:
        """The saver that a later life goes on from: the first that saves everything."""
        return next((saver for saver in self.savers if saver.is_full), None)

    def _check_overwrite(self) -> None:
        for saver in self.savers:
            saver.check_overwrite(self.state.timestamp)

    def team(self) -> RankGroup:
        """Return the writers of all ranks, through which they agree on moments; ours is started if no folder has one.

        All ranks call it, while the folders are open.
        """
        known = next((folder.team for folder in self._folders.values() if folder.team is not None), None)
        if known is None:
            client = self._writer.client(resolve("."), for_run=True)
            known = RankGroup(self.ranks.meeting("control"), client, timeout_s=TIMEOUT_S)
            self._control = (client, known)
        self.ranks.watch(known.trouble)  # from now on nobody waits for a rank that is gone
        return known

    def settle_ended(self) -> None:
        """Take in what has ended in the background; raises what failed."""
        for saver in self.savers:
            saver.settle_ended()

    def is_due(self, event: Event) -> bool:
        """Tell whether a saver will save at ``event``, as far as intervals tell."""
        return any(saver.is_due(event) for saver in self.savers)

    def make_up(self) -> None:
        """Save what an earlier life of this training had to save at this moment and did not.

        Of several savers due at once one may have been killed before the other, which training now goes on from.
        """
        state = self.state
        if not self.context.resumed or state.dataset_state.stage:  # in a stage an evaluation comes first, then savers
            return
        ended = state.previous_timestamp.count("epoch") != state.timestamp.count("epoch")
        for saver in self.savers:
            if saver is not self.source:  # which has saved this moment
                saver.make_up(Event.EPOCH_CHECKPOINT if ended else Event.BATCH_CHECKPOINT)

    def save_all(self) -> None:
        """Save with every saver that saves everything: this process is asked to go."""
        for saver in self.savers:
            if saver.is_full:
                saver.save_now()

    def save_first(self) -> None:
        """Save with the first saver, and wait until that is durable on all ranks; raises what failed."""
        saver = self.savers[0]
        saver.retry_lost()
        saver.save_now()

        def settle() -> None:
            saver.settle()
            saver.check_lost()

        self.ranks.agree("saved now", settle, work_s=_SAVE_S)

    def finish(self, reason: str) -> None:
        """Wait until everything is durable and uploaded, and give the folders back; raises what failed.

        A last save that was lost is tried once more first.
        """
        work_s = _SAVE_S * len(self.savers)  # single files are saved by rank 0 alone
        retries = [saver.retry_lost for saver in self.savers]
        waits = [*retries, lambda: self.ranks.agree("saved", self._settle, work_s=work_s), *self._waits]
        self._close(reason, waits if self._open else [])

    def leave(self, error: BaseException | None) -> None:
        """End outside of training; after an error alone: the other ranks need not have met it, and do not come."""
        self._left = True
        if error is None:
            self.finish("closed")
        else:
            self.end_after(error, patient=True)

    def _settle(self) -> None:
        problem: Exception | None = None
        for act in [*(saver.settle for saver in self.savers), *(saver.check_lost for saver in self.savers)]:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised below, after the other savers had their turn
                problem = problem or error
        if problem is not None:
            raise problem

    @property
    def _waits(self) -> list[Callable[[], object]]:
        return [uploader.wait for uploader in self.context.uploaders] if self.ranks.leads else []

    def end_after(self, error: BaseException, *, patient: bool) -> None:
        """End after an error: what is under way finishes; the error is the one to see."""
        waits: list[Callable[[], object]] = []
        if patient and self._open:
            waits = [*(saver.settle for saver in self.savers), *self._waits]
        try:
            self._close(f"{type(error).__name__}: {error}", waits, patient=patient)
        except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of training
            _LOG.error("while training was ending with an error, a save failed too: %s", late)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that trains (a callback forked, say): nothing here is its to end."""
        return self._process not in (0, os.getpid())

    def _close(self, reason: str, waits: Sequence[Callable[[], object]], *, patient: bool = True) -> None:
        if self.is_forked:
            return
        problem: Exception | None = None
        step, epoch = (self.state.timestamp.count(name) for name in ("batch", "epoch"))

        def note_source() -> None:  # of a later fit()
            saved = None if self.source is None else self.source.find_saved(step)
            self.context.source = None if saved is None else (saved, step)

        def close(folder: SaveFolder) -> None:
            folder.close(reason, patient=patient, step=step, epoch=epoch)

        closes: list[Callable[[], object]] = [partial(close, folder) for folder in self._folders.values()]
        waits = [*waits, lambda: self.ranks.watch(None), *([note_source] if self._open else [])]
        for act in (*waits, self.context.flush_logs, *(saver.release for saver in self.savers), *closes):
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised below, after everything else has been given back
                problem = problem or error
        self.history.begin(None)
        self._let_go(reason)
        self._open = False
        if problem is not None:
            raise problem

    def abandon(self) -> None:
        """Give everything back without waiting: what writers were given they still commit."""
        self.ranks.watch(None)
        for saver in self.savers:
            saver.release()
        self.history.begin(None)
        for folder in self._folders.values():
            folder.close("abandoned", patient=False)
        self._let_go("abandoned")
        self._open = False

    def _let_go(self, reason: str) -> None:
        control, self._control = self._control, None
        if control is not None:
            client, team = control
            client.close(TIMEOUT_S, why=f"it has left the training ({reason})")
            team.close()
