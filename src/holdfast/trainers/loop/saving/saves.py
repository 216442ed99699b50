"""The saves of one saver: copied and handed over one after another, then linked, uploaded, and older ones deleted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint, CommittedCheckpoint
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS, RunSave, failed, state_of
from holdfast.config import Keep
from holdfast.errors import StorageError, StorageFullError, UnsupportedStateError
from holdfast.format.commit import read_manifest
from holdfast.model_files import ModelFiles
from holdfast.run.retention import decide, warn_unranked
from holdfast.state.save.snapshot import Snapshotter

from ..parallel import TIMEOUT_S
from ..stop_policy import TrainerGuard
from ..time import Timestamp
from .files import FileImage
from .finder import Destinations, FolderEntry, SaverNames, look_at
from .folder import SaveFolder, link_latest
from .layout import as_torch_file, expand, gathered
from .uploads import RemoteUploaderDownloader

_LOG = get_logger("trainers.loop")


class LastSave(NamedTuple):
    """What a saver has saved last.

    Attributes:
        entry: the checkpoint.
        destinations: its further names.
        stage: what training was in, see `DataPosition`; one of an evaluation is saved again once that is done. For a
            life that goes on from before the end of its epoch "last_batch": saved again if that is due.
        parent: id of the checkpoint that it goes on from.
    """

    entry: FolderEntry
    destinations: Destinations
    stage: str
    parent: str | None


class AsyncSaver:
    """Carries out saves of one kind into one folder, at most one under way.

    Args:
        folder: where to; opened.
        container: "directory", "torch" or "safetensors".
        claim: the name of its files that the folder has claimed; None for directories.
        parent: id of the checkpoint that training goes on from.
        make_room: deletes what the rules of retention do not keep; tells whether anything has gone.
        model_files: committed beside the tensors of a directory.
        rescues: see `keep`.

    Attributes:
        pending: the saves on their way; a storage that is full or does not answer costs the save, and is said.
    """

    def __init__(
        self,
        folder: SaveFolder,
        container: str,
        *,
        claim: str | None,
        parent: str | None,
        make_room: Callable[[], bool],
        model_files: ModelFiles | None = None,
        rescues: bool = False,
    ) -> None:
        self._folder, self._container, self._claim = folder, container, claim
        self._make_room = make_room
        self._ranks = folder.ranks
        self._snapshotter = Snapshotter(
            rank=self._ranks.rank, world_size=self._ranks.world_size, timeout_s=TIMEOUT_S,
            max_file_bytes=folder.storage.traits.max_file_bytes, model_files=model_files, rescues=rescues,
        )  # fmt: skip
        self._image = FileImage()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-saves")
        self.pending = folder.pending(claim)
        self.pending.parent = parent

    def prepare(self, live: Mapping[str, Any]) -> None:
        """Get ready for a first save that is not due yet: memory for a directory is got meanwhile.

        Raises:
            UnsupportedStateError: something in the state cannot be saved; that would come out hours later.
        """
        with _in_our_words():
            if self._container == "directory":
                self._snapshotter.prepare(live, self._folder.session.client)
            elif self._container == "torch" and self._ranks.world_size == 1:  # with more of them it takes a meeting
                as_torch_file(gathered(expand(live), self._ranks) or {})

    def save(self, save: RunSave, live: Mapping[str, Any], *, after: Callable[[bytes], object]) -> None:
        """Start a save; waits for the one before. The caller may change the state when this returns.

        Args:
            save: what is known of it; its ``extra`` says its content, "full" or "weights", and its training.
            live: the state in the anatomy of a checkpoint.
            after: called on another thread once it is durable, with its manifest; b"" of a single file.

        Raises:
            HoldfastError: the save before, or this one, failed.
        """
        save.lost = _say_lost
        finish = partial(self._finish, save, after)
        with _in_our_words():
            if self._container != "directory":
                self._save_file(save, live, finish, after)
                return
            save.follow = lambda durable: self._thread.submit(finish, durable)
            self._folder.session.save_state(lambda: live, self._snapshotter, save, saves=self.pending)

    def replace(self, last: LastSave) -> None:
        """Let the next save take the place of the last one, which is waited for, and have the parent of that."""
        with _in_our_words():
            self.pending.settle()
        self.pending.parent = last.parent

    def keep(self, save: RunSave, live: Mapping[str, Any]) -> bool:
        """Copy the state as `save` does, for the case that this process dies; False if memory is too short for it."""
        with _in_our_words():
            return self._folder.session.keep_state(lambda: live, self._snapshotter, save, saves=self.pending)

    def rescue(self, why: str) -> None:
        """Commit the newest state that was kept, if it is newer than what is saved; several ranks: their writers do."""
        session = self._folder.session
        name = session.answer(session.client.rescue(why))
        self._folder.rescues_later = session.rank_group is not None
        if name is not None:
            _LOG.warning("training raised; the state of the last snapshot is saved as %s", name)

    def _save_file(
        self, save: RunSave, live: Mapping[str, Any], finish: Callable[[Future[Any]], Any],
        after: Callable[[bytes], object],
    ) -> None:  # fmt: skip
        """Copy the state into a file in memory, and let the writer of rank 0 store it."""
        self.pending.settle()
        save.begun = time.perf_counter()
        note = {
            "attempt": self._folder.attempt, "step": save.step, "epoch": save.epoch, "created": time.time(),
            "metrics": save.metrics, "weights_only": save.extra["content"] == "weights",
            "training": save.extra["training"],
        }  # fmt: skip
        found = gathered(expand(live), self._ranks)
        if found is None:  # rank 0 stores it
            after(b"")
            return
        self._image.take(found, self._container, note)
        future: Future[Any]
        try:
            future = self._submit(save.name)
        except TRANSIENT_ERRORS as error:
            future = failed(error)
        save.future = self._thread.submit(finish, future)
        self.pending.add(save)

    def _submit(self, name: str) -> Future[Any]:
        assert self._claim is not None
        return self._folder.claims.submit(self._claim, name, self._image)

    def _finish(self, save: RunSave, after: Callable[[bytes], object], durable: Future[Any]) -> Any:
        """Wait for the commit, and do what comes after it. Runs on our thread."""
        try:
            result = durable.result()
        except StorageFullError:
            made = self._room_made()
            if self._container == "directory" or not made:  # the room is for the next one: the state has gone on
                raise
            result = self._submit(save.name).result()
        if self._claim is None and "/" in save.name:  # not of the run's index: nobody else asks whether it is ours
            self._folder.confirm()
        try:
            after(result.manifest if self._container == "directory" else b"")
        except TRANSIENT_ERRORS as error:  # the save itself is not lost
            _LOG.warning(
                "the checkpoint of batch %d is saved, but its link, its upload or the deletion of older ones was not "
                "done, %s (%s): the next save does that", save.step, state_of(error), error,
            )  # fmt: skip
        return result

    def _room_made(self) -> bool:
        made = self._make_room()
        if made:
            _LOG.warning("%s is full: old checkpoints were removed by the rules of retention", self._folder.spelling)
        return made

    def close(self) -> None:
        """Give memory and thread back; what is under way goes on."""
        self._thread.shutdown(wait=False)
        if not self.pending.busy:
            self._snapshotter.close()
            self._image.close()


def _say_lost(save: RunSave, error: BaseException) -> str:
    return f"a checkpoint was NOT saved, {state_of(error)} ({error}); older ones are untouched"


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except UnsupportedStateError as error:
        text = str(error).replace("pass unsupported='drop' to leave it out", "leave it out by save_ignore_keys")
        raise UnsupportedStateError(text) from None


class PostCommit:
    """Follows the commits of one saver, on the thread of its saves and on those of uploads.

    Args:
        names: of its checkpoints.
        folder: where they lie.
        uploaders: where they are uploaded to.
        claim: the name of single files whose lease says that they are ours; None for directories.
        keep: rules of retention; None keeps everything.
        keeps_none: a checkpoint is deleted here after its upload.
        announce: gets each committed checkpoint, once its links, its uploads and the retention are under way.
        guard: knows which of them may be gone back to, and stay whatever ``keep`` says.
    """

    def __init__(
        self,
        names: SaverNames,
        folder: SaveFolder,
        uploaders: Sequence[RemoteUploaderDownloader],
        *,
        claim: str | None,
        keep: Keep | None,
        keeps_none: bool,
        announce: Callable[[Checkpoint], None],
        guard: TrainerGuard | None = None,
    ) -> None:
        self._guard = guard
        self._names, self._folder, self._uploaders = names, folder, tuple(uploaders)
        self._claim, self._keep, self._keeps_none = claim, keep, keeps_none
        self._announce = announce
        self._lock = threading.Lock()
        self._found: list[FolderEntry] = []  # oldest first
        self._uploading: list[str] = []
        self._says_unranked = True
        self._unlinked = False  # the link means an older checkpoint than the newest: nothing is deleted meanwhile

    @property
    def all(self) -> list[FolderEntry]:
        """Those that exist, oldest first."""
        with self._lock:
            found = list(self._found)
        if self._folder.ranks.leads:
            return found
        # Rank 0 stores and deletes them.
        return [entry for entry in found if look_at(self._folder.storage, entry.name) is not None]

    def has(self, step: int) -> bool:
        """Tell whether a checkpoint of this moment exists; before anything is saved all ranks know the same."""
        return any(entry.step == step for entry in self._found)

    # -- when training goes on

    def find_earlier(self, now: Timestamp, *, weights_only: bool) -> FolderEntry | None:
        """Take over what earlier lives have left, and finish what they had begun to do with it.

        Args:
            now: the moment that training goes on from.
            weights_only: the saver saves nothing but weights.

        Returns:
            The checkpoint of that moment, if it is there.
        """
        ranks = self._folder.ranks
        found = ranks.lead("kept", lambda: self._earlier(weights_only=weights_only))
        with self._lock:
            self._found = [entry for entry in (FolderEntry(**row) for row in found) if entry.step <= now.count("batch")]
            newest = next((entry for entry in self._found[-1:] if entry.step == now.count("batch")), None)
            if self._keeps_none:  # what an earlier life has left was never uploaded
                self._found = [newest] if newest is not None else []
        ranks.lead("links", lambda: self._finish_begun(newest, self._names.destinations(now)))
        return newest

    def _finish_begun(self, newest: FolderEntry | None, destinations: Destinations) -> None:
        if newest is not None:
            self._send_again(newest, destinations)
        self._repair_link()

    def parent_of(self, found: FolderEntry) -> str | None:
        """Return the id of the checkpoint that this one goes on from, if it says so; all ranks call it."""
        folder = self._folder
        if found.container != "directory":
            return None
        parent: str | None = folder.ranks.lead("parent", lambda: read_manifest(folder.storage, found.name).parent)
        return parent

    def _earlier(self, *, weights_only: bool) -> list[dict[str, Any]]:
        """Describe the good checkpoints of this saver that earlier lives have left, oldest first."""
        folder, names = self._folder, self._names
        found = folder.look(nested=names.nested, wanted=names.pattern.fullmatch, latest=names.fixed_latest)
        good = [entry for entry in reversed(found) if entry.problem is None and entry.name not in folder.quarantined]
        return [asdict(entry) for entry in good if entry.weights_only is weights_only]

    def _send_again(self, saved: FolderEntry, destinations: Destinations) -> None:
        """Upload the checkpoint of this moment, where the life that saved it did not come to that."""
        if destinations.remote is None or self._names.remote is None:
            return
        is_unique = self._names.remote.has_times
        missing = []
        for uploader in self._uploaders:
            sent = look_at(uploader.storage, uploader.path_of(destinations.remote)) if is_unique else None
            if sent is not None and sent.problem is None:
                uploader.point(saved, destinations.remote, destinations.remote_latest)
            else:
                missing.append(uploader)
        with self._lock:
            self._uploading += [saved.name] * len(missing)
        self._send(saved, missing, destinations)

    def _repair_link(self) -> None:
        """Let the link mean the newest checkpoint there is: a life that died may have left it behind."""
        latest, found = self._names.fixed_latest, self.all
        if latest is not None and found and not self._keeps_none:
            link_latest(self._folder.storage, latest, found[-1].name)

    # -- after a commit, on another thread

    def add(self, saved: FolderEntry, destinations: Destinations, manifest: bytes) -> None:
        """Link, upload and announce a checkpoint that is committed, and delete what the rules do not keep.

        Raises:
            StorageError: of the link, after all else but deletions: the link may still mean one of those.
        """
        storage, leads = self._folder.storage, self._folder.ranks.leads
        unlinked: StorageError | None = None
        if destinations.latest is not None and not self._keeps_none and leads:
            try:
                link_latest(storage, destinations.latest, saved.name)
            except TRANSIENT_ERRORS as error:
                unlinked = error
        uploaders = self._uploaders if leads and destinations.remote is not None else ()
        with self._lock:  # at once: an upload that ends meanwhile must not delete it
            self._found = [*(entry for entry in self._found if entry.name != saved.name), saved]
            self._uploading += [saved.name] * len(uploaders)
            self._unlinked = unlinked is not None
        if leads:
            self._send(saved, uploaders, destinations)
            self._retain()
            if any(entry.name == saved.name for entry in self._found):
                known = CommittedCheckpoint.told(
                    storage, saved.name, step=saved.step, metrics=saved.metrics, manifest=manifest
                )
                self._announce(known)
        if unlinked is not None:
            raise unlinked

    def make_room(self) -> bool:
        """Delete, because a save found its disk full, what the rules do not keep; tell whether anything has gone.

        There is something where deletions are behind: a life before had other rules, or could not delete.
        """
        if not self._folder.ranks.leads:
            return False
        before = len(self._found)
        try:
            self._retain()
        except StorageError as error:
            _LOG.warning("older checkpoints were not deleted: %s", error)
        return len(self._found) < before

    def _send(
        self, saved: FolderEntry, uploaders: Sequence[RemoteUploaderDownloader], destinations: Destinations
    ) -> None:
        for uploader in uploaders:
            assert destinations.remote is not None
            uploader.upload(
                self._folder.storage, saved, destinations.remote, destinations.remote_latest,
                after=lambda: self._uploaded(saved.name),
            )  # fmt: skip

    def _uploaded(self, name: str) -> None:
        with self._lock:
            self._uploading.remove(name)  # one that cannot be uploaded stays here, where it is safe
        try:
            self._retain()
        except TRANSIENT_ERRORS as error:  # the upload has not failed
            _LOG.warning("older checkpoints were not deleted, %s (%s): the next save does that", state_of(error), error)

    def _retain(self) -> None:
        """Delete what the rules do not keep, and nothing that is still being uploaded."""
        # After `close` (an upload may outlive the training) the next life deletes.
        if not self._folder.is_held(self._claim) or self._unlinked or (self._keep is None and not self._keeps_none):
            return
        with self._lock:
            protect = frozenset(self._uploading)
            if self._keep is None:
                doomed = {entry.name for entry in self._found} - protect
            else:
                protect |= frozenset() if self._guard is None else self._guard.protected
                records = [entry.record(self._folder.storage) for entry in self._found]
                doomed = {verdict.name for verdict in decide(self._keep, records, protect) if not verdict.keep}
                if doomed and self._keep.best is not None and self._keep.metric is not None and self._says_unranked:
                    self._says_unranked = False
                    warn_unranked(self._keep.metric, records, self._folder.storage.uri)
            for entry in [entry for entry in self._found if entry.name in doomed]:
                if self._folder.delete(entry, claim=self._claim):
                    self._found.remove(entry)
