"""A folder that checkpoints go to: its storage, its run, and the names of single files that only we give there.

A folder of directories is a run, with one lease. Trainers of several runs may share a folder by the names of their
files: so each name has a lease of its own, held by the writer of rank 0, which stores the files of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from holdfast.checkpointer.pending_saves import PendingSaves
from holdfast.checkpointer.rank_group import RankGroup
from holdfast.checkpointer.run_session import RunSession, answer
from holdfast.errors import ConfigError, HoldfastError, StorageError, StorageNotFoundError
from holdfast.format.commit import remove
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.run.fence import newest_fence
from holdfast.run.names import PROBE
from holdfast.run.remains import is_remains
from holdfast.storage.base import Storage, errors_of
from holdfast.storage.local.local_storage import link_at, put_link, sweep_links
from holdfast.storage.resolve import resolve, split_uri
from holdfast.writer.client import SharedWriter, WriterClient
from holdfast.writer.messages import SaveJob, SaveResult

from ..parallel import TIMEOUT_S, Ranks
from .files import FileImage
from .finder import FolderEntry, look

# What killed lives have left; anything younger may be in use.
_OLD_S = 600.0
_PROBED = re.compile(re.escape(PROBE) + r"[0-9a-f]{8,64}")


class SaveFolder:
    """One save folder, shared by all savers that write to it.

    Args:
        spelling: as the user wrote it, variables filled in.
        ranks: the processes that train.
        writer: of the trainer; default: one for this folder alone.

    Attributes:
        spelling: as the user wrote it, variables filled in.
        storage: the folder.
        attempt: number of this life; every checkpoint of it is newer than all of those before.
        run_id: identity of the run, where the folder holds directories.
        quarantined: names that were set aside, with reasons.
        claims: the names of single files that only this trainer writes.
        rescues_later: the writer is to be left alone: the writers of all ranks rescue what they hold.
    """

    def __init__(self, spelling: str, ranks: Ranks | None = None, *, writer: SharedWriter | None = None) -> None:
        self.spelling = spelling
        self.ranks = ranks if ranks is not None else Ranks()
        self.storage: Storage = resolve(spelling)
        self._writer = SharedWriter() if writer is None else writer
        self.claims = FileLeases(self.storage, self.ranks, self._writer)
        self.attempt = 0
        self.run_id: str | None = None
        self.quarantined: dict[str, str] = {}
        self.rescues_later = False
        self._session: RunSession | None = None
        self._above = 0
        root = self.storage.local_root
        if root is not None and root.is_file():
            raise ConfigError(f"save_folder={spelling!r} is a file: give a directory")

    @property
    def is_remote(self) -> bool:
        """True when it is not a local directory."""
        return split_uri(self.spelling)[0] not in ("file",)

    @property
    def session(self) -> RunSession:
        """Our hold on the run, while the folder is open for directories.

        Raises:
            HoldfastError: the folder was closed: others may have taken it since.
        """
        if self._session is None:
            raise HoldfastError(f"{self.storage.uri} was closed: nothing can be saved or deleted there any more")
        return self._session

    @property
    def is_run(self) -> bool:
        """True while the folder is open for directories."""
        return self._session is not None

    @property
    def rank_group(self) -> RankGroup | None:
        """The writers of all ranks, if there are several."""
        return None if self._session is None else self._session.rank_group

    def open(self, *, claim: str | None, nested: bool = False) -> None:
        """Get ready to save; idempotent.

        Args:
            claim: the name that single files have, whose lease is taken; None where checkpoints are directories: then
                a writer is started and takes that of the run.
            nested: their names lie in sub-folders.

        Raises:
            RunBusyError: another live process saves there.
            StorageError: it cannot be written to.
        """
        if claim is not None:
            self.claims.take(claim)
        elif self._session is None:
            self._take_lease()
        if not self.attempt:
            self._look_for_attempt(nested=nested)

    def _take_lease(self) -> None:
        """Open the run on rank 0; with several ranks our writer joins the others, and the run is theirs as well."""
        meeting = self.ranks.meeting("folder")
        session = RunSession(
            self.storage, meeting=meeting, timeout_s=TIMEOUT_S, timeout_name="",
            client=self._writer.client(self.storage, for_run=True),
        )  # fmt: skip
        try:
            opened = session.open(keep=None, links=False)  # a saver names its own
        except BaseException:
            session.close("closed")
            raise
        self._session, self.rescues_later = session, False
        self.run_id, self.quarantined = opened.run_id, dict(opened.quarantined)
        self._number_life(opened.attempt)

    def _look_for_attempt(self, *, nested: bool) -> None:
        """Number this life by what lies there, and see that the folder can be written to before any training."""

        def look_here() -> int:
            self._probe()
            with contextlib.suppress(StorageNotFoundError):
                return 1 + max((entry.attempt for entry in look(self.storage, nested=nested)), default=0)
            return 1

        self._number_life(self.ranks.lead("attempt", look_here))

    def look(
        self, *, nested: bool, wanted: Callable[[str], object] | None, latest: str | None
    ) -> list[FolderEntry]:  # fmt: skip
        """Return the checkpoints that earlier lives have left, newest first; damaged ones come with their problem.

        What an owner has committed after it was taken over does not count (`holdfast.run.fence`): it is set aside. Of a
        store, whose listing may be some seconds old, what run.json and the link to the newest name is asked for too.

        Args:
            nested: look into sub-folders too.
            wanted: tells which names matter.
            latest: name of the link to the newest.
        """
        session = self._session
        names = set() if session is None else {str(row[0]) for row in session.opened.records}
        newest = None if latest is None else linked_by(self.storage, latest)
        named = names if newest is None else {*names, newest}
        found = look(self.storage, nested=nested, wanted=wanted, named=named)
        if session is not None and (fence := newest_fence(self.storage)) is not None:
            for entry in found:
                is_ours = entry.run_id == session.opened.run_id and "/" not in entry.name
                if is_ours and not fence.admits(entry.name, entry.attempt, entry.checkpoint_id):
                    self.quarantined.setdefault(entry.name, "its owner had been taken over when it was committed")
                    found = [other for other in found if other is not entry]
        return found

    def rise_above(self, attempt: int) -> None:
        """Number this life after another one, which only uploads may know of: this folder may be a new one."""
        self._above = max(self._above, attempt)
        self._number_life(self.attempt)

    def _number_life(self, at_least: int) -> None:
        self.attempt = max(self.attempt, at_least, self._above + 1)
        if (session := self._session) is not None:
            session.opened = replace(session.opened, attempt=self.attempt)

    def pending(self, claim: str | None) -> PendingSaves:
        """Return what follows the saves of one saver here, after `open`; for ``claim`` see there."""
        if claim is None:
            return self.session.pending()
        rank = None if self.ranks.world_size == 1 else self.ranks.rank
        return PendingSaves(self.storage.uri, timeout_s=TIMEOUT_S, rank=rank)

    def _probe(self) -> None:
        """See that this folder takes a file, and gives it up; remove such files of killed lives."""
        mine = f"{PROBE}{secrets.token_hex(4)}"
        self.storage.put(mine, b"")
        self.storage.delete(mine)
        for info in list(self.storage.list("", recursive=False)):
            old = 0.0 < info.modified < time.time() - _OLD_S
            if _PROBED.fullmatch(info.path) and info.size == 0 and old:
                with contextlib.suppress(StorageError):  # another user's, perhaps
                    self.storage.delete(info.path)

    def quarantine(self, name: str, reason: str) -> None:
        """Set a bad checkpoint aside: it is never picked again, its files stay."""
        self.quarantined[name] = reason
        if self._session is not None and "/" not in name and self.ranks.leads:
            self._session.quarantine(name, reason)

    def delete(self, entry: FolderEntry, *, claim: str | None = None) -> bool:
        """Delete a checkpoint; the index of the run forgets it first, so that remains of a deletion are swept.

        Args:
            entry: which.
            claim: the name of single files whose lease says that it is ours to delete.

        Returns:
            False if it stays for now: another process holds it or has just pinned it, or it could not be deleted.

        Raises:
            RunBusyError: another process has taken the folder over: nothing is deleted.
            HoldfastError: the folder was closed: others may have taken it since.
        """
        if entry.container != "directory":
            if claim is not None:
                self.claims.confirm(claim)
            self.storage.delete(entry.name)
            return True
        if "/" not in entry.name:
            return not self.session.ask("discard", names=[entry.name], why="not kept by its saver")
        self._remove(entry.name)  # the writer knows what lies directly in the run
        return True

    def _remove(self, name: str) -> None:
        self.session.ask("confirm", names=[name])
        remove(self.storage, name)

    def clear(self, name: str, files: Iterable[str]) -> None:
        """Remove a directory, good or damaged, so that files with these names can be written there.

        Raises:
            RunBusyError: another process has taken the folder over: nothing is removed.
        """
        if not self.delete(FolderEntry(name=name, container="directory")):
            self._remove(name)  # who holds it keeps it from retention, not from being replaced
        for file in files:  # of a damaged checkpoint nothing else tells that they belong to it
            with contextlib.suppress(StorageNotFoundError):
                self.storage.delete(f"{name}/{file}")

    def is_held(self, claim: str | None) -> bool:
        """Tell whether checkpoints here are ours to delete; not after `close`. For ``claim`` see `open`."""
        return self._session is not None if claim is None else self.claims.holds(claim)

    def confirm(self, *doomed: str) -> None:
        """See that nobody has taken the run over up to now, and say what is about to be deleted beside its index.

        Raises:
            RunBusyError: somebody has.
        """
        if self._session is not None and self.ranks.leads:
            self._session.ask("confirm", names=list(doomed))

    def sweep(self, wanted: Callable[[str], object], *, nested: bool) -> None:
        """Remove what killed saves and deletions left in sub-folders, and empty directories with names of ours.

        The writer sweeps everything else that lies directly here; it does not know which names are ours.
        """
        for info in self.storage.list("", recursive=False) if self.storage.local_root is not None else ():
            name = info.path.rstrip("/")
            if name != info.path and wanted(name) and next(iter(self.storage.list(name)), None) is None:
                self.storage.tidy(name)
        for name in {PurePosixPath(info.path).parent.as_posix() for info in self.storage.list("")} if nested else ():
            if "/" in name and wanted(name) and not self.storage.exists(f"{name}/{MANIFEST_NAME}"):
                files = [info.path for info in self.storage.list(name, recursive=False)]
                if is_remains(files):
                    for path in files:
                        self.storage.delete(path)

    def note_source(self, uri: str, step: int) -> None:
        """Record in the run what this life goes on from; rank 0 does.

        Args:
            uri: of the checkpoint, of this run or of another place.
            step: batches trained by then.
        """
        if self._session is not None and self._session.leads:
            name = uri.removeprefix(f"{self.storage.uri.rstrip('/')}/")
            # The savers decide what stays: it is not held.
            self._session.ask("resumed", name=name, step=step, hold=False)

    def close(
        self, reason: str, *, patient: bool = True, wait_s: float = 0.0, step: int | None = None, epoch: int = 0
    ) -> None:  # fmt: skip
        """Give the leases back and end the writer, after all it was given is durable; idempotent.

        Args:
            reason: how this life ended, for the run.
            patient: wait for what is under way.
            wait_s: for the writer to end, if not patient: until then others find the leases taken.
            step: batches trained, if that is to be recorded.
            epoch: epochs trained.
        """
        session, self._session = self._session, None
        # Another trainer may save here from now on: what comes after that is another attempt.
        self._above = max(self._above, self.attempt)
        self.attempt = 0
        try:
            self.claims.release(patient=patient, wait_s=wait_s)
        finally:
            if session is not None:
                details = {} if step is None else {"last_step": step}
                finished = {"step": step, "epoch": epoch} if reason == "finished" and step is not None else None
                limit_s = TIMEOUT_S if patient and not self.rescues_later else wait_s
                self._end_session(session, reason, patient=patient, limit_s=limit_s, details=details, finished=finished)

    def _end_session(
        self, session: RunSession, reason: str, *, patient: bool, limit_s: float, details: Mapping[str, Any],
        finished: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        try:
            if patient and not session.client.closed:
                session.end(reason, details=details, finished=finished)
        finally:
            session.close(f"it has left the training ({reason})", timeout_s=limit_s)


def link_latest(storage: Storage, latest: str, name: str) -> None:
    """Let ``latest`` mean ``name``, in one step, after ``name`` is complete.

    A relative symbolic link in a local folder; anywhere else a small object ``<latest>.symlink`` that holds the path.
    """
    root = storage.local_root
    if root is None:
        storage.put(f"{latest}.symlink", f"{storage_prefix(storage)}{name}".encode())
        return
    with errors_of("link", str(root / latest)):
        _refuse_other(root / latest)
        put_link(storage, latest, name)


def linked_by(storage: Storage, latest: str) -> str | None:
    """Return the name that ``latest``, a link of `link_latest` or an upload's pointer, means; None for none in here."""
    root = storage.local_root
    if root is not None:
        if (text := link_at(storage, latest)) is None:  # or something else has its name
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(latest), text))
        if os.path.isabs(name) or (root / name).is_symlink():
            return None
    else:
        try:
            text = storage.read(f"{latest}.symlink").decode().strip()
        except (StorageNotFoundError, UnicodeDecodeError):
            return None
        prefix = storage_prefix(storage)
        if not text.startswith(prefix):
            return None
        name = text.removeprefix(prefix)
    return None if any(part in ("", ".", "..") for part in name.split("/")) else name


