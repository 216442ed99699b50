"""`CheckpointSaver`: when to save, under which name, and which checkpoints stay.

`SaverContext` is what the savers of one trainer have in common, apart from the folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import xxhash

from holdfast._log import get_logger
from holdfast._meant import removed
from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.pending_saves import ANSWER_MARGIN_S, PendingSaves, RunSave, passing_error, state_of
from holdfast.config import Guard, Keep
from holdfast.errors import CheckpointExistsError, ConfigError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.model_files import Content, ModelFiles, maker_of
from holdfast.run.names import RUN_NAMES
from holdfast.storage.base import TEMPORARY, Storage
from holdfast.storage.resolve import split_uri

from ..arguments import OF_SAVER, check_flags, check_function, check_path
from ..callbacks import Callback, Logger
from ..evaluator import metrics_of
from ..parallel import TIMEOUT_S, is_sharded
from ..state import State
from ..stop_policy import TrainerGuard
from ..time import Event, Every, Timestamp, parse_every
from .finder import FolderEntry, NameTemplate, SaverNames, container_of, is_in_the_way, look_at, names_in, run_variables
from .folder import SaveFolder, check_link
from .layout import check_ignore_keys, ignored
from .saves import AsyncSaver, LastSave, PostCommit
from .uploads import RemoteUploaderDownloader


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
        guard: watches a metric; None without one.
        goes_back: checkpoints of the run are not taken, for a guard has found that they (may) hold a bad batch.
        before: batch and name of the sound checkpoint before the one that training goes on from.
        holding: a context in which a save may hold the loop.
    """

    def __init__(self, state: State, destinations: Sequence[Any], guard: TrainerGuard | None = None) -> None:
        self.state, self.ranks, self.guard = state, state.ranks, guard
        self.goes_back = False
        self.before: tuple[int, str] | None = None
        self.variables = run_variables(state.run_name, self.ranks.info)
        self.uploaders = [logger for logger in destinations if isinstance(logger, RemoteUploaderDownloader)]
        self.resumed = self.autoresumes = self.begun = False
        self.source: tuple[str, int] | None = None
        self.parent: str | None = None
        self.training = ""
        self.holding: Callable[[], AbstractContextManager[None]] = nullcontext
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


_LOG = get_logger("trainers.loop")
_LONGEST = 240  # of a name; the counters in it, and what is added to it while it is written, need some more
_FILE, _LATEST, _REMOTE = "ep{epoch}-ba{batch}-rank{rank}", "latest-rank{rank}", "{run_name}/checkpoints/"
_LAST_BATCH = "last_batch"  # a stage, see `LastSave`


