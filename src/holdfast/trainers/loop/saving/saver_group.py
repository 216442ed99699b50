"""What the savers of one trainer do together: begin where an earlier life ended, save, and end with the training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.checkpointer.console import ResumeBlock
from holdfast.checkpointer.metrics import MetricLog
from holdfast.checkpointer.pending_saves import ANSWER_MARGIN_S
from holdfast.checkpointer.rank_group import RankGroup
from holdfast.checkpointer.resume import first_bad
from holdfast.checkpointer.run_session import RunSession
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SessionError,
    StorageNotFoundError,
)
from holdfast.format.manifest import Manifest
from holdfast.run.candidates import GONE, newest_good
from holdfast.run.life import REQUEUE_STATUS
from holdfast.run.names import RUN_NAMES, WATCHED
from holdfast.run.rollbacks import Rollback, left_out_by, notes_of, order_to_try, read_rollbacks
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve
from holdfast.writer.client import SharedWriter, WriterClient

from ..callbacks import Logger, LoggerDestination
from ..parallel import TIMEOUT_S
from ..state import State
from ..stop_policy import TrainerGuard
from ..time import Event
from .finder import FolderEntry, NameTemplate, is_sharded_of_torch, look, look_at, names_in
from .folder import SaveFolder, linked_by
from .layout import IgnoreKeys, check_ignore_keys
from .load import LoadOptions, LoadReport, load_from, load_path
from .saver import CheckpointSaver, SaverContext
from .uploads import as_object_store

_LOG = get_logger("trainers.loop")
_SAVE_S = TIMEOUT_S + ANSWER_MARGIN_S  # that the last save of one saver may take
_FREE_S = 10.0  # for a writer that has nothing to do to give a folder back; one that hangs is not waited for


class SaverGroup:
    """All savers of a trainer, and the folders they save to.

    Args:
        state: of the trainer.
        savers: in their order; the first that saves everything is what autoresume goes by.
        destinations: loggers of the trainer.
        guard: watches a metric; None without one.

    Attributes:
        context: what all savers know.
        history: takes what is logged, for the history of the run.
    """

    def __init__(
        self,
        state: State,
        savers: Sequence[CheckpointSaver],
        destinations: Sequence[Any],
        *,
        guard: TrainerGuard | None = None,
    ) -> None:
        self.state, self.savers, self.ranks, self.guard = state, tuple(savers), state.ranks, guard
        self.history = HistoryLogger(state, guard)
        self.context = SaverContext(state, [*destinations, self.history], guard)
        self.context.holding = self.history.waits
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
        except BaseException as error:
            self.abandon(error)
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
        if saver is None or saver.container != "directory":
            self.history.begin(None, sessions)
            return
        self.history.begin(saver.place.session, sessions)
        self._begin_guard(saver, saver.place.session)

    def _begin_guard(self, saver: CheckpointSaver, session: RunSession) -> None:
        """Watch the metric from here on, and record in the run whether its checkpoints are refused by one."""
        guard, before = self.guard, self.context.before
        watched = None if guard is None else guard.watched
        if session.opened.notes.get(WATCHED) != watched:
            self.ranks.lead("watched", lambda: session.ask("note", key=WATCHED, value=watched))
        if guard is not None:
            uri, root = self.context.source[0] if self.context.source else "", f"{session.root.uri.rstrip('/')}/"
            name = uri.removeprefix(root) if uri.startswith(root) else None
            guard.begin(session, saver.pending, name=name, before=before)
            self.context.before = None  # a later fit() goes on from what this one has saved

    @property
    def source(self) -> CheckpointSaver | None:
        """The saver that a later life goes on from: the first that saves everything."""
        return next((saver for saver in self.savers if saver.is_full), None)

    def _check_overwrite(self) -> None:
        for saver in self.savers:
            saver.check_overwrite(self.state.timestamp)

    def rank_group(self) -> RankGroup:
        """Return the writers of all ranks, through which they agree on moments; ours is started if no folder has one.

        All ranks call it, while the folders are open.
        """
        known = next((folder.rank_group for folder in self._folders.values() if folder.rank_group is not None), None)
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
        if not self.context.resumed or state.dataset_state.stage.endswith("_eval"):  # that comes first, then savers
            return
        ended = state.previous_timestamp.count("epoch") != state.timestamp.count("epoch")
        for saver in self.savers:
            if saver is not self.source:  # which has saved this moment
                saver.make_up(Event.EPOCH_CHECKPOINT if ended else Event.BATCH_CHECKPOINT)

    def save_all(self) -> None:
        """Save with every saver that saves everything, at a moment that is not theirs to choose."""
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
        found = "" if self.guard is None else self.guard.left_for
        why = f"the guard: {found}" if found else f"{type(error).__name__}: {error}"
        if patient and self._open:
            rescue = [] if found else [partial(saver.rescue, why) for saver in self.savers]
            waits = [*(saver.settle for saver in self.savers), *rescue, *self._waits]
        try:
            self._close(why, waits, patient=patient)
        except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of training
            _LOG.error("while training was ending with an error, this failed too: %s", late)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that trains (a callback forked, say): nothing here is its to end."""
        return self._process not in (0, os.getpid())

    def _close(self, reason: str, waits: Sequence[Callable[[], object]], *, patient: bool = True) -> None:
        if self.is_forked:
            return
        self.history.leave()
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

    def abandon(self, before: BaseException | None = None) -> None:
        """Give everything back without waiting for what is under way: what writers were given they still commit.

        Args:
            before: an error before any training. Nothing is under way then, and leases are waited for for a moment: who
                mends what is wrong and tries again in this process finds the folders free.
        """
        wait_s = _FREE_S if isinstance(before, Exception) else 0.0
        self.ranks.watch(None)
        for saver in self.savers:
            saver.release()
        self.history.begin(None)
        for folder in self._folders.values():
            folder.close("abandoned", patient=False, wait_s=wait_s)
        self._let_go("abandoned")
        self._open = False

    def _let_go(self, reason: str) -> None:
        control, self._control = self._control, None
        if control is not None:
            client, rank_group = control
            client.close(TIMEOUT_S, why=f"it has left the training ({reason})")
            rank_group.close()


