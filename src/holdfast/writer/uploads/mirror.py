"""A mirrored run as a source of uploads: what was committed on the local disk goes to the remote run.

The working thread of the writer tells of commits; a thread of the queue calls `RemoteRun`, one step at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast.config import Keep
from holdfast.copying.transfer import Copied, copy_checkpoint, planned
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
    StorageError,
    StorageNotFoundError,
)
from holdfast.format.commit import read_manifest
from holdfast.format.digest import digested
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.parts import sweep_given_up
from holdfast.run.candidates import MirrorView
from holdfast.run.catalog import Catalog, draw_fence
from holdfast.run.index import RunIndex
from holdfast.run.lease import Heartbeat, Lease
from holdfast.run.names import REPORTS
from holdfast.run.record import Record, Sidecar, pack, read_sidecar
from holdfast.run.remains import sweep_hidden
from holdfast.run.reports import highest_attempt
from holdfast.run.retention import Verdict
from holdfast.storage.base import Storage

from ..messages import MirrorLimits
from .queue import END_S, Stop, UploadQueue

_LOG = get_logger("writer")
_PIECE = 8 << 20
_IN_FRONT_OF = "in front of"
"""Name of the note of a local side that remembers the URI of its remote."""


def _nothing() -> None:
    pass


class RemoteRun:
    """Holds the lease of the remote side and keeps it a run of its own, which needs nothing of the local side.

    Attributes:
        heartbeat: the lease.
        catalog: its checkpoints.
        both: names of checkpoints that lie at both sides, as far as the local side has not let them go.
        protected: names that retention keeps, whatever its rules.
        first: called before it is decided what stays: it brings what came late (`late`).
    """

    def __init__(self, heartbeat: Heartbeat, storage: Storage, local: Storage, keep: Keep | None) -> None:
        self.heartbeat = heartbeat
        self.catalog = Catalog(storage, doomed=heartbeat.lease.predecessor.doomed)
        self.catalog.announce, self.catalog.links = heartbeat.announce, True
        self._storage, self._local, self._keep = storage, local, keep
        self._segments: dict[str, int] = {}  # report segments that the remote has, and how long they are
        self._own: set[str] = set()  # those that came from here
        self.both: set[str] = set()
        self.protected: frozenset[str] = frozenset()
        self.first: Callable[[], None] = _nothing
        self._sidecars: dict[str, Sidecar] = {}  # of the local side, as they were when the remote learnt of them

    @classmethod
    def open(
        cls,
        storage: Storage,
        local: Storage,
        *,
        owner: Mapping[str, Any],
        keep: Keep | None,
        wait_s: float,
        pause: Callable[[float], None],
    ) -> RemoteRun:
        """Take the lease and look at what is there.

        Raises:
            RunBusyError: another trainer holds it.
            StorageError: the remote does not answer or refuses: nobody knows what the newest checkpoint is.
        """
        heartbeat = None
        try:
            lease = Lease.acquire(storage, {**owner, "pid": os.getpid()}, wait_s=wait_s, sleep=pause)
            heartbeat = Heartbeat(lease)
            remote = cls(heartbeat, storage, local, keep)
            remote._segments = {info.path: info.size for info in storage.list(REPORTS, recursive=False)}
        except BaseException as error:
            if heartbeat is not None:
                with contextlib.suppress(StorageError):
                    heartbeat.close()
            if isinstance(error, StorageError):
                raise type(error)(
                    f"the remote side of this run, {storage.uri}, cannot be looked at, so nobody knows which "
                    f"checkpoint is the newest: {error}. Nothing was started. What to do: try again when it answers; "
                    f"or go on with the local side alone, Checkpointer({local.uri!r}, ...) without local_dir; it is "
                    "brought to the remote by the next start with both"
                ) from error
            raise
        return remote

    @property
    def highest_attempt(self) -> int:
        """The highest attempt that ever was."""
        index = self.catalog.index
        seen = [attempt.attempt for attempt in index.attempts] + [row[1] for row in index.rows.values()]
        if self.catalog.fence is not None:
            seen.append(self.catalog.fence.below)
        return max([*seen, highest_attempt(self._storage)], default=0)

    def newest(self) -> Record | None:
        """Return the newest checkpoint."""
        return self.catalog.newest()

    def close(self, *, wait: bool) -> None:
        """Give the lease back."""
        self.heartbeat.close(wait=wait)

    def join(self, local: RunIndex) -> None:
        """Let the local index know of the lives that the remote knows.

        Raises:
            ConfigError: the two sides hold different runs, or the local one belongs to another remote.
        """
        index = self.catalog.index
        before = local.notes.get(_IN_FRONT_OF, index.storage.uri)
        if not (index.run_id or index.rows) and before != index.storage.uri:
            raise ConfigError(
                f"{local.storage.uri} holds the run that was brought to {before} ({local.run_id}), and "
                f"{index.storage.uri} is empty: a new run needs a local_dir of its own, or this one emptied. If that "
                "run is to go on at a new place, copy it there first (holdfast push or cp)"
            )
        if local.run_id and index.run_id and local.run_id != index.run_id:
            raise ConfigError(
                f"{local.storage.uri} holds another run ({local.run_id}) than {index.storage.uri} ({index.run_id}): "
                "give each run a local_dir of its own, or empty this one"
            )
        local.run_id = local.run_id or index.run_id
        last = [max((attempt.attempt for attempt in side.attempts), default=0) for side in (local, index)]
        older, newer = (local, index) if last[1] > last[0] else (index, local)
        known = {attempt.attempt: attempt for attempt in (*older.attempts, *newer.attempts)}
        local.attempts = [known[number] for number in sorted(known)]
        local.notes, local.finished = {**older.notes, **newer.notes}, newer.finished
        local.notes[_IN_FRONT_OF] = index.storage.uri
        # One journal: what happens at the remote comes back to it with the report segments of the local side.
        local.journal.take(index.journal.waiting())
        index.journal, self.catalog.side = local.journal, "remote"

    def register(self, waiting: Sequence[Record]) -> list[str]:
        """Write the new attempt down before anything is trained, and sweep what dead lives left.

        Half-sent checkpoints that are waiting here are not swept: what is complete of them is not sent again.
        """
        index = self.catalog.index
        last = None if index.damage is not None else index.current
        kept = {record.name: record.checkpoint_id for record in waiting}
        self.catalog.incomplete = [name for name in self.catalog.incomplete if name not in kept]
        self.bring_head()
        current = index.current
        if current is not None:
            draw_fence(self.heartbeat, self.catalog, current, last=last, more=kept)
        start_ids = {current.start_id} if current is not None else set()
        return [*self.catalog.sweep(), *sweep_hidden(self._storage, start_ids)]

    def is_whole(self, name: str) -> bool:
        """Whether every file of a checkpoint of the remote is there."""
        try:
            read_manifest(self._storage, name, check_sizes=True)
        except CheckpointError:
            return False
        return True

    def take(self, name: str, *, stop: Callable[[], bool]) -> tuple[Copied, list[Verdict]]:
        """Upload one checkpoint and apply the rules of retention.

        Raises:
            TransferStopped: ``stop`` said so; what is complete stays.
            CheckpointError: it cannot be done, now or later.
            HoldfastError: it could not be done now.
        """
        self.heartbeat.confirm()
        if (why := self.catalog.index.quarantined.get(name)) is not None:
            # Of the same name and sizes, so it would be taken for complete as it is.
            raise CheckpointExistsError(
                f"{join(self._storage.uri, name)} is quarantined ({why}): delete it there, then `holdfast push` brings "
                "the one of the local disk"
            )
        before = read_sidecar(self._local, name)
        previous = next((other for other in self.catalog.names() if other != name), None)
        try:
            copied = self._copy(name, previous, stop)
        except StorageError as error:
            if error.errno != errno.EIO or self._is_readable(name):
                raise
            raise CheckpointError(f"the local disk cannot read it: {error}") from error  # what waits behind it can go
        self.heartbeat.confirm()  # what is there by now counts; and from here on run.json is written and old ones go
        self._sidecars[name] = before
        self.both.add(name)
        self.catalog.add(name, read_manifest(self._storage, name))
        return copied, self.retain()

    def _copy(self, name: str, previous: str | None, stop: Callable[[], bool]) -> Copied:
        for last in (False, True):
            in_the_way = self.catalog.is_void(name)
            if in_the_way:
                self.heartbeat.announce([name])  # its checkpoint was committed too late, and does not count
            try:
                with planned(self._storage, name, read_manifest(self._local, name).files):
                    return copy_checkpoint(
                        self._local, name, self._storage, name, previous=previous, stop=stop, overwrite=in_the_way
                    )
            except CheckpointExistsError:
                # It may have been committed just now, by an owner that was taken over and has woken up.
                if last or not self.catalog.is_void(name):
                    raise
        raise AssertionError("not reached")

    def _is_readable(self, name: str) -> bool:
        """Read a local checkpoint, after an error of a disk: the remote may be a disk, too."""
        buffer = memoryview(bytearray(_PIECE))
        try:
            for entry in read_manifest(self._local, name).files:
                with self._local.open(join(name, entry.path)) as reader:
                    for _ in digested(reader, buffer):
                        pass
        except StorageError as error:
            return error.errno != errno.EIO
        return True

    def retain(self) -> list[Verdict]:
        """Save the index and apply the rules to all that was said by now; give what was deleted."""
        self.first()
        self.bring_sidecars()
        self.bring_head(save=False)
        if self._keep is not None:
            return self.catalog.prune(self._keep, self.protected)
        self.catalog.point_latest()
        self.catalog.index.save()
        return []

    def bring_head(self, *, save: bool = True) -> None:
        """Copy what the local run.json says about the run itself; rows and quarantine are each side's own."""
        local, index = RunIndex.load(self._local, head_only=True), self.catalog.index
        fields = ("run_id", "attempts", "notes", "finished")
        if local.damage is None and any(getattr(local, field) != getattr(index, field) for field in fields):
            self.heartbeat.confirm()
            for field in fields:
                setattr(index, field, getattr(local, field))
        elif index.damage is None:
            return
        if save:
            self.catalog.point_latest()
            index.save()

    def bring_reports(self) -> None:
        """Copy the report segments that are new or longer, then remove those that were merged into others."""
        found = {info.path: info.size for info in self._local.list(REPORTS, recursive=False)}
        fresh = [path for path, size in sorted(found.items()) if self._segments.get(path) != size]
        gone = sorted(self._own - found.keys())
        if fresh or gone:
            self.heartbeat.confirm()
        for path in fresh:
            with contextlib.suppress(StorageNotFoundError):  # merged away just now
                data = self._local.read(path)
                self._storage.put(path, data)
                self._segments[path] = len(data)
                self._own.add(path)
        for path in gone:
            self._storage.delete(path)
            self._own.discard(path)

    def bring_sidecars(self) -> bool:
        """Tell the remote of late metrics and pins of checkpoints that lie at both sides; whether there were any."""
        has_any = False
        for name in sorted(self.both):
            if not self._local.exists(f"{name}/{MANIFEST_NAME}"):
                self.both.discard(name)
                continue
            now, before = read_sidecar(self._local, name), self._sidecars.get(name)
            pinned = None if before is None or now.pinned == before.pinned else now.pinned
            if before is None:
                # Of an earlier life: nobody knows who said what first, so a pin of either side counts. One that the
                # remote alone has is not noted as ours: the next look would take it for removed here.
                before = read_sidecar(self._storage, name)
                pinned = True if now.pinned and not before.pinned else None
            metrics = {}
            if now.metrics != before.metrics:  # as a whole: NaN by itself differs each time
                metrics = {key: value for key, value in now.metrics.items() if before.metrics.get(key) != value}
            if metrics or pinned is not None:
                self.heartbeat.confirm()
                self._tell(name, metrics, pinned)
                has_any = True
            self._sidecars[name] = now
        return has_any

    def late(self, name: str, metrics: Mapping[str, Any], pinned: bool | None) -> None:
        """Take metrics or a pin of a checkpoint that the local side may have no more."""
        self.heartbeat.confirm()
        self._tell(name, metrics, pinned)

    def _tell(self, name: str, metrics: Mapping[str, Any], pinned: bool | None) -> None:
        try:
            self.catalog.record(name)
        except CheckpointNotFoundError:
            return  # deleted by retention
        try:
            if metrics:
                self.catalog.set_metrics(name, metrics)
            if pinned is not None:
                self.catalog.pin(name, on=pinned)
        except CheckpointError as error:  # removed by hand, or damaged: trying again for ever would hold up the rest
            _LOG.warning("late metrics or a pin of %s could not be stored: %s", name, error)

    def drop(self, name: str) -> None:
        """Remove what was sent of a checkpoint that was given up."""
        self.heartbeat.announce([name])
        sweep_given_up(self._storage, name)


