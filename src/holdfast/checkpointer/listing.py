"""The checkpoints of a run as handles."""

from __future__ import annotations

from ..checkpoint.catalog import Catalog
from ..checkpoint.handle import Checkpoint
from ..errors import ConfigError
from ..storage.base import Storage
from .options import Options

__all__ = ["Listing"]


class Listing:
    """What a run has on its storage; reading needs no lease, so it works before, in and after the body.

    Attributes:
        storage: root of the run.
        options: arguments of the run.
    """

    storage: Storage
    options: Options

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the run, newest first."""
        return [Checkpoint.at(self.storage, record.name) for record in Catalog(self.storage).records()]

    def latest(self) -> Checkpoint | None:
        """Return the newest committed checkpoint, None if there is none yet."""
        record = Catalog(self.storage).latest()
        return None if record is None else Checkpoint.at(self.storage, record.name)

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
        record = Catalog(self.storage).best(name, order)
        return None if record is None else Checkpoint.at(self.storage, record.name)