_NO_FIT = (
    "autoresume goes on with all of it: make the trainer as it was; or begin another training, with this as load_path, "
    "another save_folder, and load_weights_only=True or load_ignore_keys=['state/optimizers', ...]"
)


class StartingPoint:
    """Decides what is loaded before training, and loads it.

    Args:
        group: savers of the trainer.
        path: ``load_path``.
        object_store: where it lies.
        weights_only, strict, ignore_keys, progress_bar: how to load it.
        autoresume: look for a checkpoint of an earlier start first.

    Attributes:
        lacks_rates: everything was loaded but the optimizers, which have the learning rates of that moment.
        saved: root and manifest of the checkpoint of this very run that was loaded; None if it is no directory.
    """

    def __init__(
        self, group: SaverGroup, *, path: str | None, object_store: Any, weights_only: bool, strict: bool,
        ignore_keys: IgnoreKeys, autoresume: bool, progress_bar: bool,
    ) -> None:  # fmt: skip
        self._group, self._context, self._path = group, group.context, path
        self._store = None if object_store is None else as_object_store(object_store)
        self._options = LoadOptions(
            weights_only=weights_only, strict_model_weights=strict,
            ignore_keys=check_ignore_keys(ignore_keys, "load_ignore_keys"), progress_bar=progress_bar,
        )  # fmt: skip
        self._saver = self._reference() if autoresume else None
        self._resumed = False  # of autoresume
        self._own: SaveFolder | None = None  # the folder among ours that holds what was loaded
        self.lacks_rates = False
        self.saved: tuple[Storage, Manifest] | None = None

    def _reference(self) -> CheckpointSaver:
        """Return the saver whose folder tells where an earlier start has got to: the first that saves everything."""
        if (saver := self._group.source) is not None:
            self._context.autoresumes = True
            return saver
        raise ConfigError(
            "autoresume=True needs save_folder, or a CheckpointSaver among the callbacks, that saves everything (not "
            "weights only): there is nothing to go on from otherwise"
        )

    def run(self) -> Mapping[str, Any] | None:
        """Load; returns states of random generators for the moment when training begins."""
        report = None if self._saver is None else self._resume(self._saver)
        if report is None and self._path is not None:
            report = load_path(self._path, self._context.state, options=self._options, object_store=self._store)
            self._note_folder(report)
        elif report is not None and self._path is not None:
            report.notes.append(f"load_path={self._path!r} is not used: this run has got further by itself")
        if report is None:
            return None
        self.lacks_rates = report.full and not any(path.startswith("state/optimizers") for path in report.restored)
        self._context.parent = report.checkpoint_id if report.full else None
        self._context.source = (report.uri, self._context.state.timestamp.count("batch")) if report.full else None
        # Only a run's own checkpoints are its to clean up.
        self._context.resumed = report.full and (self._resumed or self._own is not None)
        state = self._context.state
        if self._context.resumed:
            self.saved = report.saved
            state.go_on_with_run()
        if state.is_finished and not state.dataset_state.stage:
            why = "was stopped (state.stop_training)" if state.stopped else "as long as it should"
            report.notes.append(
                f"this run has lasted for {state.max_duration}, {why}: nothing to do unless more is asked for"
            )
        if self._context.ranks.leads:
            report.show()
        return report.generators

    def _note_folder(self, report: LoadReport) -> None:
        """Find out whether what was loaded lies in the folder that will be saved to."""
        for saver in self._group.savers:
            if saver.is_full and report.full and report.uri.startswith(f"{saver.place.storage.uri.rstrip('/')}/"):
                self._own = saver.place
                return

    def _resume(self, saver: CheckpointSaver) -> LoadReport | None:
        """Load the newest good checkpoint of this run; None if there truly is none.

        Raises:
            CorruptCheckpointError: there are some, and none is good.
            StorageError: nobody can tell whether there are any.
        """
        folder = saver.place
        # The lease first: the writer of an earlier life may be about to finish a newer checkpoint.
        saver.take_place()
        storages = [folder.storage, *(uploader.storage for uploader in saver.uploaders)]
        local, ranks, context = folder.storage, self._context.ranks, self._context
        rollbacks = read_rollbacks(folder.session.opened.notes) if folder.is_run else []
        context.state.dataset_state.left_out.spans.update(left_out_by(rollbacks, num_ranks=ranks.world_size))
        there = ranks.lead("candidates", lambda: self._candidates(saver, storages, rollbacks))
        candidates, context.goes_back = there["rows"], there["goes_back"]
        folder.rise_above(there["attempt"])
        loaded: list[LoadReport] = []

        def check(candidate: tuple[Storage, FolderEntry]) -> str | None:
            storage, entry = candidate
            if storage is local and entry.name in folder.quarantined:
                return folder.quarantined[entry.name]
            if entry.problem is not None:
                return entry.problem
            loaded.clear()
            reason: str | None = ranks.agree("load", partial(self._try, storage, entry.name, loaded), first_bad)
            if reason is None:
                return None if loaded[0].full else GONE
            if storage is local:  # together: of what rank 0 fails at, all have to hear
                ranks.agree("aside", partial(folder.quarantine, entry.name, reason))
            return reason

        answer = newest_good(
            [(row["name"], (storages[number], FolderEntry(**row))) for number, row in candidates],
            check,
            bad={},
            where=f"autoresume=True: {folder.spelling}",
            advice="or remove them to start afresh",
        )
        found, bad = answer
        if found is not None:
            storage, entry = found
            loaded[0].notes += [
                f"set aside {name}, its files are left alone: {why.splitlines()[0]}" for name, why in bad
            ]
            loaded[0].notes += notes_of(rollbacks, {}, step=entry.step, num_ranks=ranks.world_size)
            context.before = _before(entry, [FolderEntry(**row) for number, row in candidates if number == 0])
            if context.guard is not None and context.before is not None:
                context.guard.protected = frozenset({context.before[1]})  # from now on: uploads may push it out
            # A file of Composer does not say which training it is of: the next save gives it its identity.
            self._resumed, self._context.begun, self._context.training = True, bool(entry.training), entry.training
            self._own = folder if storage is local else None
            return loaded[0]
        then = f"; load_path={self._path!r} is used" if self._path is not None else ""
        what = f"all {there['num']} checkpoint(s) under {folder.storage.uri} may hold a bad batch"
        if not context.goes_back:
            what = f"no checkpoint under {folder.storage.uri}"
        headline = f"autoresume: {what}{then or ', a fresh start'}"
        notes = ranks.lead("not usable", lambda: self._not_usable(saver))
        if ranks.leads:
            ResumeBlock(headline=headline, notes=notes).show()
        return None

    def _candidates(
        self, saver: CheckpointSaver, storages: Sequence[Storage], rollbacks: Sequence[Rollback]
    ) -> dict[str, Any]:
        """Return what there is to go on from.

        Returns:
            "rows": (number of the storage, what was found), in the order to try them; "num": how many there are;
            "attempt": the greatest; "goes_back": newer ones may hold a bad batch.
        """
        places: list[tuple[int, FolderEntry]] = []
        for number, storage in enumerate(storages):
            wanted = self._wanted(saver, storage)
            try:
                if storage is saver.place.storage:
                    latest = saver.names.fixed_latest
                    found = saver.place.look(nested=saver.names.nested, wanted=wanted, latest=latest)
                else:
                    found = look(storage, nested=True, wanted=wanted, named=self._pointed(saver, storage))
            except StorageNotFoundError:
                continue
            places += [(number, entry) for entry in found if not entry.weights_only]
        # Of two copies of a checkpoint the near one comes first. An unreadable entry may have been the newest of
        # all: it comes before any other, so that it is named.
        places.sort(
            key=lambda place: (place[1].problem is not None, place[1].attempt, place[1].step, -place[0]), reverse=True
        )
        guard = self._context.guard
        sound = [
            (str(index), entry.attempt, entry.step, entry.metrics)
            for index, (_, entry) in enumerate(places)
            if not entry.problem
        ]
        order, bad = order_to_try(
            sound, rollbacks, metric=None if guard is None else guard.watched,
            are_all_known=len(sound) == len(places) and not saver.place.quarantined,
        )  # fmt: skip
        tried = [place for place in places if place[1].problem]
        for index in order:
            number, entry = places[int(index)]
            tried.append((number, replace(entry, problem=bad.get(index))))
        return {
            "rows": [(number, asdict(entry)) for number, entry in tried],
            "num": len(places),
            "attempt": max((entry.attempt for _, entry in places), default=0),
            "goes_back": bool(bad) or order != [row[0] for row in sound],
        }

    def _pointed(self, saver: CheckpointSaver, storage: Storage) -> set[str]:
        """Return the upload that the pointer to the newest means: a listing may not show it yet."""
        latest = saver.names.fixed_remote_latest
        uploader = next(uploader for uploader in self._context.uploaders if uploader.storage is storage)
        newest = None if latest is None else linked_by(storage, uploader.path_of(latest))
        return set() if newest is None else {newest}

    def _try(self, storage: Storage, name: str, found: list[LoadReport]) -> str | None:
        """Load a candidate; give the reason if it is bad."""
        options = replace(self._options, weights_only=False, ignore_keys=None, advice=_NO_FIT)
        try:
            found.append(load_from(storage, name, self._context.state, options=options))
        except (CorruptCheckpointError, IncompleteCheckpointError, CheckpointNotFoundError) as error:
            return str(error)
        return None

    def _not_usable(self, saver: CheckpointSaver) -> list[str]:
        """Say what lies there all the same: whoever expected a resume has to see why there is none."""
        storage = saver.place.storage
        names = [name for name in names_in(storage, nested=saver.names.nested) if name not in RUN_NAMES]
        wanted = self._wanted(saver, storage)
        other = [name for name in names if wanted is not None and not wanted(name)]
        if sharded := [name for name in names if name not in other and is_sharded_of_torch(storage, name)]:
            raise ConfigError(
                f"autoresume=True: {saver.place.spelling} holds sharded checkpoints of Composer "
                f"({listed(sharded, 5)}) and none that can be gone on from: "
                "run `holdfast import` on the newest and give the result as load_path, with another save_folder, or "
                "move them away to start afresh; nothing was trained"
            )
        left = [
            name
            for name in names
            if name not in other and ((entry := look_at(storage, name)) is None or entry.weights_only)
        ]
        rows = [
            ("of other runs, by their names", other),
            ("weights only, never completed, or not written by Holdfast", left),
        ]
        return [f"{what}: {listed(of)}" for what, of in rows if of]

    def _wanted(self, saver: CheckpointSaver, storage: Storage) -> Any:
        """Return what tells the checkpoints of this run from others."""
        if storage is saver.place.storage:
            # Whatever lies in the folder is of this run, unless the names in it say whose they are.
            named = "run_name" in saver.filename.variables
            return saver.names.pattern.fullmatch if named else None
        return saver.remote_names(next(uploader for uploader in self._context.uploaders if uploader.storage is storage))