def check_link(storage: Storage, latest: str) -> None:
    """Refuse a name for the link to the newest that something else has; remove what a killed life left of a link.

    Raises:
        ConfigError: a file or a directory is in the way.
    """
    if (root := storage.local_root) is None:
        return
    with errors_of("link", str(root / latest)):
        sweep_links(storage, latest.rpartition("/")[0], older_s=_OLD_S)  # no link leads out of the save folder
        _refuse_other(root / latest)


def _refuse_other(link: Path) -> None:
    if not link.is_symlink() and link.exists():
        kind = "directory" if link.is_dir() else "file"
        raise ConfigError(
            f"save_latest_filename: {link} is a {kind}, so no link can be made of it (a copy of the folder that "
            "followed links?): move it away, or use another name"
        )


def storage_prefix(storage: Storage) -> str:
    """Return the path of a folder inside its bucket, with a slash at its end; "" for the bucket itself."""
    scheme, path = split_uri(storage.uri)
    for _ in range(2 if scheme == "libcloud" else 1):  # the bucket; libcloud's has its provider before it
        _, _, path = path.partition("/")
    return f"{path.strip('/')}/" if path.strip("/") else ""


LEASE_S = 60.0
"""How long to wait for a lease whose owner may be dead, or may still finish its last file."""