ON_LOCAL_DISK = "they are on the local disk only; the next start with the same local_dir brings them there"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSide:
    """Where a run is mirrored to.

    Attributes:
        storage: the remote run.
        keep: which checkpoints stay there.
        limits: how far it may be behind.
    """

    storage: Storage
    keep: Keep | None
    limits: MirrorLimits

    @classmethod
    def from_told(cls, storage: Storage, told: Mapping[str, Any]) -> RemoteSide:
        """Rebuild it from the request of the trainer."""
        keep = told["keep"]
        return cls(storage=storage, keep=keep and Keep.from_json(keep), limits=MirrorLimits(**told["limits"]))

    def open(
        self, local: Storage, owner: Mapping[str, Any], *, wait_s: float, pause: Callable[[float], None]
    ) -> RemoteRun:
        """Take its lease and look at what is there; see `RemoteRun.open`."""
        if not owner.get("start_id"):
            raise ConfigError("open_run needs an owner with a start_id")
        return RemoteRun.open(self.storage, local, owner=owner, keep=self.keep, wait_s=wait_s, pause=pause)


def start_mirror(
    remote: RemoteRun, catalog: Catalog, limits: MirrorLimits, *, changed: Callable[[], object]
) -> tuple[Mirroring, dict[str, Any]]:
    """Write the attempt down at the remote, sweep there, and make the queue of uploads, which begins with its `go`.

    Args:
        remote: the opened remote side, whose lives the local index has taken over.
        catalog: the local side, with the new attempt.
        limits: how far the remote may be behind.
        changed: see `Mirroring`.

    Returns:
        The mirror, and the fields of `RunOpened` that the two sides make different.
    """
    here, there = catalog.records(), remote.catalog.records()
    dead = remote.catalog.dead
    waiting = [record for record in await_upload(here, there) if record.name not in dead]
    swept = remote.register(waiting)
    sides = MirrorView.join(here, there)
    both = [name for name, place in sides.places.items() if place == "both"]
    if limits.delete_after_upload:
        both = [name for name in both if remote.is_whole(name)]  # soon it will be the only one
    remote.both.update(both)
    mirror = Mirroring(remote, limits, waiting=waiting, uploaded=both, changed=changed)
    bad = {**remote.catalog.index.quarantined, **catalog.index.quarantined}
    told = {
        "records": tuple(pack(record) for record in sides.records),
        "quarantined": {name: why for name, why in bad.items() if name not in sides.places},
        "taken": tuple(sorted({*catalog.taken(), *remote.catalog.taken()})),
        "swept": tuple(swept),
        "remote": {"places": dict(sides.places), "waiting": sorted(mirror.queue.needed())},
    }
    return mirror, told


