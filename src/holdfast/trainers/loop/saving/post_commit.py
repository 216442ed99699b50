"""The checkpoints of one saver that exist: the link to the newest, their uploads, and which of them stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint, CommittedCheckpoint
from holdfast.checkpointer.transient import TRANSIENT_ERRORS, state_of
from holdfast.config import Keep
from holdfast.errors import StorageError
from holdfast.run.retention import decide

from ..times.timestamp import Timestamp
from .finder import FolderEntry, look, look_at
from .folder import SaveFolder, link_latest
from .naming import TIME_VARIABLES, Destinations, NameTemplate, SaverNames
from .uploads import RemoteUploaderDownloader

__all__ = ["PostCommit"]

_LOG = get_logger("trainers.loop")


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
    ) -> None:
        self._names, self._folder, self._uploaders = names, folder, tuple(uploaders)
        self._claim, self._keep, self._keeps_none = claim, keep, keeps_none
        self._announce = announce
        self._lock = threading.Lock()
        self._found: list[FolderEntry] = []  # oldest first
        self._uploading: list[str] = []
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

    def find_earlier(self, now: Timestamp, *, weights_only: bool) -> bool:
        """Take over what earlier lives have left, and finish what they had begun to do with it.

        Args:
            now: the moment that training goes on from.
            weights_only: the saver saves nothing but weights.

        Returns:
            Whether the checkpoint of that moment is there.
        """
        ranks = self._folder.ranks
        found = ranks.lead("kept", lambda: self._earlier(weights_only=weights_only))
        with self._lock:
            self._found = [entry for entry in (FolderEntry(**row) for row in found) if entry.step <= now.count("batch")]
            newest = next((entry for entry in self._found[-1:] if entry.step == now.count("batch")), None)
            if self._keeps_none:  # what an earlier life has left was never uploaded
                self._found = [newest] if newest is not None else []
        ranks.lead("links", lambda: self._finish_begun(newest, self._names.destinations(now)))
        return newest is not None

    def _finish_begun(self, newest: FolderEntry | None, there: Destinations) -> None:
        if newest is not None:
            self._send_again(newest, there)
        self._repair_link()

    def _earlier(self, *, weights_only: bool) -> list[dict[str, Any]]:
        """Describe the good checkpoints of this saver that earlier lives have left, oldest first."""
        folder, names = self._folder, self._names
        named = folder.named(names.fixed_latest)
        found = look(folder.storage, nested=names.nested, wanted=names.pattern.fullmatch, named=named)
        good = [entry for entry in reversed(found) if entry.problem is None and entry.name not in folder.quarantined]
        return [asdict(entry) for entry in good if entry.weights_only is weights_only]

    def _send_again(self, saved: FolderEntry, there: Destinations) -> None:
        """Upload the checkpoint of this moment, where the life that saved it did not come to that."""
        if there.remote is None or self._names.remote is None:
            return
        is_unique = _has_times(self._names.remote)
        missing = []
        for uploader in self._uploaders:
            sent = look_at(uploader.storage, uploader.path_of(there.remote)) if is_unique else None
            if sent is not None and sent.problem is None:
                uploader.point(saved, there.remote, there.remote_latest)
            else:
                missing.append(uploader)
        with self._lock:
            self._uploading += [saved.name] * len(missing)
        self._send(saved, missing, there)

    def _repair_link(self) -> None:
        """Let the link mean the newest checkpoint there is: a life that died may have left it behind."""
        latest, found = self._names.fixed_latest, self.all
        if latest is not None and found and not self._keeps_none:
            link_latest(self._folder.storage, latest, found[-1].name)

    # -- after a commit, on another thread

    def add(self, saved: FolderEntry, there: Destinations, manifest: bytes) -> None:
        """Link, upload and announce a checkpoint that is committed, and delete what the rules do not keep.

        Raises:
            StorageError: of the link, after all else but deletions: the link may still mean one of those.
        """
        storage, leads = self._folder.storage, self._folder.ranks.leads
        unlinked: StorageError | None = None
        if there.latest is not None and not self._keeps_none and leads:
            try:
                link_latest(storage, there.latest, saved.name)
            except TRANSIENT_ERRORS as error:
                unlinked = error
        uploaders = self._uploaders if leads and there.remote is not None else ()
        with self._lock:  # at once: an upload that ends meanwhile must not delete it
            self._found = [*(entry for entry in self._found if entry.name != saved.name), saved]
            self._uploading += [saved.name] * len(uploaders)
            self._unlinked = unlinked is not None
        if leads:
            self._send(saved, uploaders, there)
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

    def _send(self, saved: FolderEntry, uploaders: Sequence[RemoteUploaderDownloader], there: Destinations) -> None:
        for uploader in uploaders:
            assert there.remote is not None
            uploader.upload(
                self._folder.storage, saved, there.remote, there.remote_latest,
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
                verdicts = decide(self._keep, [entry.record(self._folder.storage) for entry in self._found], protect)
                doomed = {verdict.name for verdict in verdicts if not verdict.keep}
            for entry in [entry for entry in self._found if entry.name in doomed]:
                self._folder.delete(entry, claim=self._claim)
                self._found.remove(entry)


def _has_times(template: NameTemplate) -> bool:
    return bool(set(template.variables) & set(TIME_VARIABLES))