class FileLeases:
    """The names in one folder that only this trainer gives to files.

    Args:
        storage: the folder.
        ranks: the processes that train; all of them make the same calls, apart from `submit` and `confirm`, which are
            for rank 0.
        writer: of the trainer; default: one for these names alone.
    """

    def __init__(self, storage: Storage, ranks: Ranks, writer: SharedWriter | None = None) -> None:
        self._storage, self._ranks = storage, ranks
        self._writer = SharedWriter() if writer is None else writer
        self._held: set[str] = set()
        self._client: WriterClient | None = None  # of rank 0, while a name is held

    def take(self, shape: str) -> None:
        """Be the only one who writes files of this name; idempotent.

        Args:
            shape: the name, its counters left open.

        Raises:
            RunBusyError: another live process does.
        """
        if shape in self._held:
            return
        self._held.add(shape)
        try:
            self._ranks.lead("claim", lambda: self._take(shape), work_s=LEASE_S + TIMEOUT_S)
        except BaseException:
            self._give_back(shape)  # the name would be nobody's, and yet taken
            raise

    def _take(self, shape: str) -> None:
        if self._client is None:
            self._client = self._writer.client(self._storage)
        taken = self._client.take_name(self._storage, _of(shape), start_id=secrets.token_hex(4), wait_s=LEASE_S)
        answer(taken, self._storage, LEASE_S + TIMEOUT_S, bound="")

    def _give_back(self, shape: str) -> None:
        self._held.discard(shape)
        if self._client is None:
            return
        if not self._held:
            self.release(patient=True)
        elif not self._client.closed:
            answer(self._client.give_back_name(self._storage, _of(shape)), self._storage, TIMEOUT_S, bound="")

    def submit(self, shape: str, name: str, image: FileImage) -> Future[SaveResult]:
        """Let the writer store a file: from now on it is completed even if this process is killed.

        Args:
            shape: a name that is held.
            name: path of the file; one that is there is replaced.
            image: the file; must not change before the future is done.

        Raises:
            HoldfastError: the names have been given back.
        """
        job = SaveJob(directory=name, save_id="", container=image.container(lease=_of(shape)))
        return self._writer_of(shape).submit(self._storage, job, arena=image.arena)

    def confirm(self, shape: str) -> None:
        """Make sure, by one request, that nobody has taken a name from us up to now.

        Raises:
            RunBusyError: somebody has: files of this name are not ours to write or delete any more.
            HoldfastError: the names have been given back.
            StorageError: nobody can say just now.
        """
        answer(self._writer_of(shape).verify_name(self._storage, _of(shape)), self._storage, TIMEOUT_S, bound="")

    def _writer_of(self, shape: str) -> WriterClient:
        client = self._client
        if shape not in self._held or client is None:
            raise HoldfastError(f"{self._storage.uri} was closed: nothing can be saved there any more")
        return client

    def holds(self, shape: str) -> bool:
        """Tell whether a name is held."""
        return shape in self._held

    def release(self, *, patient: bool, wait_s: float = 0.0) -> None:
        """Let others have the names, after what is being written; idempotent. A lease that cannot go goes stale.

        Args:
            patient: wait for that; else the writer does it by itself.
            wait_s: for that, if not patient.
        """
        self._held.clear()
        client, self._client = self._client, None
        if client is not None:  # in a forked child this ends nothing
            client.close(TIMEOUT_S if patient else wait_s)


def _of(shape: str) -> str:
    """Return what stands for a name in those of its lease's files."""
    return xxhash.xxh3_64_hexdigest(shape.encode())[:8]
