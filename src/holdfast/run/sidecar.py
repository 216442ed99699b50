"""``.metrics.json`` beside a manifest: metrics that came late, and the pin. It is the truth; run.json caches it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import CorruptCheckpointError, StorageConflictError, StorageExistsError, StorageNotFoundError
from holdfast.format.names import check_links, join
from holdfast.storage.base import Storage

from .record import from_plain, to_plain

__all__ = ["METRICS_FILE", "Sidecar", "change_sidecar", "read_sidecar", "write_sidecar"]

_TRIES = 32

METRICS_FILE = ".metrics.json"
_MAX_BYTES = 16 << 20
_log = get_logger("catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What may still be said about a checkpoint after its commit."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False

    def with_metrics(self, metrics: Mapping[str, Any]) -> Sidecar:
        """Merge later metrics over the present ones."""
        return replace(self, metrics={**self.metrics, **metrics})

    def with_pin(self, on: bool) -> Sidecar:
        """Set or remove the pin."""
        return replace(self, pinned=on)


def read_sidecar(storage: Storage, name: str) -> Sidecar:
    """Read the sidecar of checkpoint ``name``; an absent one says nothing.

    A damaged one is reported and counts as a pin: when we cannot know, nothing is deleted.
    """
    path = join(name, METRICS_FILE)
    try:
        check_links(storage, name, (METRICS_FILE,))
        with storage.open(path) as reader:
            data = bytearray(min(reader.size, _MAX_BYTES))
            reader.read_into(0, memoryview(data))
    except StorageNotFoundError:
        return Sidecar()
    except CorruptCheckpointError as error:  # a link that leads out of the checkpoint
        _log.warning("%s: %s: the checkpoint counts as pinned until it goes", storage.uri, error)
        return Sidecar(pinned=True)
    try:
        body = json.loads(data)
        return Sidecar(metrics=from_plain(dict(body.get("metrics") or {})), pinned=bool(body.get("pinned")))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("%s/%s is damaged (%s): the checkpoint counts as pinned until it goes", storage.uri, path, error)
        return Sidecar(pinned=True)


def write_sidecar(storage: Storage, name: str, sidecar: Sidecar) -> None:
    """Replace the sidecar atomically; durable on return."""
    storage.put(join(name, METRICS_FILE), _body(sidecar))


def change_sidecar(storage: Storage, name: str, how: Callable[[Sidecar], Sidecar]) -> Sidecar:
    """Replace the sidecar by what ``how`` makes of it, unless it has changed meanwhile: then once more.

    So the owner of a run and a process that evaluates its checkpoints do not lose what the other one says.

    Raises:
        StorageConflictError: others change it faster than this process.
    """
    path = join(name, METRICS_FILE)
    for last in range(_TRIES):
        try:
            etag = storage.stat(path).etag
            is_there = True
        except StorageNotFoundError:
            etag, is_there = None, False
        made = how(read_sidecar(storage, name))
        try:
            storage.put(path, _body(made), if_absent=not is_there, if_match=etag)
            return made
        except (StorageConflictError, StorageExistsError):
            if last == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _body(sidecar: Sidecar) -> bytes:
    body = {"metrics": to_plain(sidecar.metrics), "pinned": sidecar.pinned}
    return json.dumps(body, allow_nan=False).encode()
