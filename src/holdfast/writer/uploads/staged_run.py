"""Saves of ranks whose machines share no disk, seen from rank 0's writer.

Each rank stages its part on the disk of its own machine, and training goes on. The manifest to be lies with rank 0, in
a file of another name, until every rank has brought what it lists; then it is put at the remote, where the run is. The
queue (`queue`) says what is brought when, as for a run with one local disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast._log import get_logger
from holdfast.copying.transfer import copy_checkpoint, planned
from holdfast.errors import CheckpointError, HoldfastError, StorageError
from holdfast.format.commit import commit_manifest, read_manifest
from holdfast.format.manifest import Manifest
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import is_staged, staged_name, sweep_given_up
from holdfast.run.catalog import Catalog
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.record import Record, Sidecar, record_from_manifest
from holdfast.storage.base import Storage

from ..messages import MirrorLimits
from ..open_run import Run
from ..ranks.server import ControlServer
from ..save import committed_already
from .mirror import ON_LOCAL_DISK
from .queue import END_S, Stop, UploadQueue
from .staged_part import files_in_front

__all__ = ["StagedRun", "staged_saves"]

_LOG = get_logger("writer")
_LOOK_S = 0.02


class StagedRun:
    """Saves that all ranks have staged, as a source of uploads: each checkpoint comes from several disks.

    The run is at the remote itself, which keeps its lease, index and retention; nothing but saves is brought.

    Args:
        run: the run, at the remote.
        server: through which all ranks are asked for their parts.
        remote: where the run is.
        local: the disk of rank 0's machine.
        limits: how far the remote may be behind.
        heartbeat: the lease of the run.
        catalog: its checkpoints.
        start_id: of this life; what an earlier writer of it had staged is brought, too.

    Attributes:
        queue: what waits.
        uri: where the run is.
    """

    def __init__(
        self,
        run: Run,
        server: ControlServer,
        remote: Storage,
        local: Storage,
        limits: MirrorLimits,
        heartbeat: Heartbeat,
        catalog: Catalog,
        start_id: str,
    ) -> None:
        self._heartbeat, self._catalog = heartbeat, catalog
        self._storage, self._local = remote, local
        self.uri = catalog.storage.uri
        self._late: dict[str, list[Callable[[], object]]] = {}  # what was said about saves that are on their way
        self._run, self._server = run, server
        self._lock = threading.Lock()
        self._saves: dict[str, tuple[str, Manifest]] = {}  # by name, what waits
        self._ended = self._over = False
        self._known: set[str] = set()
        self._left: set[str] = set()  # what cannot be completed in this life
        for name, save, manifest in staged_saves(local):
            if save.startswith(f"{start_id}-"):
                self._saves[name] = save, manifest
                self._known.add(name)
        waiting = [_record(name, manifest) for name, (_, manifest) in self._saves.items()]
        waiting.sort(key=lambda record: record.order)
        self.queue = UploadQueue(
            self,
            limits,
            waiting=[record.name for record in waiting],
            settled=lambda name: self._settle(),
            drop=self._drop,
        )
        heartbeat.on_lost = self.queue.wake
        self.queue.go()

    # -- for the run

    def add(self, name: str, save: str, manifest: Manifest) -> None:
        """Take a save that all ranks have staged."""
        self._local.put(join(name, staged_name(save)), manifest.to_bytes())
        self._queue(name, save, manifest)

    def bring(self, name: str, save: str | None) -> None:
        """Bring what an earlier life has left, before anything is trained: a staged save, or a whole checkpoint.

        Raises:
            HoldfastError: it could not be brought.
        """
        if save is None:
            whole = read_manifest(self._local, name)
            self._run.admit(name, whole)
            with planned(self._storage, name, whole.files):
                copy_checkpoint(self._local, name, self._storage, name)
            self._run.arrived(name, read_manifest(self._storage, name))
            self.queue.look()
            return
        manifests = {(staged, its_save): found for staged, its_save, found in staged_saves(self._local)}
        # None: the call is repeated, for the earlier writer died when the save had just arrived.
        manifest = manifests.get((name, save))
        if manifest is not None:
            self._queue(name, save, manifest)
        while name in self._saves:
            self._heartbeat.check()
            if self._over:
                raise StorageError(f"{name} could not be brought to {self._storage.uri} before the end of the run")
            time.sleep(_LOOK_S)
        newest = self._run.newest()
        wanted = None if manifest is None else manifest.checkpoint_id
        if newest is None or newest.name != name or wanted not in (None, newest.checkpoint_id):
            raise CheckpointError(f"{name}, which the ranks have staged, could not be brought to {self._storage.uri}")

    def end(self) -> None:
        """Bring what can be brought within a bound; idempotent."""
        if not self._ended:
            self._ended = True
            self.queue.close(END_S, ON_LOCAL_DISK)
            self._over = True

    def keeps(self, name: str, say: Callable[[], object]) -> bool:
        """Keep ``say`` until the staged save arrives; false if no staged save has this name. Needs the run's lock."""
        if name not in self._known:
            return False
        if name in self._saves:
            self._late.setdefault(name, []).append(say)
        return True  # of a save that was given up nothing is left that a late metric or pin could be kept with

    def _queue(self, name: str, save: str, manifest: Manifest) -> None:
        with self._lock:  # else the other thread may find it before it is waited for
            self._saves[name] = save, manifest
            self._known.add(name)
            self.queue.add(name)
        self._settle()

    def _settle(self) -> None:
        """Let all ranks remove what is not needed any more: it has arrived, or was given up.

        What could not be completed because a rank is gone, and with it this run, is left to the next start.
        """
        with self._lock:
            needed = self.queue.needed()
            done = [(name, self._saves.pop(name)[0]) for name in self._saves.keys() - needed]
        for name, save in done:
            if name in self._left:
                self._server.tell({"do": "keep", "save": save, "directory": name})
                continue
            self._server.tell({"do": "clear", "save": save, "directory": name})
            with suppress(HoldfastError):  # swept at the next start
                self._local.delete(join(name, staged_name(save)))
                self._local.tidy(name)

    # -- for the queue: see `Source`

    @property
    def lost(self) -> HoldfastError | None:
        """Why the run is not ours any more."""
        return self._heartbeat.lost

    def newest(self) -> Record | None:
        """Return the newest checkpoint."""
        return self._run.newest()

    def take(self, name: str, *, stop: Stop) -> None:
        """Have one save brought by all ranks, and commit it."""
        self._heartbeat.confirm()
        save, manifest = self._saves[name]
        if committed_already(self._storage, name, {"checkpoint_id": manifest.checkpoint_id}) is None:
            self._run.admit(name, manifest)
            with planned(self._storage, name, manifest.files):
                self._bring(name, save, stop)
                self._heartbeat.confirm()
                commit_manifest(self._storage, name, manifest, void=self._run.void_at(name))
        self._run.arrived(name, manifest, lambda: self._say_late(name))

    def _bring(self, name: str, save: str, stop: Stop) -> None:
        order = {"do": "upload", "save": save, "directory": name}
        try:
            self._server.uploads.bring(order, self._server.tell, stop)
        except CheckpointError:
            if self._server.uploads.lacks_ranks:
                self._left.add(name)
            raise

    def _say_late(self, name: str) -> None:
        """Repeat what was said about a save before it arrived; what cannot be stored is kept. Needs the run's lock."""
        waiting = self._late.get(name, [])
        for say in list(waiting):
            try:
                say()
            except CheckpointError as error:  # as it would be the next time
                _LOG.warning("what was said about %s before it arrived is lost: %s", name, error)
            waiting.pop(0)
        self._late.pop(name, None)

    def _drop(self, name: str) -> None:
        """Remove what was sent of a save that was given up."""
        self._heartbeat.announce([name])
        sweep_given_up(self._storage, name)


def staged_saves(local: Storage) -> list[tuple[str, str, Manifest]]:
    """List the saves that rank 0 has staged on this disk: name, save id, manifest to be."""
    found = []
    for name, path in files_in_front(local):
        save, where = save_id_of(path), join(name, path)
        if save is not None and is_staged(path):
            try:
                found.append((name, save, Manifest.from_bytes(local.read(where), where=where)))
            except CheckpointError as error:
                _LOG.warning("a staged save is left alone: %s", error)
    return found


def _record(name: str, manifest: Manifest) -> Record:
    return record_from_manifest(name, manifest, Sidecar())
