"""Saves of ranks whose machines share no disk: `StagedRun` in rank 0's writer, `StagedParts` in each.

Each rank stages its part on the disk of its own machine, and training goes on. The manifest to be lies with rank 0, in
a file of another name, until every rank has brought what it lists; then it is put at the remote, where the run is. The
queue (`queue`) says what is brought when, as for a run with one local disk. A staged save is no checkpoint, and no disk
alone ever holds one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.copying.transfer import REPEATED_FROM, copy_checkpoint, planned, send_entries
from holdfast.errors import CheckpointError, HoldfastError, StorageError
from holdfast.format.commit import PartSummary, commit_manifest, read_manifest
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import is_staged, part_name, read_part, remove_part, staged_name, sweep_given_up
from holdfast.run.catalog import Catalog
from holdfast.run.lease import Heartbeat
from holdfast.run.record import Record, Sidecar, record_from_manifest
from holdfast.storage.base import Storage

from ..messages import MirrorLimits, error_to_json
from ..open_run import Run
from ..pipeline import MAX_REUSES
from ..ranks.link import Message
from ..ranks.server import ControlServer
from ..save import committed_already
from .mirror import ON_LOCAL_DISK
from .queue import END_S, Stop, UploadQueue

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
        self._parts: dict[str, Sequence[Sequence[int]]] = {}  # which parts each rank has, if not its own
        for name, save, manifest in staged_saves(local):
            if save.startswith(f"{start_id}-"):
                self._saves[name] = save, manifest
                self._known.add(name)
        waiting = [record_from_manifest(name, manifest, Sidecar()) for name, (_, manifest) in self._saves.items()]
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

    def bring(self, name: str, save: str | None, parts: Sequence[Sequence[int]] = ()) -> None:
        """Bring what an earlier life has left, before anything is trained: a staged save, or a whole checkpoint.

        Args:
            name: of the checkpoint.
            save: its id; None for a whole checkpoint on our disk.
            parts: by rank, the parts of the save that it brings: machines may have come back in another order.

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
            self._parts[name] = parts
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
                self._server.tell(self._order("keep", name, save))
                continue
            self._server.tell(self._order("clear", name, save))
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
                commit_manifest(self._storage, name, manifest, void=partial(self._run.is_void, name))
        self._run.arrived(name, manifest, lambda: self._say_late(name))

    def _bring(self, name: str, save: str, stop: Stop) -> None:
        try:
            self._server.uploads.bring(self._order("upload", name, save), self._server.tell, stop)
        except CheckpointError:
            if self._server.uploads.lacks_ranks:
                self._left.add(name)
            raise

    def _order(self, do: str, name: str, save: str) -> Message:
        return {"do": do, "save": save, "directory": name, "parts": self._parts.get(name, ())}

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


class StagedParts:
    """Our part of staged saves: one thread brings it to the remote when rank 0 asks for it, one after another.

    Args:
        local: the disk of this machine.
        remote: where the run is.
        rank: ours.
        start_id: of this life; what an earlier writer of it has staged is kept, too.
        say: tells rank 0's writer.
    """

    def __init__(
        self, local: Storage, remote: Storage, rank: int, start_id: str, say: Callable[[Message], None]
    ) -> None:
        self._local, self._remote, self._rank, self._say = local, remote, rank, say
        self._changed = threading.Condition()
        # What we have brought last, by digest and size: where it is, and how often in a row the remote has repeated it.
        self._brought: dict[tuple[str, int], tuple[str, int]] = {}
        own = part_name(rank, start_id).removesuffix(".json")
        self._held: set[str] = set()
        try:
            names = [name for _, name in files_in_front(local)]
            self._held = {save for name in names if name.startswith(own) and (save := save_id_of(name)) is not None}
        except HoldfastError as error:  # they are only waited for at the end
            _LOG.warning("what an earlier writer has staged may have to wait for the next start: %s", error)
        self._closing = 0  # orders that end something and are not carried out yet
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="holdfast-staged", daemon=True).start()

    def hold(self, save: str, directory: str) -> dict[str, Any]:
        """Keep our part, which is durable, until rank 0 says that it is not needed any more.

        Returns:
            What rank 0 has to know of it.

        Raises:
            HoldfastError: it is not there.
        """
        part = self._read(save, directory, self._rank).to_json()
        with self._changed:
            self._held.add(save)
        return part

    def let_go(self, save: str) -> None:
        """Our part is not needed any more."""
        with self._changed:
            self._held.discard(save)
            self._changed.notify_all()

    def take(self, order: Message) -> None:
        """Take an order: "upload"; "clear": our part is to be removed; "keep": it is left to the next start."""
        if order["do"] != "upload":
            with self._changed:
                self._closing += 1
        self._orders.put(order)

    def await_end(self, until: float, is_over: Callable[[], bool]) -> None:
        """Wait until nothing is needed any more, or ``is_over`` says that nobody will ask for it.

        What rank 0 has asked for before it left is done first.
        """
        with self._changed:
            while (self._closing or (self._held and not is_over())) and time.monotonic() < until:
                self._changed.wait(0.2)

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            save, directory = order["save"], order["directory"]
            parts = order["parts"][self._rank] if order.get("parts") else [self._rank]
            if order["do"] != "upload":
                if order["do"] == "clear":
                    self._clear(save, directory, parts)
                with self._changed:
                    self._closing -= 1
                self.let_go(save)
                continue
            error = None
            try:
                files = [entry for writer in parts for entry in self._read(save, directory, writer).files]
                self._bring(directory, files)
            except Exception as problem:  # noqa: BLE001 - a thread edge: rank 0 hears of it, and may ask again
                error = error_to_json(problem)
            self._say({"do": "uploaded", "save": save, "error": error})

    def _bring(self, directory: str, files: Sequence[FileEntry]) -> None:
        """Bring our files; those that are in the save before as well the remote repeats by itself, if it is a store."""
        before, stores = self._brought, self._remote.local_root is None
        twins = {key: path for key, (path, times) in before.items() if stores and times < MAX_REUSES}
        ways = send_entries(self._local, self._remote, directory, files, twins=twins)
        self._brought = {}
        for entry in files:
            if entry.size >= REPEATED_FROM:
                key, path = (entry.digest, entry.size), join(directory, entry.path)
                known, times = before.get(key, ("", 0))
                if ways[entry.path] == "copied":
                    times += 1
                elif ways[entry.path] == "sent":
                    times = 0
                elif known != path:  # an earlier writer of this save brought it, who knows how
                    times = MAX_REUSES
                self._brought[key] = path, times

    def _read(self, save: str, directory: str, writer: int) -> PartSummary:
        part = read_part(self._local, directory, save, writer)
        if part is None:
            raise CheckpointError(f"{join(self._local.uri, directory)}: the part of rank {writer} is gone")
        return part

    def _clear(self, save: str, directory: str, parts: Sequence[int]) -> None:
        try:
            for writer in parts:
                remove_part(self._local, directory, save, writer)
        except HoldfastError as error:
            _LOG.warning("what is not needed any more of %s stays on the local disk for now: %s", directory, error)


def files_in_front(local: Storage) -> Iterator[tuple[str, str]]:
    """Iterate over what lies on a disk in front of the remote: checkpoint's directory, name of the file.

    Nothing else is looked at: the directory may be the user's own, with much in it, or with what we may not read.
    """
    for child in local.list("", recursive=False):
        directory = child.path.rstrip("/")
        if directory.startswith("step_"):
            for info in local.list(directory, recursive=False):
                yield directory, info.path.rpartition("/")[2]
