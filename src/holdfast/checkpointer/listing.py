"""The checkpoints of a run as handles."""

from __future__ import annotations

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.run.catalog import Catalog
from holdfast.run.mirror_view import MirrorView
from holdfast.run.retention import rank
from holdfast.storage.base import Storage

from .options import CheckpointerOptions

__all__ = ["RunListing"]


class RunListing:
    """What a run has on its storage; reading needs no lease, so it works before, in and after the body.

    Attributes:
        storage: root of the run; of a mirrored one the local side.
        remote: remote side of a mirrored run, None for others.
        options: arguments of the run.
        attempt: number of the attempt while this object holds the run, 0 otherwise.
    """

    attempt = 0
    storage: Storage
    remote: Storage | None
    options: CheckpointerOptions

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the run, newest first."""
        if self.remote is None:
            return [Checkpoint.at(self.storage, name) for name in Catalog(self.storage).names()]
        sides = MirrorView.join(Catalog(self.storage).records(), Catalog(self.remote).records())
        far = {name for name, place in sides.places.items() if place == "remote"}
        return [
            Checkpoint.at(self.remote if record.name in far else self.storage, record.name) for record in sides.records
        ]

    def latest(self) -> Checkpoint | None:
        """Return the newest committed checkpoint, None if there is none yet."""
        found = []
        for side in self._sides:
            record = Catalog(side).latest()
            if record is not None:
                found.append((side, record))
                if record.attempt == self.attempt:
                    break  # nobody else saves: what this life has on its disk is the newest, be the remote away or not
        if not found:
            return None
        side, record = max(found, key=lambda one: one[1].order)  # the local one of two equals
        return Checkpoint.at(side, record.name)

    def best(self, metric: str | None = None, *, mode: str | None = None) -> Checkpoint | None:
        """Return the best checkpoint by ``metric`` (default: the one ``keep`` ranks by), None if none has a value.

        Args:
            metric: name of a metric.
            mode: "min" or "max"; default: that of ``keep``.

        Raises:
            ConfigError: neither ``metric`` nor ``keep`` names one.
        """
        keep = self.options.keep
        name = metric or (keep.metric if keep is not None else None)
        if name is None:
            raise ConfigError("ck.best() needs the name of a metric, or keep=Keep(best=..., metric=...)")
        order = mode or (keep.mode if keep is not None else "min")
        if order not in ("min", "max"):
            raise ConfigError(f"mode={order!r}: use 'min' (smaller is better) or 'max'")
        found = [(side, record) for side in self._sides if (record := Catalog(side).best(name, order)) is not None]
        if not found:
            return None
        first = rank([record for _, record in found], name, order)[0].name
        side = next(side for side, record in found if record.name == first)  # the local one of two equals
        return Checkpoint.at(side, first)

    @property
    def _sides(self) -> list[Storage]:
        return [self.storage] if self.remote is None else [self.storage, self.remote]