def await_upload(local: Iterable[Record], remote: Iterable[Record]) -> list[Record]:
    """List the local checkpoints that the remote has yet to get, oldest first.

    Those are the ones newer than anything the remote has: what is older was left out on purpose, by a policy or
    because another life went on from elsewhere.
    """
    newest = max((record.order for record in remote), default=(-1, -1, ""))
    return sorted((record for record in local if record.order > newest), key=lambda record: record.order)


def done_with(local: Collection[str], uploaded: Collection[str], limits: MirrorLimits) -> list[str]:
    """List the local checkpoints that need not stay now that the remote has them."""
    return sorted(set(local) & set(uploaded)) if limits.delete_after_upload else []


class Mirroring:
    """Brings the checkpoints of a run to its remote side, and what is said about them later.

    Args:
        remote: the opened remote side.
        limits: how far it may be behind.
        waiting: checkpoints of earlier lives that the remote has yet to get, oldest first.
        uploaded: names of local checkpoints that the remote has.
        changed: called, by an uploading thread, when local checkpoints need not stay any more.

    Attributes:
        queue: what waits.
        uri: where the remote side is.
    """

    def __init__(
        self,
        remote: RemoteRun,
        limits: MirrorLimits,
        *,
        waiting: Sequence[Record],
        uploaded: Collection[str],
        changed: Callable[[], object],
    ) -> None:
        self._remote, self._limits = remote, limits
        self.uri = remote.catalog.storage.uri
        self._lock = threading.Lock()
        self._uploaded = set(uploaded)
        self._late: list[tuple[str, dict[str, Any], bool | None]] = []
        self.queue = UploadQueue(
            self,
            limits,
            waiting=[record.name for record in waiting],
            settled=lambda name: changed(),
            between=self._bring_changes,
            drop=remote.drop,
            ended=lambda answers: remote.close(wait=answers),
        )
        remote.heartbeat.on_lost = self.queue.wake
        remote.first = self._bring_late

    # ---- for the run

    def committed(self, record: Record) -> None:
        """Queue a checkpoint that was committed on the local disk."""
        with self._lock:
            self._uploaded.discard(record.name)
            self.queue.add(record.name)

    def done_with(self, local: Collection[str]) -> list[str]:
        """Names of local checkpoints that need not stay."""
        with self._lock:
            return done_with(local, self._uploaded - self.queue.needed(), self._limits)

    def has(self, name: str) -> bool:
        """Whether the remote has this checkpoint."""
        return name in self._remote.catalog.index.rows

    def late(self, name: str, metrics: Mapping[str, Any], *, pinned: bool | None = None) -> None:
        """Pass on what came late about a checkpoint that the remote has."""
        with self._lock:
            self._late.append((name, dict(metrics), pinned))
        self.queue.call_soon()

    def quarantine(self, name: str, reason: str) -> None:
        """Never pick this checkpoint of the remote again; while the trainer looks for one, before the queue starts."""
        self._remote.catalog.index.quarantine(name, reason)

    def attempt_of(self, name: str) -> int | None:
        """The attempt that saved a checkpoint of the remote; before the queue starts."""
        row = self._remote.catalog.index.rows.get(name)
        return None if row is None else int(row[1])

    def check(self) -> None:
        """Raise if the lease of the remote was lost."""
        self._remote.heartbeat.check()

    def trainer_gone(self) -> None:
        """Only this writer is left."""
        self._remote.heartbeat.trainer_gone()

    def protect(self, names: frozenset[str]) -> None:
        """Have retention at the remote keep these too."""
        self._remote.protected = names

    def close(self) -> None:
        """Upload what can be within `END_S`, bring the last words, give the lease of the remote back."""
        self.queue.close(END_S, ON_LOCAL_DISK)

    # ---- for the queue: see `Source`

    @property
    def lost(self) -> HoldfastError | None:
        """Why the remote is not ours any more."""
        return self._remote.heartbeat.lost

    def take(self, name: str, *, stop: Stop) -> None:
        """Upload one checkpoint, and let the remote apply its rules."""
        self._remote.take(name, stop=stop)
        with self._lock:
            self._uploaded.add(name)

    def newest(self) -> Record | None:
        """Return the newest checkpoint of the remote."""
        return self._remote.newest()

    def _bring_changes(self) -> None:
        """Bring late metrics and pins, what the run says about itself, and reports."""
        with self._lock:
            is_late = bool(self._late)
        if is_late or self._remote.bring_sidecars():
            self._remote.retain()
        self._remote.bring_head()
        self._remote.bring_reports()

    def _bring_late(self) -> None:
        """Tell the remote what came late, before it decides what stays there."""
        while True:
            with self._lock:
                if not self._late:
                    return
                late = self._late[0]
            self._remote.late(*late)
            with self._lock:
                self._late.pop(0)
