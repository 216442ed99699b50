"""What a trainer begins with: the newest good checkpoint of its run, ``load_path``, or nothing, which is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpointer.console import ResumeBlock
from holdfast.checkpointer.resume import first_bad
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageNotFoundError,
)
from holdfast.run.candidates import GONE, newest_good
from holdfast.run.names import RUN_NAMES
from holdfast.storage.base import Storage

from .finder import FolderEntry, is_sharded_of_torch, look, look_at, names_in
from .folder import SaveFolder, linked_by
from .load import LoadOptions, LoadReport, load_from, load_path
from .saver import CheckpointSaver
from .saver_group import SaverGroup
from .schema import IgnoreKeys, check_ignore_keys
from .uploads import as_object_store

__all__ = ["StartingPoint"]

_LOG = get_logger("trainers.loop")
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
        self._context.parent = report.checkpoint_id if report.full else None
        self._context.source = (report.uri, self._context.state.timestamp.count("batch")) if report.full else None
        # Only a run's own checkpoints are its to clean up.
        self._context.resumed = report.full and (self._resumed or self._own is not None)
        if self._context.state.is_finished:
            report.notes.append(
                f"this run has lasted for {self._context.state.max_duration}, as long as it should: nothing to do "
                "unless more is asked for"
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
        local, ranks = folder.storage, self._context.ranks
        candidates = ranks.lead("candidates", lambda: self._candidates(saver, storages))
        folder.rise_above(max((row["attempt"] for _, row in candidates), default=0))
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
            # A file of Composer does not say which training it is of: the next save gives it its identity.
            self._resumed, self._context.begun, self._context.training = True, bool(entry.training), entry.training
            self._own = folder if storage is local else None
            return loaded[0]
        then = f"; load_path={self._path!r} is used" if self._path is not None else ""
        headline = f"autoresume: no checkpoint under {folder.storage.uri}{then or ', a fresh start'}"
        notes = ranks.lead("not usable", lambda: self._not_usable(saver))
        if ranks.leads:
            ResumeBlock(headline=headline, notes=notes).show()
        return None

    def _candidates(self, saver: CheckpointSaver, storages: Sequence[Storage]) -> list[tuple[int, dict[str, Any]]]:
        """Return what there is to go on from, newest first: (number of the storage, what was found)."""
        places: list[tuple[int, FolderEntry]] = []
        for number, storage in enumerate(storages):
            try:
                found = look(
                    storage, nested=saver.names.nested or number > 0, wanted=self._wanted(saver, storage),
                    named=self._named(saver, storage),
                )  # fmt: skip
            except StorageNotFoundError:
                continue
            places += [(number, entry) for entry in found if not entry.weights_only]
        # Of two copies of a checkpoint the near one comes first. An unreadable entry may have been the newest of
        # all: it comes before any other, so that it is named.
        places.sort(
            key=lambda place: (place[1].problem is not None, place[1].attempt, place[1].step, -place[0]), reverse=True
        )
        return [(number, asdict(entry)) for number, entry in places]

    def _named(self, saver: CheckpointSaver, storage: Storage) -> set[str]:
        """Return names to ask a storage for although a listing may not show them yet."""
        if storage is saver.place.storage:
            return saver.place.named(saver.names.fixed_latest)
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
                f"({', '.join(sharded[:5])}{' ...' if len(sharded) > 5 else ''}) and none that can be gone on from: "
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
        return [f"{what}: {', '.join(of[:8])}{' ...' if len(of) > 8 else ''}" for what, of in rows if of]

    def _wanted(self, saver: CheckpointSaver, storage: Storage) -> Any:
        """Return what tells the checkpoints of this run from others."""
        if storage is saver.place.storage:
            # Whatever lies in the folder is of this run, unless the names in it say whose they are.
            named = "run_name" in saver.filename.variables
            return saver.names.pattern.fullmatch if named else None
        return saver.remote_names(next(uploader for uploader in self._context.uploaders if uploader.storage is storage))
