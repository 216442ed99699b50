"""Checkpoints and runs on the wire: {"storage": description or None, "uri": of the storage, "name": directory}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.handle import Checkpoint, CommittedCheckpoint
from holdfast.errors import ConfigError
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import as_given
from holdfast.storage.resolve import from_description

__all__ = ["TravellingSecrets", "checkpoint_at", "describe_location", "learn_secrets", "open_root", "pack_secrets"]


def describe_location(storage: Storage, name: str) -> dict[str, Any]:
    """Describe a directory of a storage."""
    return {"storage": storage.describe(), "uri": storage.uri, "name": name}


def checkpoint_at(location: Mapping[str, Any]) -> Checkpoint:
    """Return a handle of a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    if "manifest" in location:  # in the driver, right after the commit
        known = {key: location[key] for key in ("step", "metrics", "manifest")}
        return CommittedCheckpoint.told(_storage(location), location["name"], **known)
    return Checkpoint.at(_storage(location), location["name"])


def open_root(location: Mapping[str, Any]) -> Storage:
    """Return the storage rooted at a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    return as_given(_storage(location).child(location["name"]))


def pack_secrets(*storages: Storage) -> bytes:
    """Return the credentials that the descriptions of these storages leave out; b"" if there are none.

    For the control sockets of our own processes: never for a file, an argument, the environment or a log.
    """
    described = [{"storage": storage.describe(), "secrets": storage.secrets()} for storage in storages]
    described = [entry for entry in described if entry["storage"] is not None and entry["secrets"]]
    return json.dumps(described).encode() if described else b""


def learn_secrets(data: bytes) -> None:
    """Let this process find the credentials of `pack_secrets` when it opens those storages, or unpickles them."""
    for described in json.loads(data) if data else ():
        # Storages note the credentials they were given, and `describe` those found among a client's arguments.
        from_description(described["storage"], described["secrets"]).describe()


class TravellingSecrets:
    """Credentials in front of a pickled task: the process that unpickles it has learnt them before the rest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return learn_secrets, (self._data,)


def _storage(location: Mapping[str, Any]) -> Storage:
    if location["storage"] is None:
        raise ConfigError(
            f"{location['uri'].rstrip('/')}/{location['name']} lives in the memory of the driver: worker processes can "
            "neither read nor write it; use a directory as storage_path"
        )
    return from_description(location["storage"])
