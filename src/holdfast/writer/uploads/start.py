"""The start of a mirrored run: what its two sides hold, put together before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config import Keep
from holdfast.errors import ConfigError
from holdfast.run.catalog import Catalog
from holdfast.run.mirror_view import MirrorView
from holdfast.run.record import pack
from holdfast.storage.base import Storage

from .mirror import Mirroring
from .plan import MirrorLimits, await_upload
from .remote import RemoteRun

__all__ = ["RemoteSide", "start_mirror"]


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
        """Rebuild what the trainer told."""
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
