"""The fence of a run: which checkpoints of earlier attempts count. A successor of a sleeping owner draws it.

An owner that stood still may wake up and commit after it was taken over. Its manifest then looks like any other, so the
fence that the successor wrote decides: of the attempts below its own only those checkpoints count that existed when it
took over. The fence of the highest attempt holds; it covers all earlier fences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast._log import get_logger
from holdfast.errors import StorageError, StorageNotFoundError
from holdfast.format.digest import bytes_digest
from holdfast.storage.base import Storage

_NAME = re.compile(r"fence-(\d{5,9})-[0-9A-Za-z]+\.json")
_MAX_BYTES = 64 << 20
ANY = "*"
"""In place of a checkpoint id: any checkpoint of this name counts."""
_FORMAT = "holdfast-fence"
_DAMAGE = (ValueError, TypeError, AttributeError, KeyError, RecursionError)
_log = get_logger("lease")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Which checkpoints of the attempts below an attempt count.

    Attributes:
        below: the attempt that drew it; checkpoints of this attempt and later ones are not affected.
        known: names and ids of the earlier checkpoints that count.
        dead: names that a sleeping owner may still delete or write under: no new checkpoint may have such a name.
    """

    below: int
    known: Mapping[str, str] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()

    def admits(self, name: str, attempt: int, checkpoint_id: str | None = None) -> bool:
        """Return whether a checkpoint counts; without an id, name and attempt decide."""
        if attempt >= self.below:
            return True
        known = self.known.get(name)
        return known is not None and name not in self.dead and (known == ANY or checkpoint_id in (None, known))


def is_fence(name: str) -> bool:
    """Tell whether a file directly in a run is a fence."""
    return _NAME.fullmatch(name) is not None


def newest_fence(storage: Storage, names: Iterable[str] | None = None) -> Fence | None:
    """Read the fence that holds.

    A damaged fence is logged and skipped. Then the next lower fence holds; without any, no checkpoint is hidden.

    Args:
        storage: the run.
        names: of all fences that a listing of the run found; None: it is listed now.

    Raises:
        StorageError: the storage does not answer.
    """
    names = _listed(storage) if names is None else names
    for _, name in sorted(((number, name) for name in names if (number := _number(name)) >= 0), reverse=True):
        try:
            data = storage.read(name) if storage.stat(name).size <= _MAX_BYTES else b""
        except StorageNotFoundError:
            # A process that drew a higher fence has removed this fence just now.
            newer = [path for path in _listed(storage) if path not in set(names)]
            if newer:
                return newest_fence(storage, newer)
            continue
        try:
            return _parsed(name, data)
        except _DAMAGE as error:
            _log.warning("%s/%s is damaged and passed over: %s", storage.uri, name, error)
    return None


def _parsed(name: str, data: bytes) -> Fence:
    body = json.loads(data)
    content = body["fence"]
    if body["format"] != _FORMAT or body["digest"] != _digest(content):
        raise ValueError("its digest does not fit")
    if type(content["below"]) is not int or content["below"] != _number(name):
        raise ValueError("it is not of the attempt in its name")
    known = {str(key): str(value) for key, value in content["known"].items()}
    return Fence(below=content["below"], known=known, dead=frozenset(map(str, content["dead"])))


def damaged_fences(storage: Storage) -> dict[str, str]:
    """Return the damaged fences of a run, each with the reason."""
    damaged = {}
    for name in _listed(storage):
        try:
            _parsed(name, storage.read(name))
        except StorageNotFoundError:
            continue  # a process that drew a higher one has removed it
        except _DAMAGE as error:
            damaged[name] = str(error)
    return damaged


def write_fence(storage: Storage, fence: Fence, start_id: str) -> str:
    """Write a fence, in place of an earlier fence of this start; durable on return. Return the name of its file."""
    name = f"fence-{fence.below:05d}-{start_id}.json"
    content = {"below": fence.below, "known": dict(fence.known), "dead": sorted(fence.dead)}
    body = {"format": _FORMAT, "digest": _digest(content), "fence": content}
    storage.put(name, json.dumps(body, separators=(",", ":")).encode())
    return name


def clear_fences(storage: Storage, names: Iterable[str], *, below: int) -> None:
    """Remove fences of attempts below ``below``, whose own fence is durable."""
    for name in names:
        if 0 <= _number(name) < below:
            with suppress(StorageError):
                storage.delete(name)


def _listed(storage: Storage) -> list[str]:
    return [info.path for info in storage.list("", recursive=False) if is_fence(info.path)]


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


def _digest(content: Mapping[str, object]) -> str:
    return bytes_digest(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())
