"""Checkpoints and runs on the wire: {"storage": description or None, "uri": of the storage, "name": directory}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.handle import Checkpoint
from ..errors import ConfigError
from ..storage.base import Storage
from ..storage.resolve import from_description

__all__ = ["checkpoint_at", "describe_location", "open_root"]


def describe_location(storage: Storage, name: str) -> dict[str, Any]:
    """Describe a directory of a storage."""
    return {"storage": storage.describe(), "uri": storage.uri, "name": name}


def checkpoint_at(told: Mapping[str, Any]) -> Checkpoint:
    """Return a handle of a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    return Checkpoint.at(_storage(told), told["name"])


def open_root(told: Mapping[str, Any]) -> Storage:
    """Return the storage rooted at a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    return _storage(told).child(told["name"])


def _storage(told: Mapping[str, Any]) -> Storage:
    if told["storage"] is None:
        raise ConfigError(
            f"{told['uri'].rstrip('/')}/{told['name']} lives in the memory of the driver: worker processes can neither "
            "read nor write it; use a directory as storage_path"
        )
    return from_description(told["storage"])