@removed(**OF_SAVER)
class CheckpointSaver(Callback):
    """Saves the training at an interval into a folder. A trainer may have several.

    Args:
        folder: where to: a directory or a URI; run variables are filled in.
        filename: name of each checkpoint; without suffix a Holdfast directory, ".pt" or ".safetensors" a file.
        remote_file_name: name at the destination of a `RemoteUploaderDownloader`, by default ``filename`` below
            "{run_name}/checkpoints/"; None uploads nothing.
        latest_filename: link to the newest; None for none.
        latest_remote_file_name: name of the pointer to the newest at that destination.
        save_interval: epochs, a time, or ``fn(state, event)``, which then decides alone.
        overwrite: replace checkpoints of later moments than training is at, instead of refusing to start.
        num_checkpoints_to_keep: how many stay in ``folder``; -1: all; 0: none after their upload. A folder that is a
            URI writes nothing here, and is only cleaned by ``keep``.
        weights_only: save nothing but the weights.
        ignore_keys: globs over "/"-joined paths that are not saved, or a function that changes the dictionary.
        keep: a `holdfast.Keep` instead of ``num_checkpoints_to_keep``; also cleans a remote folder.
        model_files: small files committed with each directory, for other libraries: ``{name: bytes, text or a
            function}``, `holdfast.transformers.model_files`, or the name under which an installed package makes them.
            See docs/model-directory.md.

    Raises:
        ConfigError: an argument is wrong.
    """

    # Of the training that it takes part in, from `attach` on.
    _context: SaverContext
    place: SaveFolder
    names: SaverNames

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        filename: str | os.PathLike[str] = _FILE,
        remote_file_name: str | None = _REMOTE + _FILE,
        latest_filename: str | None = _LATEST,
        latest_remote_file_name: str | None = _REMOTE + _LATEST,
        save_interval: Any = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: Any = None,
        keep: Keep | None = None,
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    ) -> None:
        _check_number(num_checkpoints_to_keep, keep)
        check_flags(overwrite=overwrite, weights_only=weights_only)
        self.folder = NameTemplate(check_path(folder, "save_folder"), what="save_folder", times=False)
        self.filename = NameTemplate(
            check_path(filename, "save_filename").lstrip("/"), what="save_filename", read_back=True
        )
        self.latest_filename = _optional(latest_filename, "save_latest_filename")
        if remote_file_name == _REMOTE + _FILE:  # the default follows the name here: two savers must not meet there
            remote_file_name = _REMOTE + self.filename.text
        self.points_by_default = latest_remote_file_name == _REMOTE + _LATEST
        if self.points_by_default and self.latest_filename is not None:
            latest_remote_file_name = _REMOTE + self.latest_filename.text
        self.remote_file_name = _optional(remote_file_name, "save_remote_file_name", read_back=True)
        self.latest_remote_file_name = _optional(latest_remote_file_name, "latest_remote_file_name")
        self.container = container_of(self.filename.text, what="save_filename")
        self.weights_only = bool(weights_only)
        if self.container == "safetensors" and not weights_only:
            _LOG.warning(
                "save_filename=%r: a .safetensors file holds weights only, nothing resumes from it", self.filename.text
            )
            self.weights_only = True
        self.every: Every | Callable[[State, Event], bool] = (
            check_function(save_interval, "save_interval", "state", "event")
            if callable(save_interval)
            else parse_every(save_interval, "save_interval")
        )
        self.overwrite, self.num_to_keep, self.keep = bool(overwrite), num_checkpoints_to_keep, keep
        self.ignore_keys = check_ignore_keys(ignore_keys, "save_ignore_keys")
        self.makes_files = _maker_of_files(model_files, self.filename, self.container)
        self.model_files: ModelFiles | None = None  # of the state of the trainer
        self._is_source = False
        self._post_commit: PostCommit | None = None
        self._saves: AsyncSaver | None = None
        self._parent: str | None = None
        self._last: LastSave | None = None
        self._last_kept = -1
        self.keeps: Every | None = None  # see `rescue_with`
        self._ready = False
        self._looked: set[str] = set()
        self._said_bare = False
        self._in_place: set[str] = set()  # names that are taken by what is to be replaced, if files keep their names

    # -- what there is

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this saver that exist, oldest first, as the folder was spelt."""
        entries = [] if self._post_commit is None else self._post_commit.all
        return [_join(self.place.spelling, entry.name) for entry in entries]

    @property
    def is_full(self) -> bool:
        """True when training can go on from what this saves."""
        return not self.weights_only

    @property
    def uploaders(self) -> list[RemoteUploaderDownloader]:
        """Where its checkpoints are uploaded to; nowhere if they are remote already."""
        return [] if self.remote_file_name is None or self.place.is_remote else self._context.uploaders

    # -- set up by the trainer

    def attach(self, context: SaverContext, folder: SaveFolder, *, is_source: bool) -> None:
        """Take part in a training; nothing of an earlier trainer that had this saver is taken over.

        Args:
            context: what all savers of the trainer have in common.
            folder: where to save.
            is_source: a later life goes on from what this saver saves.

        Raises:
            ConfigError: a name leads out of the folder, the model is no single file, nothing would stay of it, or there
                can be no ``model_files`` of this state.
        """
        self._context, self.place, self._is_source = context, folder, is_source
        self._post_commit, self._last, self._ready, self._parent = None, None, False, None
        for template in (self.filename, self.latest_filename):
            if template is not None:
                _check_name(template, template.shape(context.variables), beside_run=self.container == "directory")
        if self.container != "directory" and is_sharded(context.state.model):
            raise ConfigError(
                f"save_filename={self.filename.text!r}: no rank holds the whole of a sharded model, so it cannot be "
                "one file: use a name without suffix (a Holdfast directory), and `holdfast export` to make a file of it"
            )
        self.names = SaverNames(
            variables=context.variables, file=self.filename, latest=self.latest_filename,
            remote=self.remote_file_name, remote_latest=self.latest_remote_file_name,
        )  # fmt: skip
        if self.num_to_keep == 0 and folder.is_remote:  # nothing is written here, and a number never cleans there
            self.num_to_keep = -1
        if self.num_to_keep == 0 and not self.uploaders:
            raise ConfigError(
                "num_checkpoints_to_keep=0 deletes each checkpoint after its upload, and nothing is uploaded: keep at "
                "least 1, or give a RemoteUploaderDownloader among the loggers"
            )
        if is_source and self.claim is not None:
            context.goes_on_from_files(f"{folder.storage.uri}/{self.claim}")
        if self.makes_files is not None:
            self.model_files = self.makes_files(context.state.live(weights_only=self.weights_only)["state"])

    def drop_pointer(self) -> None:
        """Write no pointer to the newest upload: another saver has its name."""
        self.names = replace(self.names, remote_latest=None)

    def is_named_by_run(self, destinations: Iterable[Any]) -> bool:
        """Tell whether what it saves for a resume is found again only by the name of the run."""
        names = [self.folder.text, self.filename.text]
        if self.remote_file_name is not None and split_uri(self.folder.text)[0] == "file":
            uploaders = [uploader for uploader in destinations if isinstance(uploader, RemoteUploaderDownloader)]
            names += [f"{uploader.file_path_format_string} {self.remote_file_name.text}" for uploader in uploaders]
        return any("{run_name" in name for name in names)

    def remote_names(self, uploader: RemoteUploaderDownloader) -> Callable[[str], re.Match[str] | None]:
        """Return what recognises the uploads of this saver: in a bucket there may be many runs."""
        assert self.remote_file_name is not None
        pattern = self.remote_file_name.pattern(self.names.variables)
        before, _, after = uploader.path_of("\0").partition("\0")

        def match(name: str) -> re.Match[str] | None:
            inside = name.startswith(before) and name.endswith(after)
            return pattern.fullmatch(name[len(before) : len(name) - len(after)]) if inside else None

        return match

    def check_overwrite(self, now: Timestamp) -> None:
        """Refuse to train when checkpoints of later moments lie where this saves to, or where they are uploaded to.

        Raises:
            CheckpointExistsError: naming them.
        """
        if self.overwrite:
            return
        folder, context = self.place, self._context
        names = [name for name in names_in(folder.storage, nested=self.names.nested) if name not in folder.quarantined]
        later = self._in_the_way(folder.storage, names, self.names.pattern.fullmatch, now)
        where = folder.spelling
        for uploader in self.uploaders if not later else ():
            match, where = self.remote_names(uploader), uploader.storage.uri
            later += self._in_the_way(uploader.storage, names_in(uploader.storage, nested=True), match, now)
        if later:
            way = "move them away" if context.autoresumes else "go on with autoresume=True"
            raise CheckpointExistsError(
                f"{where} holds {len(later)} checkpoint(s) after batch {now.count('batch')} ({listed(later, 5)}), "
                f"and save_overwrite=False: {way}, use another save_folder or "
                "run_name, or pass save_overwrite=True; nothing was trained"
            )

    def _in_the_way(
        self, storage: Storage, names: Sequence[str], match: Callable[[str], re.Match[str] | None], now: Timestamp
    ) -> list[str]:
        """Return those of later moments, but for what this training has saved beside the saver it goes on from."""
        later = {name: look_at(storage, name) for name in names if is_in_the_way(storage, name, match(name), now)}
        own: dict[str, FolderEntry] = {}
        if not self._is_source or self._context.goes_back:
            earlier = self._context.is_of_earlier_life
            own = {name: entry for name, entry in later.items() if entry is not None and earlier(entry)}
        if ahead := [name for name, entry in own.items() if entry.step > now.count("batch")]:
            _LOG.warning(
                "%s holds %d checkpoint(s) later than batch %d, where this training goes on (%s): an earlier life had "
                "got further; they are replaced when training gets there again",
                storage.uri, len(ahead), now.count("batch"), listed(ahead, 5),
            )  # fmt: skip
        return [name for name in later if name not in own]

    def find_saved(self, step: int) -> str | None:
        """Return the URI of the checkpoint of this moment, if there is one."""
        entries = [] if self._post_commit is None else self._post_commit.all
        found = [entry.name for entry in entries if entry.step == step]
        return f"{self.place.storage.uri.rstrip('/')}/{found[-1]}" if found else None

    def check_interval(self) -> None:
        """Refuse an interval that cannot be decided with this data."""
        if isinstance(self.every, Every):
            self.every.check(self._context.state.span)

    @property
    def claim(self) -> str | None:
        """The name that nobody else may give to files in its folder; None for directories, which make up a run."""
        return None if self.container == "directory" else self.names.shape

    def take_place(self) -> None:
        """Take the folder, so that no other trainer saves there under the same names; idempotent.

        Raises:
            RunBusyError: another one does.
        """
        self.place.open(claim=self.claim, nested=self.names.nested)

    def open(self) -> None:
        """Get ready to save; idempotent."""
        if self._saves is not None:
            return
        folder, context, names = self.place, self._context, self.names
        self.take_place()
        if self._post_commit is None:
            self._post_commit = self._make_post_commit(folder, context)
        post_commit, now = self._post_commit, context.state.timestamp
        self._saves = AsyncSaver(
            folder, self.container, claim=self.claim, parent=self._parent or context.parent,
            make_room=post_commit.make_room, model_files=self.model_files, rescues=self.keeps is not None,
        )  # fmt: skip
        if (latest := names.destinations(now).latest) is not None:
            folder.ranks.lead("link", lambda: check_link(folder.storage, latest))
        if self.container == "directory":
            folder.ranks.lead("sweep", lambda: folder.sweep(names.pattern.fullmatch, nested=names.nested))
        if self.model_files is not None:
            self._in_place = set(folder.ranks.lead("in place", lambda: self._to_be_replaced(now)))
        found = post_commit.find_earlier(now, weights_only=self.weights_only) if context.resumed else None
        if found is not None and found.step != self._last_batch:  # this moment is safe already
            is_this = self._is_source or (self.is_full and found.name == names.at(now))
            stage = self._stage if is_this else ""
            parent = post_commit.parent_of(found) if stage else None
            self._last = LastSave(found, names.destinations(now), stage, parent)

    def _to_be_replaced(self, now: Timestamp) -> list[str]:
        """Return the names of what a save will replace: damaged, or of a later moment."""
        folder, found = self.place, []
        for name in filter(self.names.pattern.fullmatch, names_in(self.place.storage, nested=False)):
            entry = look_at(folder.storage, name)
            if entry is not None and (entry.problem or name in folder.quarantined or entry.step > now.count("batch")):
                found.append(name)
        return found

    def _make_post_commit(self, folder: SaveFolder, context: SaverContext) -> PostCommit:
        keep = self.keep
        if self.num_to_keep > 0 and not folder.is_remote:  # a number never cleans a remote folder
            keep = Keep(last=self.num_to_keep)
        return PostCommit(
            self.names, folder, self.uploaders, claim=self.claim, keep=keep, keeps_none=self.num_to_keep == 0,
            announce=context.announce, guard=context.guard if self._is_source else None,
        )  # fmt: skip

    # -- saving

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._maybe(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._maybe(state, Event.EPOCH_CHECKPOINT)

    def _maybe(self, state: State, event: Event) -> None:
        saves = self._saves
        assert saves is not None
        if saves.pending.ended.is_set():  # costs nothing while none has
            saves.pending.glance()
        is_due = self.is_due(event) if isinstance(self.every, Every) else self.every(state, event)
        if is_due or self._is_incomplete or (self._is_source and self._is_before_a_bad_one(event)):
            self.save_now()
        elif self._ready and self.keeps is not None and self._is_crossed(self.keeps, event):
            self._keep()
        elif not self._ready:  # the state of optimizers exists from the first batch on
            with self._context.holding():
                saves.prepare(self._live())
        self._ready = True

    def _is_before_a_bad_one(self, event: Event) -> bool:
        guard, now = self._context.guard, self._context.state.timestamp
        return guard is not None and event is Event.BATCH_CHECKPOINT and now.count("batch") in guard.saves_at

    def rescue(self, why: str) -> None:
        """Commit the newest snapshot, if it is newer than what is saved: training has raised."""
        if self._saves is not None and self.keeps is not None:
            self._saves.rescue(why)

    def is_due(self, event: Event) -> bool:
        """Tell whether it is time by the interval; a function is not asked."""
        return isinstance(self.every, Every) and self._is_crossed(self.every, event)

    def _is_crossed(self, every: Every, event: Event) -> bool:
        state = self._context.state
        return every.due(event, state.previous_timestamp, state.timestamp, state.span)

    def make_up(self, event: Event) -> None:
        """Save what was due at the moment training goes on from, if the life that ended there did not come to it."""
        assert self._post_commit is not None
        now = self._context.state.timestamp.count("batch")
        if self.is_due(event) and not self._post_commit.has(now):
            self.save_now()

    @property
    def _is_incomplete(self) -> bool:
        """Whether the checkpoint of this batch was saved before an evaluation that belongs to it."""
        last = self._last
        return last is not None and last.stage not in ("", _LAST_BATCH) and last.entry.step == self._batch

    @property
    def _stage(self) -> str:
        """What has to come yet before the checkpoint of this batch is whole, as `LastSave` has it."""
        state = self._context.state
        return state.dataset_state.stage or _LAST_BATCH * state.is_epoch_over  # of an epoch not counted yet

    @property
    def _batch(self) -> int:
        return self._context.state.timestamp.count("batch")

    @property
    def _last_batch(self) -> int:
        return -1 if self._last is None else self._last.entry.step

    def save_now(self) -> None:
        """Save, once for one batch; again, in its place, if an evaluation of that batch was left when it was saved."""
        assert self._saves is not None
        assert self._post_commit is not None
        context, post_commit, is_source = self._context, self._post_commit, self._is_source
        state = context.state
        batch, stage = self._batch, state.dataset_state.stage if self.is_full else ""
        last = self._last if self._last_batch == batch else None
        if last is not None and (last.stage == stage or self.model_files is not None):  # whose names cannot be replaced
            return
        if context.guard is not None:
            context.guard.check(waits=True)
        metrics, destinations = self._metrics(), self.names.destinations(state.timestamp)
        if last is not None:
            metrics, destinations = {**last.entry.metrics, **metrics}, last.destinations  # resumed, it has no loss
        save = self._described(metrics, name=None if last is None else last.entry.name)
        saved = FolderEntry(
            name=save.name, container=self.container, attempt=self.place.attempt, step=batch, created=time.time(),
            weights_only=self.weights_only, epoch=state.timestamp.count("epoch"), metrics=metrics,
        )  # fmt: skip
        context.flush_logs()
        if self.model_files is not None and saved.name in self._in_place:
            # Files whose names are fixed cannot be replaced while the checkpoint stays readable: it goes first.
            files = [*self.model_files.files, *self.model_files.indexes, *self.model_files.named]
            context.ranks.lead("replace", lambda: self.place.clear(saved.name, files))
            self._in_place.discard(saved.name)

        def committed(manifest: bytes) -> None:
            context.begun |= is_source
            post_commit.add(saved, destinations, manifest)

        if context.guard is not None and is_source:
            context.guard.saving(saved.name)
        with context.holding(), state.as_in_training() if self.is_full else contextlib.nullcontext():
            if last is not None:
                self._saves.replace(last)
            self._saves.save(save, self._live(), after=committed)
        self._last = LastSave(saved, destinations, stage, self.pending.parent)
        if last is not None:
            self._last = self._last._replace(stage=self._stage, parent=last.parent)

    def _metrics(self) -> dict[str, Any]:
        guard = self._context.guard
        return {**metrics_of(self._context.state), **({} if guard is None else guard.value_at(self._batch))}

    def _described(self, metrics: Mapping[str, Any], *, name: str | None = None) -> RunSave:
        """Return what is known of a save of this moment; it replaces what has its name."""
        now, content = self._context.state.timestamp, "weights" if self.weights_only else "full"
        return RunSave(
            step=now.count("batch"), epoch=now.count("epoch"), metrics=metrics, name=name or self.names.at(now),
            overwrite=True,
            extra={"content": content, "training": self._context.training_of(is_source=self._is_source)},
        )  # fmt: skip

    def _keep(self) -> None:
        """Keep the state of this moment in memory, once, unless it is saved."""
        assert self._saves is not None
        if self._batch in (self._last_batch, self._last_kept):
            return
        if self._context.guard is not None and not self._context.guard.keeping():
            return
        self._last_kept = self._batch
        self._context.flush_logs()
        with self._context.holding():
            if not self._saves.keep(self._described(self._metrics()), self._live()):
                self.keeps = None

    @property
    def pending(self) -> PendingSaves:
        """The saves on their way, while it is open."""
        assert self._saves is not None
        return self._saves.pending

    def retry_lost(self) -> None:
        """Try the save of this moment once more, if it was begun and lost. All ranks call it."""
        saves, ranks = self._saves, self._context.ranks
        if saves is None or self._last_batch != self._context.state.timestamp.count("batch"):
            return

        def is_lost() -> bool:
            saves.pending.settle()
            return saves.pending.lost.error is not None

        # Of single files rank 0 alone knows; parts of a directory are lost together.
        if ranks.lead("lost", is_lost, work_s=TIMEOUT_S + ANSWER_MARGIN_S):
            saves.pending.settle()
            self._last = None
            self.save_now()

    def _live(self) -> dict[str, Any]:
        live = self._context.state.live(weights_only=self.weights_only)
        kept = ignored(live, self.ignore_keys, what="save_ignore_keys", looked=self._looked)
        if "model" not in kept["state"] and not self._said_bare:
            self._said_bare = True
            _LOG.warning("%s is saved without the model (state/model): nothing goes on from it", self.filename.text)
        return kept

    def settle_ended(self) -> None:
        """Take in a save that has ended, well or not; all ranks call it at the same batch. Raises what failed."""
        if self._saves is not None:
            self.pending.settle(leave=len(self.pending))

    def settle(self) -> None:
        """Wait until everything saved is durable; raises what failed."""
        if self._saves is not None:
            self.pending.settle()

    def check_lost(self) -> None:
        """Refuse to call a training saved whose last checkpoint found no space, or no answer.

        Raises:
            StorageFullError: saying what is safe.
            StorageUnavailableError: the same.
        """
        lost = None if self._saves is None else self.pending.lost.error
        if lost is not None:
            newest = self.saved_checkpoints[-1:] or ["none"]
            raise passing_error(
                lost,
                f"the last checkpoint (batch {self._last_batch}) was NOT saved, {state_of(lost)} ({lost}); the newest "
                f"is {newest[0]}",
            )

    def release(self) -> None:
        """Give thread and memory back; `open` makes it ready again."""
        saves, self._saves = self._saves, None
        if saves is not None:
            self._parent = saves.pending.parent  # a later training of this trainer goes on from there
            saves.close()


def default_saver(folder: str | os.PathLike[str] | None, **options: Any) -> CheckpointSaver | None:
    """Return the saver that the ``save_*`` arguments of a `Trainer` ask for."""
    if folder is None:
        if options["model_files"] is not None:
            raise ConfigError("model_files goes with save_folder; a CheckpointSaver takes its own model_files")
        return None
    below = _below(check_path(folder, "save_folder"))
    latest = options["latest_filename"]
    if options["remote_file_name"] is None:
        options["remote_file_name"] = (below or _REMOTE) + check_path(options["filename"], "save_filename").lstrip("/")
    pointer = None if latest is None else (below or _REMOTE) + check_path(latest, "save_latest_filename").lstrip("/")
    return CheckpointSaver(folder, **options, latest_remote_file_name=pointer)


def _below(folder: str) -> str | None:
    """Return the path of a folder as the beginning of names in a bucket; None for one that only this machine has."""
    scheme, path = split_uri(folder)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    elsewhere = scheme != "file" or path.startswith(("/", "~")) or ".." in parts
    return None if elsewhere else "".join(f"{part}/" for part in parts)


def _optional(text: str | None, what: str, *, read_back: bool = False) -> NameTemplate | None:
    return None if text is None else NameTemplate(check_path(text, what).lstrip("/"), what=what, read_back=read_back)


def _check_name(template: NameTemplate, shape: str, *, beside_run: bool) -> None:
    """Refuse a name that leaves the folder, or that means something else there."""
    parts = shape.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"{template.what}={template.text!r} would be {shape!r} here: give the name of a file inside of save_folder"
        )
    if any(len(part.encode(errors="surrogateescape")) > _LONGEST for part in parts):
        raise ConfigError(f"{template.what}={template.text!r}: no file system takes a name of over {_LONGEST} bytes")
    taken = beside_run and parts[0] in RUN_NAMES
    if taken or any(part.startswith(TEMPORARY) or part == MANIFEST_NAME for part in parts):
        raise ConfigError(
            f"{template.what}={template.text!r}: {', '.join(RUN_NAMES)}, {MANIFEST_NAME} and names that begin with "
            f"{TEMPORARY} are those of a run's own files; use another"
        )


def _maker_of_files(
    given: Any, filename: NameTemplate, container: str
) -> Callable[[Mapping[Any, Any]], ModelFiles | None] | None:
    """Check ``model_files`` of a saver, as `maker_of` does.

    Its items are those of the state ("model" is "state/model" in a checkpoint).

    Raises:
        ConfigError: it goes with no such checkpoints.
    """
    make = maker_of(given)
    if make is None:
        return None
    if container != "directory":
        raise ConfigError(
            f"model_files with save_filename={filename.text!r}: that is a single file, and they lie beside the tensors "
            "of a directory: use a name without suffix"
        )
    if "/" in filename.text or not set(filename.variables) & {"batch", "sample", "token"}:
        raise ConfigError(
            f"model_files with save_filename={filename.text!r}: these files keep their names, so no checkpoint can be "
            "written over another one: use a name with {batch} in it, directly in save_folder"
        )

    def inside(path: str) -> str:
        return path if path.startswith("state/") else f"state/{path}"

    def make_inside(state: Mapping[Any, Any]) -> ModelFiles | None:
        if (files := make(state)) is None:
            return None
        return replace(
            files,
            indexes={name: inside(item) for name, item in files.indexes.items()},
            named={name: {inside(path): own for path, own in tensors.items()} for name, tensors in files.named.items()},
        )

    return make_inside


def _check_number(number: Any, keep: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < -1:
        raise ConfigError(f"num_checkpoints_to_keep={number!r}: give a whole number, -1 for all")
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep={keep!r} is a {type(keep).__name__}: give a holdfast.Keep")
    if keep is not None and number != -1:
        raise ConfigError("give either num_checkpoints_to_keep or keep, not both")


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"/{name}"


def rescue_with(saver: CheckpointSaver | None, interval: Any) -> None:
    """Have a saver keep snapshots in memory, which are written only if this process dies.

    Raises:
        ConfigError: it cannot.
    """
    every = parse_every(interval, "rescue")
    if saver is None or saver.container != "directory":
        raise ConfigError(
            f"rescue={interval!r} needs a save_folder with whole checkpoints that are directories: give one, with a "
            "save_filename without suffix and save_weights_only=False"
        )
    if saver.makes_files is not None:
        raise ConfigError(f"rescue={interval!r} with model_files: files of fixed names cannot be kept; leave one out")
    saver.keeps = every


def check_guard(guard: Any, saver: CheckpointSaver | None, *, autoresumes: bool) -> None:
    """Refuse a guard that could not take a training back.

    Args:
        guard: as given.
        saver: the first that saves everything.
        autoresumes: the next start goes on from what it has saved.

    Raises:
        ConfigError: it is none, or has nothing to go back to.
    """
    if not isinstance(guard, Guard):
        raise ConfigError(f"guard={guard!r}: give a holdfast.Guard, as in Guard(metric='loss'), or None")
    if saver is None or saver.container != "directory":
        raise ConfigError(
            "guard= needs a save_folder with whole checkpoints that are directories, which remember what was bad: give "
            "one, with a save_filename without suffix and save_weights_only=False"
        )
    if guard.action == "rollback" and not autoresumes:
        raise ConfigError(
            "guard=Guard(action='rollback') ends this process for a bad batch, and the next start goes on from before "
            "it: pass autoresume=True, or use action='stop' or 'warn'"
        )
