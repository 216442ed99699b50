"""`CheckpointSaver`: when to save, under which name, and which checkpoints stay."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast.checkpointer.rank_group import ANSWER_MARGIN_S
from holdfast.checkpointer.transient import passing_error, state_of
from holdfast.config import Keep, _removed
from holdfast.errors import CheckpointExistsError, ConfigError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.run.names import RUN_NAMES
from holdfast.storage.base import TEMPORARY, Storage
from holdfast.storage.resolve import split_uri

from ..arguments import OF_SAVER, check_flags, check_function, check_path
from ..callbacks import Callback
from ..events import Event
from ..times.intervals import Every, parse_every
from ..times.timestamp import Timestamp
from ..training.metrics import metrics_of
from ..training.parallel import is_sharded
from ..training.ranks import TIMEOUT_S
from .async_saver import AsyncSaver
from .finder import FolderEntry, container_of, is_in_the_way, look_at, names_in
from .folder import SaveFolder, check_link
from .naming import NameTemplate
from .post_commit import Destinations, PostCommit
from .schema import check_ignore_keys, ignored
from .uploads import RemoteUploaderDownloader

if TYPE_CHECKING:
    from ..loggers import Logger
    from ..state import State
    from .saver_group import SaverGroup

__all__ = ["CheckpointSaver", "default_saver"]

_LOG = get_logger("trainer")
_LONGEST = 240  # of a name; the counters in it, and what is added to it while it is written, need some more
_FILE, _LATEST, _REMOTE = "ep{epoch}-ba{batch}-rank{rank}", "latest-rank{rank}", "{run_name}/checkpoints/"


@_removed(**OF_SAVER)
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

    Raises:
        ConfigError: an argument is wrong.
    """

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
        self._site: SaverGroup | None = None
        self._folder: SaveFolder | None = None
        self._track: AsyncSaver | None = None
        self._last_batch = -1
        self._ready = False
        self._looked: set[str] = set()
        self._said_bare = False
        self._kept: PostCommit | None = None

    # -- what there is

    @property
    def saved_checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this saver that exist, oldest first, as the folder was spelt."""
        return [] if self._kept is None else [_join(self.place.spelling, one.name) for one in self._kept.all]

    @property
    def is_full(self) -> bool:
        """True when training can go on from what this saves."""
        return not self.weights_only

    @property
    def place(self) -> SaveFolder:
        """The folder it saves to."""
        assert self._folder is not None
        return self._folder

    # -- set up by the trainer

    def attach(self, site: SaverGroup, folder: SaveFolder) -> None:
        """Learn where it belongs."""
        self._site, self._folder, self._kept = site, folder, PostCommit(self, site, folder)
        for template in (self.filename, self.latest_filename):
            if template is not None:
                _check_name(template, template.shape(site.variables), beside_run=self.container == "directory")
        if self.container != "directory" and is_sharded(site.state.model):
            raise ConfigError(
                f"save_filename={self.filename.text!r}: no rank holds the whole of a sharded model, so it cannot be "
                "one file: use a name without suffix (a Holdfast directory), and `holdfast export` to make a file of it"
            )
        if self.num_to_keep == 0 and folder.is_remote:  # nothing is written here, and a number never cleans there
            self.num_to_keep = -1
        if self.num_to_keep == 0 and not site.uploads_of(self):
            raise ConfigError(
                "num_checkpoints_to_keep=0 deletes each checkpoint after its upload, and nothing is uploaded: keep at "
                "least 1, or give a RemoteUploaderDownloader among the loggers"
            )

    def is_named_by_run(self, destinations: Iterable[Any]) -> bool:
        """Tell whether what it saves for a resume is found again only by the name of the run."""
        names = [self.folder.text, self.filename.text]
        if self.remote_file_name is not None and split_uri(self.folder.text)[0] == "file":
            uploaders = [one for one in destinations if isinstance(one, RemoteUploaderDownloader)]
            names += [f"{one.file_path_format_string} {self.remote_file_name.text}" for one in uploaders]
        return any("{run_name" in name for name in names)

    @property
    def nested(self) -> bool:
        """True when names lie in sub-folders, be it by the name of the run."""
        assert self._site is not None
        return "/" in self.filename.shape(self._site.variables)

    def remote_names(self, uploader: RemoteUploaderDownloader) -> Callable[[str], re.Match[str] | None]:
        """Return what recognises the uploads of this saver: in a bucket there may be many runs."""
        assert self._site is not None
        assert self.remote_file_name is not None
        pattern = self.remote_file_name.pattern(self._site.variables)
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
        assert self._site is not None
        if self.overwrite:
            return
        folder, pattern = self.place, self.filename.pattern(self._site.variables)
        names = [name for name in names_in(folder.storage, nested=self.nested) if name not in folder.quarantined]
        later = self._in_the_way(folder.storage, names, pattern.fullmatch, now)
        where = folder.spelling
        for uploader in self._site.uploads_of(self) if not later else ():
            match, where = self.remote_names(uploader), uploader.storage.uri
            later += self._in_the_way(uploader.storage, names_in(uploader.storage, nested=True), match, now)
        if later:
            way = "go on with autoresume=True" if self._site.resumed or not self._site.autoresumes else "move them away"
            raise CheckpointExistsError(
                f"{where} holds {len(later)} checkpoint(s) after batch {now.count('batch')} ({', '.join(later[:5])}"
                f"{' ...' if len(later) > 5 else ''}), and save_overwrite=False: {way}, use another save_folder or "
                "run_name, or pass save_overwrite=True; nothing was trained"
            )

    def _in_the_way(
        self, storage: Storage, names: Sequence[str], match: Callable[[str], re.Match[str] | None], now: Timestamp
    ) -> list[str]:
        """Return those of later moments, but for what this training has saved beside the saver it goes on from."""
        assert self._site is not None
        later = {name: look_at(storage, name) for name in names if is_in_the_way(storage, name, match(name), now)}
        own = {name: one for name, one in later.items() if one is not None and self._site.is_ahead(self, one)}
        if ahead := [name for name, one in own.items() if one.step > now.count("batch")]:
            _LOG.warning(
                "%s holds %d checkpoint(s) later than batch %d, where this training goes on (%s): a life that was "
                "killed had got further; they are replaced when training gets there again",
                storage.uri, len(ahead), now.count("batch"), ", ".join(ahead[:5]),
            )  # fmt: skip
        return [name for name in later if name not in own]

    def check_interval(self) -> None:
        """Refuse an interval that cannot be decided with this data."""
        assert self._site is not None
        if isinstance(self.every, Every):
            self.every.check(self._site.state.span)

    @property
    def claim(self) -> str | None:
        """The name that nobody else may give to files in its folder; None for directories, which make up a run."""
        assert self._site is not None
        return None if self.container == "directory" else self.filename.shape(self._site.variables)

    def take_place(self) -> None:
        """Take the folder, so that no other trainer saves there under the same names; idempotent.

        Raises:
            RunBusyError: another one does.
        """
        self.place.open(claim=self.claim, nested=self.nested)

    def open(self) -> None:
        """Get ready to save; idempotent."""
        assert self._site is not None
        if self._track is not None:
            return
        folder = self.place
        self.take_place()
        assert self._kept is not None
        self._track = AsyncSaver(
            folder, self.container, claim=self.claim, parent=self._site.parent, make_room=self._kept.make_room
        )
        pattern = self.filename.pattern(self._site.variables)
        if (latest := self.latest_filename) is not None:
            link = latest.format(self._site.variables, self._site.state.timestamp)
            folder.ranks.lead("link", lambda: check_link(folder.storage, link))
        if self.container == "directory":
            folder.ranks.lead("sweep", lambda: folder.sweep(pattern.fullmatch, nested=self.nested))
        if self._site.resumed and self._kept.find_earlier(pattern):
            self._last_batch = self._site.state.timestamp.count("batch")  # this moment is safe already

    # -- saving

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._maybe(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save if it is time."""
        self._maybe(state, Event.EPOCH_CHECKPOINT)

    def _maybe(self, state: State, event: Event) -> None:
        track = self._track
        assert track is not None
        track.glance()
        if self.is_due(event) if isinstance(self.every, Every) else self.every(state, event):
            self.save_now()
        elif not self._ready:  # the state of optimizers exists from the first batch on
            track.prepare(self._live())
        self._ready = True

    def is_due(self, event: Event) -> bool:
        """Tell whether it is time by the interval; a function is not asked."""
        assert self._site is not None
        state, every = self._site.state, self.every
        return isinstance(every, Every) and every.due(event, state.previous_timestamp, state.timestamp, state.span)

    def make_up(self, event: Event) -> None:
        """Save what was due at the moment training goes on from, if the life that ended there did not come to it."""
        assert self._site is not None
        assert self._kept is not None
        now = self._site.state.timestamp.count("batch")
        if self.is_due(event) and not self._kept.has(now):
            self.save_now()

    def save_now(self) -> None:
        """Save, once for one batch."""
        assert self._site is not None
        assert self._track is not None
        state, site = self._site.state, self._site
        batch = state.timestamp.count("batch")
        if batch == self._last_batch:
            return
        name = self.filename.format(site.variables, state.timestamp)
        extra = {"content": "weights" if self.weights_only else "full", "training": site.training_of(self)}
        about: dict[str, Any] = {"step": batch, "epoch": state.timestamp.count("epoch"), "metrics": metrics_of(state)}
        saved = FolderEntry(
            name=name, container=self.container, attempt=self.place.attempt, step=batch, created=time.time(),
            weights_only=self.weights_only, epoch=about["epoch"], metrics=about["metrics"],
        )  # fmt: skip
        site.flush_logs()
        kept, there = self._kept, self.destinations(state.timestamp)
        assert kept is not None
        self._track.save(name, self._live(), about=about, extra=extra, after=lambda: kept.add(saved, there))
        self._last_batch = batch

    def retry_lost(self) -> None:
        """Try the save of this moment once more, if it was begun and lost. All ranks call it."""
        assert self._site is not None
        track, ranks = self._track, self._site.ranks
        if track is None or self._last_batch != self._site.state.timestamp.count("batch"):
            return

        def is_lost() -> bool:
            track.settle()
            return track.lost.error is not None

        # Of single files rank 0 alone knows; parts of a directory are lost together.
        if ranks.lead("lost", is_lost, work_s=TIMEOUT_S + ANSWER_MARGIN_S):
            track.settle()
            self._last_batch = -1
            self.save_now()

    def _live(self) -> dict[str, Any]:
        assert self._site is not None
        live = self._site.state.live(weights_only=self.weights_only)
        kept = ignored(live, self.ignore_keys, what="save_ignore_keys", looked=self._looked)
        if "model" not in kept["state"] and not self._said_bare:
            self._said_bare = True
            _LOG.warning("%s is saved without the model (state/model): nothing goes on from it", self.filename.text)
        return kept

    def destinations(self, now: Timestamp) -> Destinations:
        """Return the names, apart from its own, that a checkpoint of this moment gets."""
        assert self._site is not None
        run = self._site.variables
        templates = (self.latest_filename, self.remote_file_name, self.latest_remote_file_name)
        return Destinations(*(None if one is None else one.format(run, now) for one in templates))

    def settle_ended(self) -> None:
        """Take in a save that has ended; raises what failed."""
        if self._track is not None and self._track.ended:
            self._track.settle()

    def settle(self) -> None:
        """Wait until everything saved is durable; raises what failed."""
        if self._track is not None:
            self._track.settle()

    def check_lost(self) -> None:
        """Refuse to call a training saved whose last checkpoint found no space, or no answer.

        Raises:
            StorageFullError: saying what is safe.
            StorageUnavailableError: the same.
        """
        lost = None if self._track is None else self._track.lost.error
        if lost is not None:
            newest = self.saved_checkpoints[-1:] or ["none"]
            raise passing_error(
                lost,
                f"the last checkpoint (batch {self._last_batch}) was NOT saved, {state_of(lost)} ({lost}); the newest "
                f"is {newest[0]}",
            )

    def release(self) -> None:
        """Give thread and memory back; `open` makes it ready again."""
        track, self._track = self._track, None
        if track is not None:
            track.close()


def default_saver(folder: str | os.PathLike[str] | None, **options: Any) -> CheckpointSaver | None:
    """Return the saver that the ``save_*`` arguments of a `Trainer` ask for."""
    if folder is None:
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


def _check_number(number: Any, keep: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < -1:
        raise ConfigError(f"num_checkpoints_to_keep={number!r}: give a whole number, -1 for all")
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep={keep!r} is a {type(keep).__name__}: give a holdfast.Keep")
    if keep is not None and number != -1:
        raise ConfigError("give either num_checkpoints_to_keep or keep, not both")


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"/{name}"