def _before(resumed: FolderEntry, entries: Sequence[FolderEntry]) -> tuple[int, str] | None:
    """Return the checkpoint of a run that would have been resumed if ``resumed`` were not there."""
    later = entries[entries.index(resumed) + 1 :] if resumed in entries else ()
    return next(((entry.step, entry.name) for entry in later if entry.problem is None), None)


class HistoryLogger(LoggerDestination):
    """Passes the numbers that are logged to the history of the run that a later life goes on from.

    Tensors are copied on their device and read when something is saved. What is no number is for other loggers.

    Args:
        state: of the trainer.
        guard: takes them too.
    """

    def __init__(self, state: State, guard: TrainerGuard | None = None) -> None:
        self._state, self._take = state, None if guard is None else guard.take
        self._log: MetricLog | None = None
        self._sessions: tuple[RunSession, ...] = ()

    def begin(self, session: RunSession | None, others: Iterable[RunSession] = ()) -> None:
        """Write to a run from now on; None: to none.

        Args:
            session: of the run.
            others: of all runs that training saves to: each knows how far it has come.
        """
        self._log = None if session is None or not session.leads else MetricLog(session, self._take)
        self._sessions = tuple(others)
        for one in self._sessions:
            one.life.trains(self._state.timestamp.count("batch"), requeue=REQUEUE_STATUS, wait_s=TIMEOUT_S)
        self.stepped()

    def stepped(self) -> None:
        """Tell the runs how many batches are trained."""
        for session in self._sessions:
            session.note_step(self._state.timestamp.count("batch"))

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Tell all runs that a save holds the loop, whichever saver it belongs to."""
        with contextlib.ExitStack() as stack:
            for session in self._sessions:
                stack.enter_context(session.life.waits())
            yield

    def leave(self) -> None:
        """Tell the runs that no more batches come."""
        for session in self._sessions:
            session.life.leaves()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Tell the runs of the batch, on a rank that logs nothing."""
        self.stepped()
        for session in self._sessions:
            session.began(self._state.timestamp.count("batch"))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Tell the runs that training is alive: an evaluation may take longer than many batches."""
        self.stepped()

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
