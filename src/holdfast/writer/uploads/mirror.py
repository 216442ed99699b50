"""A mirrored run as a source of uploads: what was committed on the local disk goes to the remote run.

The working thread of the writer tells of commits; a thread of the queue calls `remote`, one step at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config import Keep
from holdfast.errors import ConfigError, HoldfastError
from holdfast.run.candidates import MirrorView
from holdfast.run.catalog import Catalog
from holdfast.run.record import Record, pack
from holdfast.storage.base import Storage

from ..messages import MirrorLimits
from .queue import END_S, Stop, UploadQueue
from .remote import RemoteRun

__all__ = ["ON_LOCAL_DISK", "Mirroring", "RemoteSide", "await_upload", "done_with", "start_mirror"]

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
